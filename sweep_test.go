package kvm2_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

// The sweep: whichever call to the host goes wrong, in whichever way, a controller that is started anew and polls on
// comes to the right end, and nothing is left over.

// sweepFaults are the ways in which a call goes wrong.
var sweepFaults = []struct {
	name   string
	when   fake.When
	effect func() fake.Effect
}{
	{"error before the effect", fake.Before, failed},
	{"error after the effect", fake.After, failed},
	{"dropped before the effect", fake.Before, fake.Drop},
	{"dropped after the effect", fake.After, fake.Drop},
	{"hangs", fake.Before, fake.Hang},
}

func failed() fake.Effect { return fake.Fail(1, "internal error: injected by the sweep") }

// sweepJob is a job that is swept.
type sweepJob struct {
	name string
	// prepare brings the host to where the job starts.
	prepare func(*testing.T, *sweepWorld)
	// poll does one poll; it reports whether the job is done.
	poll func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)
	// verify looks at the host when the job is done.
	verify func(*testing.T, *sweepWorld)
}

var sweepJobs = []sweepJob{
	{"create with a cold image", func(*testing.T, *sweepWorld) {}, pollCreate, verifyCreated},
	{"create with a cached image", prepareCached, pollCreate, verifyCreated},
	{"delete", prepareCreated, pollDelete, verifyDeleted},
}

// sweepWorld is a host and what is done on it.
type sweepWorld struct {
	host *fake.Host
	spec kvm2.Spec
	id   string
}

func newSweepWorld(tb testing.TB) *sweepWorld {
	tb.Helper()
	url, sum := sweepImage(tb)
	spec := kvm2.Spec{
		Name: "web-1", OwnerUID: "owner-1", Image: kvm2.Image{URL: url, Checksum: sum},
		CPUs: 1, MemoryBytes: 256 * mib, RootDiskBytes: 2 * gib, Disks: []kvm2.Disk{{Name: "data", SizeBytes: 8 * mib}},
	}
	id := kvm2.ID{Host: "localhost", UUID: kvm2.MachineUUID("sweep", spec.OwnerUID)}.String()
	return &sweepWorld{host: fake.NewHost(), spec: spec, id: id}
}

const mib, gib = int64(1) << 20, int64(1) << 30

func sweepImage(tb testing.TB) (url, checksum string) {
	tb.Helper()
	image, err := qcow2.MinimalImage(gib)
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), "image.qcow2")
	if err := os.WriteFile(path, image, 0o600); err != nil {
		tb.Fatal(err)
	}
	sum := sha256.Sum256(image)
	return "file://" + path, "sha256:" + hex.EncodeToString(sum[:])
}

func (w *sweepWorld) provider(tb testing.TB) *kvm2.Provider {
	tb.Helper()
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "sweep"}, kvm2.WithDialer(w.host))
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func pollCreate(ctx context.Context, w *sweepWorld, p *kvm2.Provider) (bool, error) {
	m, err := p.Create(ctx, w.spec)
	if m.ID != w.id {
		return false, fmt.Errorf("the ID is %q, want %q: %w", m.ID, w.id, errSweep)
	}
	return m.State == kvm2.StateRunning && err == nil, err
}

func pollDelete(ctx context.Context, w *sweepWorld, p *kvm2.Provider) (bool, error) {
	err := p.Delete(ctx, w.id)
	return err == nil, err
}

// errSweep marks an error that ends a sweep: polling on cannot mend it.
var errSweep = errors.New("broken promise")

func prepareCached(t *testing.T, w *sweepWorld) {
	t.Helper()
	prepareCreated(t, w)
	p := w.provider(t)
	defer closeProvider(t, p)
	pollUntilDone(t, w, p, pollDelete)
}

func prepareCreated(t *testing.T, w *sweepWorld) {
	t.Helper()
	p := w.provider(t)
	defer closeProvider(t, p)
	pollUntilDone(t, w, p, pollCreate)
}

func closeProvider(t *testing.T, p *kvm2.Provider) {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
}

// pollUntilDone polls as a controller does: it waits as long as an error says.
func pollUntilDone(tb testing.TB, w *sweepWorld, p *kvm2.Provider, poll func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)) {
	tb.Helper()
	var err error
	for range 200 {
		var done bool
		if done, err = poll(tb.Context(), w, p); done {
			return
		}
		if errors.Is(err, errSweep) || kvm2.ClassOf(err) == kvm2.ClassPermanent {
			tb.Fatalf("polling ended with %v", err)
		}
		time.Sleep(max(time.Second, kvm2.RetryAfter(err))) // in the bubble
	}
	tb.Fatalf("not done after 200 polls; the last error: %v\n%s", err, w.host.Dump())
}

// pollUntilStruck polls with faults about, until each has struck or the job is done.
func pollUntilStruck(t *testing.T, w *sweepWorld, job sweepJob, faults ...*fake.ActiveFault) {
	t.Helper()
	p := w.provider(t)
	defer closeProvider(t, p)
	for range 200 {
		done, err := job.poll(t.Context(), w, p)
		if errors.Is(err, errSweep) {
			t.Fatal(err)
		}
		if done || !slices.ContainsFunc(faults, func(f *fake.ActiveFault) bool { return !f.Reached() }) {
			return
		}
		time.Sleep(max(time.Second, kvm2.RetryAfter(err))) // in the bubble
	}
}

func verifyCreated(t *testing.T, w *sweepWorld) {
	t.Helper()
	domains := w.host.Domains()
	if len(domains) != 1 || domains[0].UUID.String() != w.id[strings.LastIndexByte(w.id, '/')+1:] || !domains[0].Running {
		t.Errorf("domains: %+v, want the one machine, running", domains)
	}
	if got := machineVolumes(w); len(got) != 3 {
		t.Errorf("volumes of the machine: %q, want root, seed and one disk", got)
	}
	verifyImage(t, w)
}

func verifyDeleted(t *testing.T, w *sweepWorld) {
	t.Helper()
	if domains := w.host.Domains(); len(domains) != 0 {
		t.Errorf("domains left: %+v", domains)
	}
	if got := machineVolumes(w); len(got) != 0 {
		t.Errorf("volumes left: %q", got)
	}
	verifyImage(t, w)
}

// verifyImage makes sure that there is one image, whole: a pointer and what it points to.
func verifyImage(t *testing.T, w *sweepWorld) {
	t.Helper()
	var names []string
	for _, v := range w.host.Volumes("default") {
		if strings.HasPrefix(v.Name, "sweep-image-") {
			names = append(names, v.Name)
		}
	}
	if len(names) != 2 || !strings.HasPrefix(names[1], names[0]+"-") {
		t.Fatalf("image volumes: %q, want a pointer and one data volume", names)
	}
	sum := sha256.Sum256(w.host.VolumeBytes("default", names[1]))
	if got := "sha256:" + hex.EncodeToString(sum[:]); got != w.spec.Image.Checksum {
		t.Errorf("the published image has the digest %s, want %s", got, w.spec.Image.Checksum)
	}
}

func machineVolumes(w *sweepWorld) []string {
	var names []string
	for _, v := range w.host.Volumes("default") {
		if !strings.HasPrefix(v.Name, "sweep-image-") {
			names = append(names, v.Name)
		}
	}
	return names
}

// sweepPoint runs a job with faults at some calls, then to its end with a new Provider. It reports whether every fault
// struck.
func sweepPoint(t *testing.T, job sweepJob, faults ...fake.Fault) (struck bool) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newSweepWorld(t)
		defer w.host.Close()
		job.prepare(t, w)
		before := w.host.Stats().Calls
		var active []*fake.ActiveFault
		for _, f := range faults {
			f.Nth += before
			active = append(active, w.host.AddFault(f))
		}
		pollUntilStruck(t, w, job, active...)
		struck = !slices.ContainsFunc(active, func(a *fake.ActiveFault) bool { return !a.Reached() })
		for _, a := range active {
			a.Remove()
		}
		p := w.provider(t)
		pollUntilDone(t, w, p, job.poll)
		closeProvider(t, p)
		job.verify(t, w)
		if open := w.host.Stats().OpenSessions; open != 0 {
			t.Errorf("%d sessions left open", open)
		}
	})
	return struck
}

// callsOf is how many calls a job makes when nothing goes wrong.
func callsOf(t *testing.T, job sweepJob) int {
	t.Helper()
	var calls int
	synctest.Test(t, func(t *testing.T) {
		w := newSweepWorld(t)
		defer w.host.Close()
		job.prepare(t, w)
		before := w.host.Stats().Calls
		p := w.provider(t)
		defer closeProvider(t, p)
		pollUntilDone(t, w, p, job.poll)
		calls = w.host.Stats().Calls - before
	})
	return calls
}

func TestSweep_AnyCallMayGoWrongInAnyWay(t *testing.T) {
	points := 0
	for _, job := range sweepJobs {
		calls := callsOf(t, job)
		for k := 1; k <= calls; k++ {
			for _, f := range sweepFaults {
				t.Run(fmt.Sprintf("%s/call %d %s", job.name, k, f.name), func(t *testing.T) {
					if !sweepPoint(t, job, fake.Fault{Nth: k, When: f.when, Effect: f.effect()}) {
						t.Error("the point was not reached")
					}
				})
				points++
			}
		}
		t.Logf("%s: %d calls", job.name, calls)
	}
	t.Logf("swept %d points", points)
}

func TestSweep_AnyTwoCallsMayGoWrong(t *testing.T) {
	const samples = 400
	random := rand.New(rand.NewPCG(1, 2))
	struck := 0
	for _, job := range sweepJobs {
		calls := callsOf(t, job)
		for range samples / len(sweepJobs) {
			var faults []fake.Fault
			var names []string
			for range 2 {
				f := sweepFaults[random.IntN(len(sweepFaults))]
				k := 1 + random.IntN(calls+3)
				faults = append(faults, fake.Fault{Nth: k, When: f.when, Effect: f.effect()})
				names = append(names, fmt.Sprintf("call %d %s", k, f.name))
			}
			t.Run(job.name+"/"+strings.Join(names, ", "), func(t *testing.T) {
				if sweepPoint(t, job, faults...) {
					struck++
				}
			})
		}
	}
	t.Logf("both faults struck in %d of %d samples", struck, samples)
	if struck < samples/2 {
		t.Errorf("both faults struck in %d of %d samples, want at least half", struck, samples)
	}
}
