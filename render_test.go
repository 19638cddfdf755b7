package kvm2_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/golden"
)

func TestRender_ShowsWhatCreateSendsWithoutAHost(t *testing.T) {
	host := fake.NewHost()
	defer host.Close()
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "lab"}, kvm2.WithDialer(host))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	spec := kvm2.Spec{
		Name: "web-1", OwnerUID: "owner-1", CPUs: 2, MemoryBytes: gib, RootDiskBytes: 10 * gib,
		Image:    kvm2.Image{URL: "https://images.example/debian.qcow2", Checksum: "sha256:" + strings.Repeat("a", 64)},
		Disks:    []kvm2.Disk{{Name: "data", SizeBytes: gib}},
		UserData: []byte("#cloud-config\n"),
	}
	r, err := p.Render(spec)
	if err != nil {
		t.Fatal(err)
	}
	golden.Assert(t, "domain.xml", []byte(r.Domain+"\n"))
	for i, v := range r.Volumes {
		golden.Assert(t, fmt.Sprintf("volume-%d.xml", i), []byte(v+"\n"))
	}
	if len(r.Volumes) != 2 || len(r.Seed) == 0 || r.ID != "kvm2://localhost/"+kvm2.MachineUUID("lab", "owner-1").String() {
		t.Errorf("%d volumes, a seed of %d bytes, ID %q", len(r.Volumes), len(r.Seed), r.ID)
	}
	if calls := host.Stats().Calls; calls != 0 {
		t.Errorf("the host was called %d times", calls)
	}
}

func TestRender_InvalidSpecIsInvalid(t *testing.T) {
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "lab"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Render(kvm2.Spec{}); !errors.Is(err, kvm2.ErrInvalidSpec) {
		t.Errorf("Render() = %v, want ErrInvalidSpec", err)
	}
}
