package fake_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

// exampleSpec is a machine whose image lies in dir.
func exampleSpec(dir string) kvm2.Spec {
	image, err := qcow2.MinimalImage(1 << 20)
	must(err)
	path := filepath.Join(dir, "image.qcow2")
	must(os.WriteFile(path, image, 0o600))
	digest := sha256.Sum256(image)
	return kvm2.Spec{
		Name: "web-1", OwnerUID: "6a1c", CPUs: 2, MemoryBytes: 1 << 30, RootDiskBytes: 10 << 30,
		Image: kvm2.Image{URL: "file://" + path, Checksum: "sha256:" + hex.EncodeToString(digest[:])},
	}
}

// exampleProvider is a provider on the host, and a machine for it.
func exampleProvider(host *fake.Host) (p *kvm2.Provider, spec kvm2.Spec, done func()) {
	dir, err := os.MkdirTemp("", "fake")
	must(err)
	p, err = kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "demo"}, kvm2.WithDialer(host))
	must(err)
	return p, exampleSpec(dir), func() { must(errors.Join(p.Close(), host.Close(), os.RemoveAll(dir))) }
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// untilRunning polls as a controller does, only more often.
func untilRunning(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		m, err := p.Create(ctx, spec)
		if err != nil || m.State == kvm2.StateRunning {
			return m, err
		}
		<-tick.C
	}
}

func Example() {
	host := fake.NewHost()
	p, spec, done := exampleProvider(host)
	defer done()
	ctx := context.Background()

	m, err := untilRunning(ctx, p, spec)
	fmt.Println(m.Name, m.State, err)
	for _, v := range host.Volumes("default") {
		if v.BackingPath != "" && v.CapacityBytes == spec.RootDiskBytes {
			fmt.Println("a root disk of", v.CapacityBytes, "bytes stands on an image")
		}
	}
	// Output:
	// web-1 Running <nil>
	// a root disk of 10737418240 bytes stands on an image
}

func ExampleHost_CrashGuest() {
	host := fake.NewHost()
	p, spec, done := exampleProvider(host)
	defer done()
	ctx := context.Background()
	m, err := untilRunning(ctx, p, spec)
	must(err)

	host.CrashGuest("demo-web-1")
	m, err = p.Get(ctx, m.ID)
	fmt.Println(m.State, m.Reason, err)

	host.AddForeignDomain("demo-db-1")
	spec.Name, spec.OwnerUID = "db-1", "7b2d"
	_, err = p.Create(ctx, spec)
	fmt.Println(errors.Is(err, kvm2.ErrForeignOwner))
	// Output:
	// Failed Crashed <nil>
	// true
}

func ExampleHost_AddFault() {
	host := fake.NewHost()
	p, spec, done := exampleProvider(host)
	defer done()
	ctx := context.Background()

	// The domain is defined, but the reply is lost.
	fault := host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, When: fake.After, Effect: fake.Drop()})
	_, err := untilRunning(ctx, p, spec)
	fmt.Println(kvm2.ClassOf(err), fault.Reached())

	m, err := untilRunning(ctx, p, spec)
	fmt.Println(m.State, err, len(host.Domains()))
	// Output:
	// Transient true
	// Running <nil> 1
}

func ExampleHost_Intercept() {
	host := fake.NewHost()
	p, _, done := exampleProvider(host)
	defer done()

	host.Intercept(func(c fake.Call) error {
		if c.Op == kvm2.OpDomainList {
			return &kvm2.LibvirtError{Code: 45, Message: "authentication failed"}
		}
		return nil
	})
	_, err := p.List(context.Background())
	fmt.Println(kvm2.ClassOf(err), errors.Is(err, kvm2.ErrUnauthorized))
	// Output: Permanent true
}

// In a testing/synctest bubble time passes only while everything waits, so a guest that takes half a minute to boot
// costs the test nothing.
func TestExample_BootTimeInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost(fake.WithBootTime(30 * time.Second))
		defer func() { must(host.Close()) }()
		p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "demo"}, kvm2.WithDialer(host))
		must(err)
		defer func() { must(p.Close()) }()

		m, err := untilRunning(t.Context(), p, exampleSpec(t.TempDir()))
		must(err)
		if len(m.Addresses) != 0 {
			t.Errorf("got %v right after the start, want none yet", m.Addresses)
		}

		time.Sleep(time.Minute)
		m, err = p.Get(t.Context(), m.ID)
		must(err)
		if subnet := netip.MustParsePrefix("192.168.122.0/24"); len(m.Addresses) != 1 || !subnet.Contains(m.Addresses[0].IP) {
			t.Errorf("got %v, want one of %v", m.Addresses, subnet)
		}
	})
}
