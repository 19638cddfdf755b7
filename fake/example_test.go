package fake_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// Parts of this stand in docs/testing-with-the-fake.md, word for word. It uses nothing that a module of
// another author could not use.

// imageServer is a web server without a network: it answers every request with one file.
type imageServer []byte

func (s imageServer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	http.ServeContent(w, r, "disk.raw", time.Time{}, bytes.NewReader(s))
	return w.Result(), nil
}

// emptyDisk is a disk of 1 MiB. With the mark of a boot sector it passes for a raw disk image.
func emptyDisk() []byte {
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa
	return disk
}

// machine is a machine that a test wants.
func machine(name string) kvm2.Spec {
	return kvm2.Spec{
		Name: name, OwnerUID: "owner-of-" + name, CPUs: 2, MemoryBytes: 1 << 30, RootDiskBytes: 10 << 30,
		Image: kvm2.Image{
			URL:      "http://images.example/disk.raw",
			Checksum: fmt.Sprintf("sha256:%x", sha256.Sum256(emptyDisk())),
		},
	}
}

// newProvider is what a controller makes when it starts.
func newProvider(host *fake.Host) *kvm2.Provider {
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "demo"},
		kvm2.WithDialer(host), kvm2.WithHTTPClient(&http.Client{Transport: imageServer(emptyDisk())}))
	if err != nil {
		panic(err)
	}
	return p
}

// reconcile stands for your controller: it polls until the machine is made, and waits as long as an error says. It
// gives up after an hour, so that a test in a bubble ends.
func reconcile(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Hour)
	defer cancel()
	for {
		m, err := p.Create(ctx, spec)
		switch kvm2.ClassOf(err) {
		case kvm2.ClassNone:
			if m.State != kvm2.StateCreating {
				return m, nil
			}
		case kvm2.ClassTransient: // it helps to call again
		default:
			return m, err
		}
		select {
		case <-time.After(max(time.Second, kvm2.RetryAfter(err))):
		case <-ctx.Done():
			return m, ctx.Err()
		}
	}
}

func TestExample_MachineComesToRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost()
		p := newProvider(host)
		defer p.Close()

		m, err := reconcile(t.Context(), p, machine("web-1"))
		if err != nil || m.State != kvm2.StateRunning {
			t.Errorf("got a machine that is %v and %v, want one that runs", m.State, err)
		}
		if n := len(host.Domains()); n != 1 {
			t.Errorf("%d domains on the host, want one", n)
		}
	})
}

// The examples below run outside of a bubble, where time passes: they poll more often than a controller does.

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// untilRunning polls Create every millisecond until the machine runs, or the first error.
func untilRunning(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		m, err := p.Create(ctx, spec)
		if err != nil || m.State == kvm2.StateRunning {
			return m, err // the error of a context that has ended among them
		}
		<-tick.C
	}
}

func Example() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx, spec := context.Background(), machine("web-1")

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
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()
	m, err := untilRunning(ctx, p, machine("web-1"))
	must(err)

	host.CrashGuest("demo-web-1") // what becomes of the machine is for the controller to decide
	m, err = p.Get(ctx, m.ID)
	fmt.Println(m.State, m.Reason, err)
	// Output: Failed Crashed <nil>
}

func ExampleHost_PowerOff() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx, spec := context.Background(), machine("web-1")
	_, err := untilRunning(ctx, p, spec)
	must(err)

	host.PowerOff("demo-web-1")   // poweroff, typed inside the guest
	m, err := p.Create(ctx, spec) // a poll does not start it again
	fmt.Println(m.State, m.Reason, err)
	// Output: Stopped Shutdown <nil>
}

func ExampleHost_FillPool() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()
	_, err := untilRunning(ctx, p, machine("web-1"))
	must(err)

	host.FillPool("default", 1<<30) // others take all but 1 GiB,
	host.RefreshPool("default")     // and libvirt has noticed
	_, err = p.Create(ctx, machine("web-2"))
	fmt.Println(errors.Is(err, kvm2.ErrQuotaExceeded), kvm2.RetryAfter(err))
	// Output: true 2m0s
}

func ExampleHost_RestartDaemon() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()
	m, err := untilRunning(ctx, p, machine("web-1"))
	must(err)

	host.RestartDaemon()      // all sessions are lost; guests run on
	m, err = p.Get(ctx, m.ID) // over a new session
	fmt.Println(m.State, err)
	// Output: Running <nil>
}

func ExampleHost_ConnectAgent() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()
	m, err := untilRunning(ctx, p, machine("web-1"))
	must(err)

	fmt.Println(m.Addresses[0].Source)
	host.ConnectAgent("demo-web-1", netip.MustParseAddr("10.0.0.7")) // the agent knows better than the leases
	m, err = p.Get(ctx, m.ID)
	fmt.Println(m.Addresses[0].Source, m.Addresses[0].IP, err)
	// Output:
	// lease
	// agent 10.0.0.7 <nil>
}

func ExampleHost_AddForeignDomain() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()

	host.AddForeignDomain("demo-web-1") // somebody else has the name
	_, err := p.Create(ctx, machine("web-1"))
	fmt.Println(kvm2.ClassOf(err), errors.Is(err, kvm2.ErrForeignOwner))
	// Output: Permanent true
}

func ExampleHost_UndefineBehind() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()
	m, err := untilRunning(ctx, p, machine("web-1"))
	must(err)

	host.DestroyBehind("demo-web-1")
	host.UndefineBehind("demo-web-1")
	m, err = p.Get(ctx, m.ID) // its disks are still there
	fmt.Println(m.State, err)
	fmt.Println(p.Delete(ctx, m.ID)) // and go with it
	// Output:
	// Creating <nil>
	// <nil>
}

func ExampleHost_AddFault() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx, spec := context.Background(), machine("web-1")

	// The domain is defined, but the reply is lost.
	fault := host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, When: fake.After, Effect: fake.Drop()})
	_, err := untilRunning(ctx, p, spec)
	fmt.Println(kvm2.ClassOf(err), fault.Reached())

	m, err := untilRunning(ctx, p, spec) // the next polls find it, and make no second one
	fmt.Println(m.State, err, len(host.Domains()))
	// Output:
	// Transient true
	// Running <nil> 1
}

func ExampleFail() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx := context.Background()

	host.AddFault(fake.Fault{
		Op: kvm2.OpDomainStart, Times: fake.Always,
		Effect: fake.Fail(1, "internal error: process exited while connecting to monitor: Cannot allocate memory"),
	})
	_, err := untilRunning(ctx, p, machine("web-1"))
	fmt.Println(kvm2.ClassOf(err), errors.Is(err, kvm2.ErrQuotaExceeded))
	// Output: Quota true
}

func ExampleHost_Intercept() {
	host := fake.NewHost()
	defer host.Close()
	p := newProvider(host)
	defer p.Close()
	ctx, spec := context.Background(), machine("web-1")

	// In the moment before the domain is defined, somebody else takes its name.
	host.Intercept(func(c fake.Call) error {
		if c.Op == kvm2.OpDomainDefine {
			host.Intercept(nil)
			host.AddForeignDomain(c.Object)
		}
		return nil
	})
	_, err := untilRunning(ctx, p, spec)
	fmt.Println(kvm2.ClassOf(err), errors.Is(err, kvm2.ErrConflict))
	_, err = untilRunning(ctx, p, spec)
	fmt.Println(kvm2.ClassOf(err), errors.Is(err, kvm2.ErrForeignOwner))
	// Output:
	// Transient true
	// Permanent true
}

func TestExample_BootTimeInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost(fake.WithBootTime(30 * time.Second))
		p := newProvider(host)
		defer p.Close()

		m, err := reconcile(t.Context(), p, machine("web-1"))
		if err != nil || len(m.Addresses) != 0 {
			t.Errorf("got %v and %v right after the start, want no address yet", m.Addresses, err)
		}

		time.Sleep(time.Minute) // takes none
		m, err = p.Get(t.Context(), m.ID)
		if err != nil || len(m.Addresses) != 1 {
			t.Errorf("got %v and %v a minute later, want one address", m.Addresses, err)
		}
	})
}

func TestExample_HostThatHangsIsGivenUpAndAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost()
		p := newProvider(host)
		defer p.Close()

		hang := host.AddFault(fake.Fault{Op: kvm2.OpDomainStart, Effect: fake.Hang()})
		start := time.Now()
		m, err := reconcile(t.Context(), p, machine("web-1"))
		if err != nil || m.State != kvm2.StateRunning || !hang.Reached() {
			t.Errorf("got a machine that is %v and %v, want one that runs in the end", m.State, err)
		}
		if took := time.Since(start); took < 30*time.Second { // Config.CallTimeout
			t.Errorf("it took %v, want longer than the call that hung", took)
		}
	})
}

func TestExample_CrashAtEveryCall(t *testing.T) {
	n, reached := 0, true
	for reached {
		n++
		synctest.Test(t, func(t *testing.T) { reached = crashAtCall(t, n) })
	}
	t.Logf("crashed at each of %d calls", n-1)
}

// crashAtCall has a controller die at its n-th call to the host, and another one take over. It reports whether there
// was an n-th call.
func crashAtCall(t *testing.T, n int) bool {
	t.Helper()
	host, spec := fake.NewHost(), machine("web-1")
	fault := host.AddFault(fake.Fault{Nth: n, When: fake.After, Effect: fake.Drop()})

	first := newProvider(host)
	for range 60 {
		m, _ := first.Create(t.Context(), spec)
		if m.State == kvm2.StateRunning || fault.Reached() {
			break
		}
		time.Sleep(time.Second)
	}
	first.Close() // it dies, and with it goes all that it knew
	reached := fault.Reached()
	fault.Remove()

	second := newProvider(host) // it starts again
	m, err := reconcile(t.Context(), second, spec)
	if err != nil || m.State != kvm2.StateRunning || len(host.Domains()) != 1 {
		t.Errorf("crash at call %d: got a machine that is %v, %v, and\n%s", n, m.State, err, host.Dump())
	}
	if err := second.Delete(t.Context(), m.ID); err != nil {
		t.Errorf("crash at call %d: %v", n, err)
	}
	second.Close()
	wantNothingLeft(t, host)
	return reached
}

// wantNothingLeft looks at a host that no provider uses any more.
func wantNothingLeft(t *testing.T, host *fake.Host) {
	t.Helper()
	for _, d := range host.Domains() {
		t.Errorf("domain %q is left", d.Name)
	}
	for _, v := range host.Volumes("default") {
		if !strings.HasPrefix(v.Name, "demo-image-") { // the cached image stays
			t.Errorf("volume %q is left", v.Name)
		}
	}
	if n := host.Stats().OpenSessions; n != 0 {
		t.Errorf("%d sessions are left open", n)
	}
}

func TestExample_PollOfARunningMachineChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, spec := fake.NewHost(), machine("web-1")
		p := newProvider(host)
		defer p.Close()
		if _, err := reconcile(t.Context(), p, spec); err != nil {
			t.Fatal(err)
		}

		before := host.Dump()
		if _, err := p.Create(t.Context(), spec); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(before, host.Dump()); diff != "" {
			t.Errorf("the poll changed the host (-before +after):\n%s", diff)
		}
	})
}

func TestExample_GuestIsEndedBeforeItsDisksGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost()
		p := newProvider(host)
		defer p.Close()
		m, err := reconcile(t.Context(), p, machine("web-1"))
		if err != nil {
			t.Fatal(err)
		}

		earlier := len(host.Calls())
		if err := p.Delete(t.Context(), m.ID); err != nil {
			t.Error(err)
		}
		var got []kvm2.Op
		for _, c := range host.Calls()[earlier:] {
			if slices.Contains([]kvm2.Op{kvm2.OpDomainDestroy, kvm2.OpDomainUndefine, kvm2.OpVolumeDelete}, c.Op) {
				got = append(got, c.Op)
			}
		}
		want := []kvm2.Op{kvm2.OpDomainDestroy, kvm2.OpDomainUndefine, kvm2.OpVolumeDelete, kvm2.OpVolumeDelete}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("what Delete did (-want +got):\n%s", diff)
		}
	})
}
