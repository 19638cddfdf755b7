package kvm2_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

const (
	labScope = "lab"
	labPool  = "default"
)

// lab is a host in memory, a machine that is wanted, and a provider. It lives in a bubble, where waiting takes no time.
type lab struct {
	*testing.T
	host *fake.Host
	spec kvm2.Spec
	p    *kvm2.Provider
}

// inLab runs a test in a lab of its own.
func inLab(t *testing.T, fn func(*lab), opts ...fake.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &lab{T: t, host: fake.NewHost(opts...)}
		t.Cleanup(func() {
			if open := l.host.Stats().OpenSessions; open != 0 {
				t.Errorf("%d sessions left open", open)
			}
			_ = l.host.Close()
		})
		url, sum := sweepImage(t)
		l.spec = kvm2.Spec{
			Name: "web-1", OwnerUID: "owner-1", Labels: map[string]string{"role": "web"},
			Image: kvm2.Image{URL: url, Checksum: sum}, CPUs: 1, MemoryBytes: 256 * mib, RootDiskBytes: 2 * gib,
			Disks:    []kvm2.Disk{{Name: "data", SizeBytes: 8 * mib}},
			UserData: []byte("#cloud-config\n{}\n"),
		}
		l.p = l.open(nil)
		fn(l)
	})
}

// open returns another provider of the scope, as another process has it. It is closed when the test ends.
func (l *lab) open(edit func(*kvm2.Config), opts ...kvm2.Option) *kvm2.Provider {
	l.Helper()
	cfg := kvm2.Config{URI: "qemu:///system", Scope: labScope}
	if edit != nil {
		edit(&cfg)
	}
	p, err := kvm2.New(cfg, append([]kvm2.Option{kvm2.WithDialer(l.host)}, opts...)...)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { closeProvider(l.T, p) })
	return p
}

// another is a machine like the lab's own, of another owner.
func (l *lab) another(name string) kvm2.Spec {
	s := l.spec
	s.Name, s.OwnerUID = name, "owner-of-"+name
	return s
}

func labUUID(s kvm2.Spec) kvm2.UUID { return kvm2.MachineUUID(labScope, s.OwnerUID) }

func labID(s kvm2.Spec) string { return kvm2.ID{Host: "localhost", UUID: labUUID(s)}.String() }

// labDomain and labVolume are the names of a machine's domain and of one of its volumes.
func labDomain(s kvm2.Spec) string { return labScope + "-" + s.Name }

func labVolume(s kvm2.Spec, part string) string {
	return labScope + "-" + labUUID(s).String() + "-" + part
}

// wait lets time pass. In the bubble that takes none.
func (*lab) wait(d time.Duration) { time.Sleep(d) }

// create polls Create until the machine runs, as a controller does, and returns the first error that polling on would
// not mend. It may be called beside the test's own goroutine.
func (l *lab) create(p *kvm2.Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	l.Helper()
	var m kvm2.Machine
	var err error
	for range 200 {
		m, err = p.Create(l.Context(), spec)
		if m.State == kvm2.StateRunning && err == nil || kvm2.ClassOf(err) > kvm2.ClassTransient {
			return m, err
		}
		l.wait(max(time.Second, kvm2.RetryAfter(err)))
	}
	return m, fmt.Errorf("machine %q does not come to run: %w", spec.Name, cmp.Or(err, errSweep))
}

// running makes a machine that runs.
func (l *lab) running(spec kvm2.Spec) kvm2.Machine {
	l.Helper()
	m, err := l.create(l.p, spec)
	if err != nil {
		l.Fatalf("Create() = %v", err)
	}
	return m
}

// cached brings the image into the pool and leaves nothing else there.
func (l *lab) cached() {
	l.Helper()
	l.deleted(l.running(l.another("cache")).ID)
}

// deleted polls Delete until the machine is gone.
func (l *lab) deleted(id string) {
	l.Helper()
	for range 200 {
		err := l.p.Delete(l.Context(), id)
		if err == nil {
			return
		}
		if kvm2.ClassOf(err) != kvm2.ClassTransient {
			l.Fatalf("Delete() = %v", err)
		}
		l.wait(kvm2.RetryAfter(err))
	}
	l.Fatalf("machine %q is not deleted:\n%s", id, l.host.Dump())
}

func (l *lab) get(id string) kvm2.Machine {
	l.Helper()
	m, err := l.p.Get(l.Context(), id)
	if err != nil {
		l.Fatalf("Get() = %v", err)
	}
	return m
}

func (l *lab) list() []kvm2.Machine {
	l.Helper()
	machines, err := l.p.List(l.Context())
	if err != nil {
		l.Fatalf("List() = %v", err)
	}
	return machines
}

// wantError checks an error's class and, unless it is nil, its sentinel.
func (l *lab) wantError(what string, err error, class kvm2.Class, sentinel error) {
	l.Helper()
	if kvm2.ClassOf(err) != class || sentinel != nil && !errors.Is(err, sentinel) {
		l.Errorf("%s = %v (%v), want class %v and %v", what, err, kvm2.ClassOf(err), class, sentinel)
	}
}

// wantState checks what Get, List and Create say of a machine's state.
func (l *lab) wantState(spec kvm2.Spec, state kvm2.State, reason string) {
	l.Helper()
	created, err := l.p.Create(l.Context(), spec)
	if err != nil {
		l.Errorf("Create() = %v", err)
	}
	listed := l.list()
	if len(listed) != 1 {
		l.Fatalf("List() = %+v, want one machine", listed)
	}
	for what, m := range map[string]kvm2.Machine{"Create": created, "Get": l.get(labID(spec)), "List": listed[0]} {
		if m.State != state || m.Reason != reason {
			l.Errorf("%s: state %q for the reason %q, want %q for %q", what, m.State, m.Reason, state, reason)
		}
	}
}

// volumes are the pool's volumes without those of images.
func (l *lab) volumes() []string {
	return slices.DeleteFunc(l.allVolumes(), isImageVolume)
}

// imageVolumes are the volumes that hold images or point to them.
func (l *lab) imageVolumes() []string {
	return slices.DeleteFunc(l.allVolumes(), func(name string) bool { return !isImageVolume(name) })
}

func (l *lab) allVolumes() []string {
	var names []string
	for _, v := range l.host.Volumes(labPool) {
		names = append(names, v.Name)
	}
	return names
}

func isImageVolume(name string) bool { return strings.Contains(name, "-image-") }

func (l *lab) wantVolumes(want ...string) {
	l.Helper()
	slices.Sort(want)
	if got := l.volumes(); !slices.Equal(got, want) {
		l.Errorf("volumes: %q, want %q", got, want)
	}
}

func (l *lab) wantNothingLeft() {
	l.Helper()
	if domains := l.host.Domains(); len(domains) != 0 {
		l.Errorf("domains left: %+v", domains)
	}
	l.wantVolumes()
}

// before has fn called before the next call of an operation does its work.
func (l *lab) before(op kvm2.Op, fn func()) {
	l.host.Intercept(func(c fake.Call) error {
		if c.Op == op {
			l.host.Intercept(nil)
			fn()
		}
		return nil
	})
}

// changing are the operations that change something on the host.
var changing = []kvm2.Op{
	kvm2.OpDomainDefine, kvm2.OpDomainStart, kvm2.OpDomainSetMetadata, kvm2.OpDomainDestroy, kvm2.OpDomainUndefine,
	kvm2.OpVolumeCreate, kvm2.OpVolumeDelete, kvm2.OpVolumeUpload, kvm2.OpPoolRefresh,
}

// changes runs fn and returns what it changed on the host, call by call.
func (l *lab) changes(fn func()) []string {
	l.Helper()
	before := len(l.host.Calls())
	fn()
	var out []string
	for _, c := range l.host.Calls()[before:] {
		if slices.Contains(changing, c.Op) {
			out = append(out, string(c.Op)+" "+c.Object)
		}
	}
	return out
}

// calls runs fn and returns how many calls of an operation it made; all of them if op is empty.
func (l *lab) calls(op kvm2.Op, fn func()) int {
	l.Helper()
	before := len(l.host.Calls())
	fn()
	n := 0
	for _, c := range l.host.Calls()[before:] {
		if op == "" || c.Op == op {
			n++
		}
	}
	return n
}
