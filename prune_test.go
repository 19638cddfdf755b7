package kvm2_test

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// prune prunes with the lab's provider, and expects no error.
func (l *lab) prune(opts kvm2.PruneOptions) kvm2.PruneReport {
	l.Helper()
	report, err := l.p.PruneImages(l.Context(), opts)
	if err != nil {
		l.Fatalf("PruneImages() = %v", err)
	}
	return report
}

// wantKept prunes and checks that the lab's own image stays for a reason, and that nothing is removed.
func (l *lab) wantKept(opts kvm2.PruneOptions, reason kvm2.KeepReason, users int) {
	l.Helper()
	var report kvm2.PruneReport
	changed := l.changes(func() { report = l.prune(opts) })
	want := kvm2.PrunedImage{Checksum: l.spec.Image.Checksum, Kept: reason, Users: users}
	if len(report.Images) != 1 || fmt.Sprint(report.Images[0]) != fmt.Sprint(want) || len(changed) != 0 {
		l.Errorf("PruneImages() = %+v, changed %q; want %+v", report, changed, want)
	}
}

// wantBases checks that every volume has what it stands on.
func wantBases(tb testing.TB, host *fake.Host) {
	tb.Helper()
	names := map[string]bool{}
	for _, v := range host.Volumes(labPool) {
		names[v.Name] = true
	}
	for _, v := range host.Volumes(labPool) {
		if v.BackingPath != "" && !names[path.Base(v.BackingPath)] {
			tb.Errorf("volume %q has lost %q", v.Name, v.BackingPath)
		}
	}
}

func TestPrune_RemovesWhatNothingUses(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		before := l.imageVolumes()
		var freed int64
		for _, v := range l.host.Volumes(labPool) {
			freed += v.AllocatedBytes
		}
		dry := l.prune(kvm2.PruneOptions{DryRun: true})
		if got := l.imageVolumes(); !slices.Equal(got, before) {
			l.Errorf("a dry run left %q of %q", got, before)
		}
		changed := l.changes(func() {
			report := l.prune(kvm2.PruneOptions{})
			want := kvm2.PrunedImage{Checksum: l.spec.Image.Checksum, Removed: before, FreedBytes: freed}
			if len(report.Images) != 1 || fmt.Sprint(report.Images[0]) != fmt.Sprint(want) || fmt.Sprint(dry) != fmt.Sprint(report) {
				l.Errorf("PruneImages() = %+v, a dry run %+v; want %+v", report, dry, want)
			}
		})
		want := []string{"volume.delete " + before[0], "volume.delete " + before[1]} // the pointer comes first
		if !slices.Equal(changed, want) {
			l.Errorf("changed: %q, want %q", changed, want)
		}
		if left := l.allVolumes(); len(left) != 0 {
			l.Errorf("volumes left: %q", left)
		}
		if again := l.prune(kvm2.PruneOptions{}); len(again.Images) != 0 {
			l.Errorf("another PruneImages() = %+v, want nothing to report", again)
		}
		l.running(l.spec)
		l.wantOneImage()
	})
}

func TestPrune_KeepsWhatIsUsedAndCountsIt(t *testing.T) {
	inLab(t, func(l *lab) {
		first, second := l.running(l.spec), l.running(l.another("web-2"))
		l.wantKept(kvm2.PruneOptions{}, kvm2.KeepInUse, 2)
		l.host.PowerOff(labDomain(l.spec))
		l.deleted(second.ID)
		l.wantKept(kvm2.PruneOptions{}, kvm2.KeepInUse, 1)
		l.deleted(first.ID)
		l.wantKept(kvm2.PruneOptions{Keep: []string{l.spec.Image.Checksum}}, kvm2.KeepAsked, 0)
		l.prune(kvm2.PruneOptions{Keep: []string{"sha256:" + strings.Repeat("0", 64)}})
		if left := l.allVolumes(); len(left) != 0 {
			l.Errorf("volumes left: %q", left)
		}
	})
}

// A foreign overlay on an image, or on its pointer, keeps it as well.
func TestPrune_KeepsWhatSomebodyElsesVolumeStandsOn(t *testing.T) {
	for _, on := range []int{0, 1} {
		t.Run(fmt.Sprintf("volume %d", on), func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.cached()
				xml := fmt.Sprintf("<volume><name>mine</name><capacity unit='GiB'>1</capacity><target><format type='qcow2'/></target>"+
					"<backingStore><path>/var/lib/libvirt/images/%s</path><format type='qcow2'/></backingStore></volume>", l.imageVolumes()[on])
				l.conn(func(conn kvm2.Conn) error { return conn.CreateVolume(l.Context(), labPool, xml) })
				l.wantKept(kvm2.PruneOptions{}, kvm2.KeepInUse, 1)
			})
		})
	}
}

// conn makes a call to the host as another program would.
func (l *lab) conn(call func(kvm2.Conn) error) {
	l.Helper()
	conn, err := l.host.Dial(l.Context())
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := call(conn); err != nil {
		l.Fatal(err)
	}
}

func TestPrune_KeepsWhatAMachineBeingCreatedNeeds(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.create1()
		l.wait(time.Second) // the image is there, and nobody has used it yet
		l.wantImage(w)
		l.wantKept(kvm2.PruneOptions{}, kvm2.KeepWanted, 0)
		l.deleted(labID(l.spec))
		l.prune(kvm2.PruneOptions{})
		if left := l.allVolumes(); len(left) != 0 {
			l.Errorf("volumes left: %q", left)
		}
	})
}

// create1 polls once, and expects no error.
func (l *lab) create1() kvm2.Machine {
	l.Helper()
	m, err := l.p.Create(l.Context(), l.spec)
	if err != nil {
		l.Fatalf("Create() = %v", err)
	}
	return m
}

func TestPrune_KeepsWhatIsBeingTransferred(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.large(w)
		w.slowly()
		l.create1()
		l.wait(25 * time.Second)
		mine, others := l.p, l.open(nil)
		for range 3 {
			for _, p := range []*kvm2.Provider{mine, others} {
				l.p = p
				l.wantKept(kvm2.PruneOptions{}, kvm2.KeepTransferring, 0)
			}
			l.wait(30 * time.Second)
		}
		l.p = mine
		l.running(l.spec)
		l.wantImage(w)
	})
}

func TestPrune_DeadTransferGoesOnceItHasStoodStill(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.running(l.spec)
		used := l.imageVolumes()
		other := "sha512:" + strings.Repeat("ab", 64)
		dead := labScope + "-image-" + strings.Repeat("ab", 64) + "-0123456789abcdef"
		l.host.AddVolume(labPool, dead, []byte("half"))
		l.host.AddVolume(labPool, used[0]+"-0123456789abcdef", []byte("half"))
		wants := func(step string, want ...kvm2.PrunedImage) {
			l.Helper()
			if got := l.prune(kvm2.PruneOptions{}); fmt.Sprint(got.Images) != fmt.Sprint(want) {
				l.Errorf("%s: PruneImages() = %+v, want %+v", step, got.Images, want)
			}
		}
		inUse := kvm2.PrunedImage{Checksum: l.spec.Image.Checksum, Kept: kvm2.KeepInUse, Users: 1}
		waiting := kvm2.PrunedImage{Checksum: other, Kept: kvm2.KeepTransferring}
		wants("first seen", inUse, waiting)
		l.wait(59 * time.Second)
		wants("not for long enough", inUse, waiting)
		l.conn(func(conn kvm2.Conn) error {
			return conn.UploadVolume(l.Context(), labPool, dead, 0, strings.NewReader("half and more"))
		})
		l.wait(time.Second)
		inUse.Removed, inUse.FreedBytes = []string{used[0] + "-0123456789abcdef"}, 4096
		wants("one has grown", inUse, waiting)
		inUse.Removed, inUse.FreedBytes = nil, 0
		l.wait(time.Minute)
		wants("both stood still", inUse, kvm2.PrunedImage{Checksum: other, Removed: []string{dead}, FreedBytes: 4096})
		if got := l.imageVolumes(); !slices.Equal(got, used) {
			l.Errorf("image volumes: %q, want %q", got, used)
		}
	})
}

func TestPrune_VolumesOfOthersStay(t *testing.T) {
	digest, attempt := strings.Repeat("0", 64), "-0123456789abcdef"
	foreign := []string{
		"other-image-" + digest,
		labScope + "-2-image-" + digest,
		labScope + "-image-image-" + digest,
		labScope + "-image-" + digest + attempt + ".snap",
		labScope + "-image-" + digest + "-backup",
		labScope + "-image-" + digest + "-0123456789ABCDEF",
		labScope + "-image-" + digest + attempt + "0",
		labScope + "-image-" + digest + "0",
		labScope + "-image-" + digest[1:],
		labScope + "-image-" + strings.Repeat("A", 64),
		labScope + "-image-" + kvm2.MachineUUID("x", "y").String() + "-root",
		labScope + "-image-",
		"image-" + digest,
	}
	inLab(t, func(l *lab) {
		for _, name := range foreign {
			l.host.AddVolume(labPool, name, []byte("somebody's"))
		}
		own := labScope + "-image-" + strings.Repeat("1", 64) + attempt
		l.host.AddVolume(labPool, own, []byte("a dead process's"))
		slices.Sort(foreign)
		l.prune(kvm2.PruneOptions{})
		l.wait(time.Hour)
		report := l.prune(kvm2.PruneOptions{})
		if got := l.allVolumes(); !slices.Equal(got, foreign) || len(report.Images) != 1 {
			l.Errorf("left: %q, want %q; report %+v", got, foreign, report)
		}
	})
}

func TestPrune_VolumeInThePointersPlaceIsAnErrorAndStays(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		name := labScope + "-image-" + strings.Repeat("0", 64)
		l.host.AddVolume(labPool, name, []byte("somebody's"))
		report, err := l.p.PruneImages(l.Context(), kvm2.PruneOptions{})
		l.wantError("PruneImages()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if got := l.allVolumes(); !slices.Equal(got, []string{name}) {
			l.Errorf("left: %q, want %q alone", got, name)
		}
		if len(report.Images) != 2 || report.Images[0].Kept != kvm2.KeepFailed || report.Images[1].Kept != "" {
			l.Errorf("PruneImages() = %+v, want one failure, and the other image gone", report)
		}
	})
}

func TestPrune_KeepIsValidated(t *testing.T) {
	inLab(t, func(l *lab) {
		_, err := l.p.PruneImages(l.Context(), kvm2.PruneOptions{Keep: []string{l.spec.Image.Checksum, "md5:0"}})
		l.wantError("PruneImages()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
		if !strings.Contains(fmt.Sprint(err), `keep[1]: "md5:0"`) || len(l.host.Calls()) != 0 {
			l.Errorf("PruneImages() = %v after %d calls, want the field named before any call", err, len(l.host.Calls()))
		}
	})
}

func TestPrune_FailureOfOneImageLeavesTheOthers(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		empty := labScope + "-image-" + strings.Repeat("0", 64) + "-0123456789abcdef"
		l.host.AddVolume(labPool, empty, nil)
		l.prune(kvm2.PruneOptions{Keep: []string{l.spec.Image.Checksum}})
		l.wait(time.Minute)
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeDelete, Object: empty, Effect: fake.Fail(38, "cannot unlink file: Device or resource busy")})
		report, err := l.p.PruneImages(l.Context(), kvm2.PruneOptions{})
		l.wantError("PruneImages()", err, kvm2.ClassTransient, nil)
		if !strings.Contains(fmt.Sprint(err), strings.Repeat("0", 64)) {
			l.Errorf("%v does not name the image", err)
		}
		if got := l.imageVolumes(); !slices.Equal(got, []string{empty}) || report.Images[0].Kept != kvm2.KeepFailed {
			l.Errorf("left: %q, report %+v; want the one image that failed", got, report)
		}
	})
}

func TestPrune_ManyVolumesCostNoMoreCalls(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		for i := range 2000 {
			l.host.AddVolume(labPool, fmt.Sprintf("foreign-%d", i), []byte("x"))
		}
		if n := l.calls("", func() { l.prune(kvm2.PruneOptions{}) }); n != 4 {
			l.Errorf("%d calls, want 4: all volumes, the pointer, all volumes again, the data", n)
		}
	})
}

// A PruneImages that is killed at any of its calls leaves what the next one finishes, or the next Create uses.
func TestPrune_KilledAtAnyCall(t *testing.T) {
	reached := 0
	for _, next := range []string{"prune", "create"} {
		for k := 1; ; k++ {
			met := false
			t.Run(fmt.Sprintf("%s after call %d", next, k), func(t *testing.T) {
				inLab(t, func(l *lab) {
					l.cached()
					n := 0
					l.host.Intercept(func(fake.Call) error {
						if n++; n < k {
							return nil
						}
						met = true
						return errKilled
					})
					victim := l.open(nil)
					_, err := victim.PruneImages(l.Context(), kvm2.PruneOptions{})
					closeProvider(l.T, victim)
					l.host.Intercept(nil)
					if met != (err != nil) {
						l.Errorf("PruneImages() = %v", err)
					}
					if next == "create" {
						l.running(l.spec)
						l.wantOneImage()
						return
					}
					l.prune(kvm2.PruneOptions{})
					l.wait(time.Minute)
					l.prune(kvm2.PruneOptions{})
					if left := l.allVolumes(); len(left) != 0 {
						l.Errorf("volumes left: %q", left)
					}
				})
			})
			if !met {
				break
			}
			reached++
		}
	}
	if reached != 10 {
		t.Errorf("killed at %d calls, want at the 5 of each", reached)
	}
}

// PruneImages does all of its work before each single call of a Create, and Create before each of PruneImages, each in a
// process of its own. The machine that comes to run has what it stands on.
func TestPrune_AgainstEachCallOfACreation(t *testing.T) {
	create := func(l *lab, p *kvm2.Provider) {
		if _, err := p.Create(l.Context(), l.spec); kvm2.ClassOf(err) > kvm2.ClassTransient {
			l.Errorf("Create() = %v", err)
		}
	}
	prune := func(l *lab, p *kvm2.Provider) {
		if _, err := p.PruneImages(l.Context(), kvm2.PruneOptions{}); err != nil {
			l.Errorf("PruneImages() = %v", err)
		}
	}
	for name, tt := range map[string]struct {
		outer, inner func(*lab, *kvm2.Provider)
		least        int
	}{
		"pruned while it is created":  {create, prune, 20},
		"created while it is pruned":  {prune, create, 4},
		"pruned while another prunes": {prune, prune, 4},
	} {
		for k := 1; ; k++ {
			met := false
			t.Run(fmt.Sprintf("%s, at call %d", name, k), func(t *testing.T) {
				inLab(t, func(l *lab) {
					l.cached()
					outer, inner := l.open(nil), l.open(nil)
					n := 0
					l.host.Intercept(func(fake.Call) error {
						if n++; n == k {
							met = true
							tt.inner(l, inner)
						}
						return nil
					})
					tt.outer(l, outer)
					l.host.Intercept(nil)
					l.running(l.spec)
					wantBases(l.T, l.host)
					l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))
				})
			})
			if !met {
				if k <= tt.least {
					t.Errorf("%s: they met at %d calls only", name, k-1)
				}
				break
			}
		}
	}
}

func TestRace_PruningLosesNoBase(t *testing.T) {
	other := func(ctx context.Context, w *sweepWorld, p *kvm2.Provider) (bool, error) {
		spec := w.spec
		spec.Name, spec.OwnerUID = "web-2", "owner-2"
		m, err := p.Create(ctx, spec)
		return m.State == kvm2.StateRunning && err == nil, err
	}
	removed := 0
	for seed := range raceSeeds(t) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSweepWorld(t)
				defer w.host.Close()
				if seed%2 == 0 {
					prepareCached(t, w)
				}
				shuffleCalls(w.host, seed)
				var work sync.WaitGroup
				ended := make(chan struct{})
				for _, job := range []func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error){pollCreate, other} {
					p := w.provider(t)
					work.Go(func() {
						defer closeProvider(t, p)
						if err := pollPatiently(t.Context(), w, p, job); err != nil {
							t.Error(err)
						}
					})
				}
				var pruners sync.WaitGroup
				var mu sync.Mutex
				for i := range 2 {
					p := w.provider(t)
					pruners.Go(func() {
						defer closeProvider(t, p)
						time.Sleep(time.Duration(seed%8+uint64(i)) * time.Millisecond) // they meet the creations at every stage
						n := pruneUntil(t, p, ended)
						mu.Lock()
						defer mu.Unlock()
						removed += n
					})
				}
				work.Wait()
				close(ended)
				pruners.Wait()
				w.host.Intercept(nil)
				wantBases(t, w.host)
				if domains := w.host.Domains(); len(domains) != 2 || !domains[0].Running || !domains[1].Running {
					t.Errorf("domains: %+v, want both, running", domains)
				}
				if t.Failed() {
					for _, c := range w.host.Calls() {
						t.Log(c)
					}
				}
			})
		})
	}
	t.Logf("%d volumes were pruned under the creations", removed)
	if removed == 0 {
		t.Error("nothing was ever pruned: the race was none")
	}
}

// pollPatiently polls until the job is done, also where another process's transfer has to be waited for.
func pollPatiently(ctx context.Context, w *sweepWorld, p *kvm2.Provider, job func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)) error {
	return pollUpTo(ctx, 600, time.Second, w, p, job)
}

// pruneUntil prunes again and again until the channel is closed, and returns how many volumes it removed.
func pruneUntil(t *testing.T, p *kvm2.Provider, ended <-chan struct{}) int {
	removed := 0
	for range 4 { // a few times, so that the creations come to an end
		report, err := p.PruneImages(t.Context(), kvm2.PruneOptions{})
		if err != nil {
			t.Errorf("PruneImages() = %v", err)
		}
		for _, i := range report.Images {
			removed += len(i.Removed)
		}
		select {
		case <-ended:
			return removed
		case <-time.After(3 * time.Millisecond):
		}
	}
	return removed
}
