package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// TestMachineLife stands in the README as it is here.
func TestMachineLife(t *testing.T) {
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa // with a boot sector it passes for a raw disk image
	image := filepath.Join(t.TempDir(), "disk.raw")
	if err := os.WriteFile(image, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	spec := kvm2.Spec{
		Name:     "runner-1",
		OwnerUID: "job-42", // the UID of your own object: it decides the machine's ID
		Image:    kvm2.Image{URL: "file://" + image, Checksum: fmt.Sprintf("sha256:%x", sha256.Sum256(disk))},
		CPUs:     2, MemoryBytes: 2 << 30, RootDiskBytes: 20 << 30,
		UserData: []byte("#cloud-config\n"),
	}

	synctest.Test(t, func(t *testing.T) { // the fake works in a bubble: no time is lost
		host := fake.NewHost()
		p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "ci"}, kvm2.WithDialer(host))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })

		var m kvm2.Machine
		for m.State != kvm2.StateRunning { // a poll: each call moves the machine one step forward
			if m, err = p.Create(t.Context(), spec); err != nil {
				t.Fatal(kvm2.ClassOf(err), kvm2.RetryAfter(err), err)
			}
			time.Sleep(time.Second)
		}

		host.CrashGuest("ci-runner-1")
		if m, err = p.Get(t.Context(), m.ID); err != nil || m.State != kvm2.StateFailed {
			t.Errorf("Get() = %v (%s), %v; want a failed machine", m.State, m.Reason, err)
		}
		if err := p.Delete(t.Context(), m.ID); err != nil { // also a poll: nil means that nothing is left
			t.Error(err)
		}
		if left := host.Domains(); len(left) > 0 {
			t.Errorf("domains left: %v", left)
		}
	})
}

// MachineProvider stands in the README as it is here.
type MachineProvider interface {
	Create(ctx context.Context, spec kvm2.Spec) (kvm2.Machine, error)
	Get(ctx context.Context, id string) (kvm2.Machine, error)
	Delete(ctx context.Context, id string) error
	List(ctx context.Context) ([]kvm2.Machine, error)
}

var _ MachineProvider = (*kvm2.Provider)(nil)

func TestREADME_NamesTheFlagsThatThereAre(t *testing.T) {
	known := flags(&settings{}, &inputs{})
	for line := range strings.Lines(readText(t, filepath.Join("..", "..", "README.md"))) {
		if !strings.Contains(line, "./examples/quickstart ") {
			continue
		}
		for word := range strings.FieldsSeq(line) {
			if name, ok := strings.CutPrefix(word, "-"); ok && known.Lookup(name) == nil {
				t.Errorf("README.md uses a flag -%s, which there is not: %s", name, line)
			}
		}
	}
}

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
