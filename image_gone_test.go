package kvm2_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// An operator deletes the image's data, or its pointer, before each single call of a Create. The machine comes to run,
// with what it stands on, unless the data went when it had been started and looked at.
func TestImage_DeletedByAnOperatorAtAnyCallOfACreation(t *testing.T) {
	for _, which := range []string{"pointer", "data"} {
		for k := 1; ; k++ {
			met := false
			t.Run(fmt.Sprintf("%s, before call %d", which, k), func(t *testing.T) {
				inLab(t, func(l *lab) {
					l.cached()
					volume := l.imageVolumes()[slices.Index([]string{"pointer", "data"}, which)]
					n, settled := 0, false
					l.host.Intercept(func(c fake.Call) error {
						if n++; n == k {
							met = true
							settled = c.Op == kvm2.OpDomainSetMetadata || c.Op == kvm2.OpDomainAddresses
							l.host.DeleteVolumeBehind(labPool, volume)
						}
						return nil
					})
					_, err := l.p.Create(l.Context(), l.spec)
					l.host.Intercept(nil)
					if class := kvm2.ClassOf(err); class > kvm2.ClassTransient {
						l.Errorf("Create() = %v (%v), want nothing that ends the polling", err, class)
					}
					l.running(l.spec)
					if !settled {
						wantBases(l.T, l.host)
					}
					l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))
				})
			})
			if !met {
				if k <= 20 {
					t.Errorf("%s: deleted at %d calls only", which, k-1)
				}
				break
			}
		}
	}
}

// A process dies when it has made the root disk; then the image goes. The next process makes the disk anew.
func TestImage_RootDiskOnAnImageThatWentIsMadeAnew(t *testing.T) {
	for name, gone := range map[string]func(l *lab){
		"deleted": func(l *lab) { l.host.DeleteVolumeBehind(labPool, l.imageVolumes()[1]) },
		"published anew": func(l *lab) {
			l.host.DeleteVolumeBehind(labPool, l.imageVolumes()[0])
			p := l.open(nil)
			if _, err := l.create(p, l.another("web-2")); err != nil {
				l.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.cached()
				f := l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.Drop()}) // of the seed
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, kvm2.ClassTransient, nil)
				if !f.Reached() || !slices.Contains(l.volumes(), labVolume(l.spec, "root")) {
					l.Fatalf("volumes: %q, want the root disk", l.volumes())
				}
				gone(l)
				l.running(l.spec)
				wantBases(l.T, l.host)
			})
		})
	}
}

// A machine that is defined and was never started has nothing to lose: it is made anew as well.
func TestImage_DefinedMachineWhoseImageWentIsMadeAnew(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		f := l.host.AddFault(fake.Fault{Op: kvm2.OpDomainStart, Effect: fake.Drop()})
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		if domains := l.host.Domains(); len(domains) != 1 || !f.Reached() {
			l.Fatalf("domains: %+v, want one, defined", domains)
		}
		l.host.DeleteVolumeBehind(labPool, l.imageVolumes()[1])
		l.running(l.spec)
		wantBases(l.T, l.host)
	})
}

// Without the pointer the image is transferred again; the data stay as long as machines stand on them.
func TestImage_PointerDeletedUnderAMachine(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		before := l.imageVolumes()
		l.host.DeleteVolumeBehind(labPool, before[0])
		l.running(l.another("web-2"))
		wantBases(l.T, l.host)
		if got := l.imageVolumes(); len(got) != 3 || !slices.Contains(got, before[1]) {
			l.Errorf("image volumes: %q, want the new image's, and %q", got, before[1])
		}
		l.deleted(m.ID)
		l.prune(kvm2.PruneOptions{})
		l.wait(time.Minute)
		if report := l.prune(kvm2.PruneOptions{}); len(l.imageVolumes()) != 2 || report.Images[0].Users != 1 {
			l.Errorf("image volumes: %q, report %+v; want the used image alone", l.imageVolumes(), report)
		}
		wantBases(l.T, l.host)
	})
}

// A machine that has run keeps its disk, which may hold data, though nobody can start it any more.
func TestImage_MachineThatRanKeepsItsDiskWhenTheImageWent(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		l.host.PowerOff(labDomain(l.spec))
		l.host.DeleteVolumeBehind(labPool, l.imageVolumes()[1])
		changed := l.changes(func() { l.wantState(l.spec, kvm2.StateStopped, "Shutdown") })
		if len(changed) != 0 {
			l.Errorf("changed: %q, want nothing", changed)
		}
	})
}
