package kvm2_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/iso9660/isotest"
)

func TestCreate_ReachesRunningPollByPoll(t *testing.T) {
	inLab(t, func(l *lab) {
		var states []kvm2.State
		var m kvm2.Machine
		for m.State != kvm2.StateRunning {
			var err error
			if m, err = l.p.Create(l.Context(), l.spec); err != nil {
				l.Fatalf("Create() = %v", err)
			}
			if m.ID != labID(l.spec) || m.UUID != labUUID(l.spec) {
				l.Errorf("the ID is %q, want %q", m.ID, labID(l.spec))
			}
			if m.State == kvm2.StateCreating && m.Image == nil {
				l.Errorf("%+v waits, and does not say for what", m)
			}
			states = append(states, m.State)
			l.wait(time.Second)
		}
		if states[0] != kvm2.StateCreating {
			l.Errorf("states: %v, want Creating at first", states)
		}
		if m.Name != "web-1" || m.OwnerUID != "owner-1" || m.Labels["role"] != "web" || m.CreatedAt.IsZero() || m.Drifted || m.Image != nil {
			l.Errorf("%+v is not what was asked for", m)
		}
		l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))
	}, fake.WithLatency(400*time.Millisecond))
}

func TestCreate_IDIsKnownWhenTheCallFails(t *testing.T) {
	tests := []struct {
		name string
		fail func(*lab)
	}{
		{"no connection", func(l *lab) { l.host.AddFault(fake.Fault{Op: kvm2.OpDial, Effect: fake.Drop()}) }},
		{"no pool", func(l *lab) { l.host.StopPool(labPool) }},
		{"no space", func(l *lab) {
			l.host.SetPoolCapacity(labPool, mib)
			l.host.StopPool(labPool)
			l.host.StartPool(labPool)
		}},
		{"no start", func(l *lab) {
			l.cached()
			l.host.AddFault(fake.Fault{Op: kvm2.OpDomainStart, Effect: fake.Drop()})
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				tt.fail(l)
				m, err := l.p.Create(l.Context(), l.spec)
				if err == nil || m.ID != labID(l.spec) || m.State != kvm2.StateCreating {
					l.Errorf("Create() = %+v, %v; want an error, and a machine in the making with its ID", m, err)
				}
			})
		})
	}
}

func TestCreate_InvalidSpecReachesNoHost(t *testing.T) {
	inLab(t, func(l *lab) {
		l.spec.CPUs = 0
		n := l.calls("", func() {
			_, err := l.p.Create(l.Context(), l.spec)
			l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
		})
		if n != 0 {
			l.Errorf("%d calls reached the host, want none", n)
		}
	})
}

func TestCreate_RunningMachineIsLeftAlone(t *testing.T) {
	inLab(t, func(l *lab) {
		first := l.running(l.spec)
		before := l.host.Dump()
		changed := l.changes(func() {
			for range 3 {
				if m := l.running(l.spec); m.ID != first.ID || !m.CreatedAt.Equal(first.CreatedAt) {
					l.Errorf("Create() = %+v, want %+v", m, first)
				}
			}
		})
		if len(changed) != 0 || l.host.Dump() != before {
			l.Errorf("changed: %q", changed)
		}
	})
}

func TestCreate_TransientFailureGoesOnWhereItStopped(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, Effect: fake.Drop()})
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))

		changed := l.changes(func() { l.running(l.spec) })
		if slices.Contains(changed, "volume.delete "+labVolume(l.spec, "root")) {
			l.Errorf("the root disk was removed: %q", changed)
		}
	})
}

func TestCreate_PermanentFailureLeavesNothing(t *testing.T) {
	tests := []struct {
		name     string
		op       kvm2.Op
		code     int
		message  string
		class    kvm2.Class
		sentinel error
	}{
		{"define", kvm2.OpDomainDefine, 67, "unsupported configuration: no", kvm2.ClassPermanent, kvm2.ErrUnsupported},
		{"seed", kvm2.OpVolumeUpload, 38, "Unable to write X: No space left on device", kvm2.ClassQuota, kvm2.ErrQuotaExceeded},
		{"second disk", kvm2.OpVolumeCreate, 38, "cannot extend file: File too large", kvm2.ClassPermanent, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.cached()
				image := l.imageVolumes()
				skip := 0
				if tt.op == kvm2.OpVolumeCreate {
					skip = 1 // the root disk is made
				}
				l.host.AddFault(fake.Fault{Op: tt.op, Skip: skip, Effect: fake.Fail(tt.code, tt.message)})
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, tt.class, tt.sentinel)
				l.wantNothingLeft()
				if got := l.imageVolumes(); !slices.Equal(got, image) {
					l.Errorf("image volumes: %q, want %q as before", got, image)
				}
				l.running(l.spec)
			})
		})
	}
}

func TestCreate_MissingPrerequisiteIsPermanent(t *testing.T) {
	tests := []struct {
		name string
		edit func(*kvm2.Config)
		fail func(*lab)
	}{
		{"no such pool", func(c *kvm2.Config) { c.Pool = "nosuch" }, func(*lab) {}},
		{"pool not active", nil, func(l *lab) { l.host.StopPool(labPool) }},
		{"no such network", func(c *kvm2.Config) { c.Network = "nosuch" }, func(*lab) {}},
		{"network not active", nil, func(l *lab) { l.host.StopNetwork("default") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				p := l.open(tt.edit)
				tt.fail(l)
				changed := l.changes(func() {
					_, err := p.Create(l.Context(), l.spec)
					l.wantError("Create()", err, kvm2.ClassPermanent, nil)
				})
				if len(changed) != 0 {
					l.Errorf("changed: %q, want nothing", changed)
				}
			})
		})
	}
}

func TestCreate_HardwareThatTheHostLacksIsPermanent(t *testing.T) {
	t.Run("no KVM", func(t *testing.T) {
		inLab(t, func(l *lab) {
			_, err := l.create(l.p, l.spec)
			l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrUnsupported)
			l.wantNothingLeft()
		}, fake.WithDomainTypes("qemu"))
	})
	t.Run("no EFI firmware", func(t *testing.T) {
		inLab(t, func(l *lab) {
			l.spec.Firmware = kvm2.FirmwareEFI
			m, err := l.create(l.p, l.spec)
			l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrUnsupported)
			if m.State != kvm2.StateCreating {
				l.Errorf("state %q, want Creating: it never ran", m.State)
			}
			l.deleted(m.ID)
			l.wantNothingLeft()
		}, fake.WithoutEFI())
	})
}

func TestCreate_HostWithoutMemoryIsQuota(t *testing.T) {
	inLab(t, func(l *lab) {
		m, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
		if kvm2.RetryAfter(err) <= 0 {
			l.Errorf("RetryAfter() = %v, want some time", kvm2.RetryAfter(err))
		}
		if got := l.get(m.ID); got.State != kvm2.StateCreating || got.Reason != "StartFailed" {
			l.Errorf("Get() = %+v, want it Creating, since it never ran", got)
		}
		l.deleted(m.ID)
		l.wantNothingLeft()
	}, fake.WithMemory(128*mib))
}

func TestCreate_TooLittleSpaceIsQuotaBeforeAnythingIsWritten(t *testing.T) {
	inLab(t, func(l *lab) {
		changed := l.changes(func() {
			_, err := l.p.Create(l.Context(), l.spec)
			l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
			for _, text := range []string{"needed", "available"} {
				if !strings.Contains(fmt.Sprint(err), text) {
					l.Errorf("%v does not tell what is %s", err, text)
				}
			}
		})
		if len(changed) != 0 {
			l.Errorf("changed: %q, want nothing", changed)
		}
	}, fake.WithPool(labPool, 2*gib))
}

func TestCreate_LastSpaceIsPromisedOnce(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.host.FillPool(labPool, 3*gib)
		l.host.StopPool(labPool)
		l.host.StartPool(labPool)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { _, errs[i] = l.p.Create(l.Context(), l.another(fmt.Sprintf("web-%d", i))) })
		}
		wg.Wait()
		classes := []kvm2.Class{kvm2.ClassOf(errs[0]), kvm2.ClassOf(errs[1])}
		slices.Sort(classes)
		if !slices.Equal(classes, []kvm2.Class{kvm2.ClassNone, kvm2.ClassQuota}) {
			l.Errorf("two creations for the space of one: %v, want one made and one Quota", errs)
		}
	}, fake.WithLatency(10*time.Millisecond))
}

func TestCreate_StoppedGuestIsNotStartedAgain(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		l.host.PowerOff(labDomain(l.spec))
		changed := l.changes(func() { l.wantState(l.spec, kvm2.StateStopped, "Shutdown") })
		if len(changed) != 0 {
			l.Errorf("changed: %q, want nothing: what to do with it is the controller's decision", changed)
		}
	})
}

func TestMachine_StateFollowsTheGuest(t *testing.T) {
	tests := []struct {
		name   string
		happen func(*fake.Host, string)
		state  kvm2.State
		reason string
		why    string
	}{
		{"nothing", func(*fake.Host, string) {}, kvm2.StateRunning, "Booted", ""},
		{"paused", (*fake.Host).Pause, kvm2.StatePaused, "User", ""},
		{"full pool", (*fake.Host).PauseIOError, kvm2.StatePaused, "IOError", "it can go on when there is space again"},
		{"resumed", func(h *fake.Host, d string) { h.Pause(d); h.ResumeGuest(d) }, kvm2.StateRunning, "Unpaused", ""},
		{"switched off", (*fake.Host).PowerOff, kvm2.StateStopped, "Shutdown", ""},
		{"destroyed by an administrator", (*fake.Host).DestroyBehind, kvm2.StateStopped, "Destroyed", ""},
		{"saved", (*fake.Host).ManagedSave, kvm2.StateStopped, "Saved", ""},
		{"crashed", (*fake.Host).CrashGuest, kvm2.StateFailed, "Crashed", ""},
		{"daemon restarted", func(h *fake.Host, d string) { h.PowerOff(d); h.RestartDaemon() }, kvm2.StateStopped, "", "the reason is lost, and it did run"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				m := l.running(l.spec)
				tt.happen(l.host, labDomain(l.spec))
				l.wantState(l.spec, tt.state, tt.reason)
				l.deleted(m.ID)
				l.wantNothingLeft()
			})
		})
	}
}

func TestCreate_DeletingMachineIsNotRevived(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDestroy, Effect: fake.Drop()})
		l.wantError("Delete()", l.p.Delete(l.Context(), m.ID), kvm2.ClassTransient, nil)
		if got := l.get(m.ID); got.State != kvm2.StateDeleting {
			l.Errorf("Get() = %+v, want it Deleting", got)
		}
		changed := l.changes(func() {
			got, err := l.p.Create(l.Context(), l.spec)
			l.wantError("Create()", err, kvm2.ClassTransient, kvm2.ErrConflict)
			if got.State != kvm2.StateDeleting {
				l.Errorf("Create() = %+v, want it Deleting", got)
			}
		})
		if len(changed) != 0 {
			l.Errorf("changed: %q, want nothing", changed)
		}
		l.deleted(m.ID)
		l.wantNothingLeft()
	})
}

func TestCreate_SeedHoldsTheLatestUserData(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, Effect: fake.Drop()})
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		l.spec.UserData = []byte("#cloud-config\n# another token\n")
		l.running(l.spec)
		seed, err := isotest.Read(l.host.VolumeBytes(labPool, labVolume(l.spec, "seed")))
		if err != nil {
			l.Fatal(err)
		}
		if got := seed.RockRidge["user-data"]; !bytes.Equal(got, l.spec.UserData) {
			l.Errorf("user-data: %q, want %q", got, l.spec.UserData)
		}
	})
}

func TestDelete_NothingRemains(t *testing.T) {
	tests := []struct {
		name   string
		happen func(*lab)
		why    string
	}{
		{"running", func(*lab) {}, ""},
		{"stopped", func(l *lab) { l.host.PowerOff(labDomain(l.spec)) }, ""},
		{"paused", func(l *lab) { l.host.Pause(labDomain(l.spec)) }, ""},
		{"saved", func(l *lab) { l.host.ManagedSave(labDomain(l.spec)) }, "the daemon refuses to undefine it without a flag"},
		{"with a snapshot", func(l *lab) { l.host.AddSnapshot(labDomain(l.spec), "before") }, "likewise"},
		{"transient", func(l *lab) { l.host.UndefineBehind(labDomain(l.spec)) }, "it goes on without a configuration"},
		{"undefined when stopped", func(l *lab) {
			l.host.PowerOff(labDomain(l.spec))
			l.host.UndefineBehind(labDomain(l.spec))
		}, "only its volumes are left"},
		{"without its root disk", func(l *lab) { l.host.DeleteVolumeBehind(labPool, labVolume(l.spec, "root")) }, ""},
		{"disks whose files are gone", func(l *lab) { l.host.RemoveFile(labPool, labVolume(l.spec, "disk-data")) }, "the pool still lists them"},
		{"ends by itself", func(l *lab) {
			l.before(kvm2.OpDomainDestroy, func() { l.host.PowerOff(labDomain(l.spec)) })
		}, "the daemon answers that it is not running"},
		{"does not end by itself", func(l *lab) {
			l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDestroy, Effect: fake.Fail(38, "Failed to terminate process 17 with SIGTERM: Device or resource busy")})
		}, "it is killed then"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.spec.Firmware = kvm2.FirmwareEFI
				m := l.running(l.spec)
				tt.happen(l)
				l.deleted(m.ID)
				l.wantNothingLeft()
				_, err := l.p.Get(l.Context(), m.ID)
				l.wantError("Get()", err, kvm2.ClassNotFound, kvm2.ErrNotFound)
				if len(l.imageVolumes()) != 2 {
					l.Errorf("image volumes: %q, want the image to remain", l.imageVolumes())
				}
			})
		})
	}
}

func TestDelete_EndsTheGuestFirstAndRemovesTheRootDiskLast(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		domain := labDomain(l.spec)
		got := l.changes(func() { l.deleted(m.ID) })
		want := []string{
			"domain.set-metadata " + domain, "domain.destroy " + domain, "domain.undefine " + domain,
			"volume.delete " + labVolume(l.spec, "seed"), "volume.delete " + labVolume(l.spec, "disk-data"), "volume.delete " + labVolume(l.spec, "root"),
		}
		if !slices.Equal(got, want) {
			l.Errorf("changes:\n%q, want\n%q", got, want)
		}
	})
}

func TestDelete_LeavesNeighbours(t *testing.T) {
	inLab(t, func(l *lab) {
		other := l.running(l.another("other"))
		longer := l.open(func(c *kvm2.Config) { c.Scope = labScope + "-2" }) // its names begin with this scope's
		if _, err := l.create(longer, l.spec); err != nil {
			l.Fatal(err)
		}
		for _, name := range []string{"lab", "lab-", "lab-root", "lab-" + labUUID(l.spec).String(), "x" + labVolume(l.spec, "root")} {
			l.host.AddVolume(labPool, name, []byte("somebody's"))
		}
		l.host.AddForeignDomain("lab-foreign")
		before := withoutLeases(l.host.Dump())

		m := l.running(l.spec)
		l.deleted(m.ID)
		if after := withoutLeases(l.host.Dump()); after != before {
			l.Errorf("a machine came and went, and the host is not as before:\n%s\nwas\n%s", after, before)
		}
		l.deleted(other.ID)
	})
}

// withoutLeases leaves out of a host's dump the leases, which outlive their guests.
func withoutLeases(dump string) string {
	var b strings.Builder
	for line := range strings.Lines(dump) {
		if !strings.HasPrefix(line, "  lease ") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestDelete_FindsThePoolThatTheMachineWasMadeIn(t *testing.T) {
	inLab(t, func(l *lab) {
		first := l.open(func(c *kvm2.Config) { c.Pool = "old" })
		m, err := l.create(first, l.spec)
		if err != nil {
			l.Fatal(err)
		}
		l.deleted(m.ID)
		for _, v := range l.host.Volumes("old") {
			if !isImageVolume(v.Name) {
				l.Errorf("volume left in the old pool: %q", v.Name)
			}
		}
	}, fake.WithPool("old", 100*gib))
}

func TestList_HalfCreatedAndHalfDeletedMachinesAreShown(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		half, gone := l.another("half"), l.another("gone")
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeCreate, Object: labVolume(half, "disk-data"), Effect: fake.Drop()})
		_, err := l.p.Create(l.Context(), half)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		l.wantVolumes(labVolume(half, "root"))

		m := l.running(gone)
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeDelete, Object: labVolume(gone, "root"), Effect: fake.Drop()})
		l.wantError("Delete()", l.p.Delete(l.Context(), m.ID), kvm2.ClassTransient, nil)

		running := l.running(l.spec)
		got := l.list()
		var ids []string
		for _, m := range got {
			ids = append(ids, m.ID)
			if want := l.get(m.ID); want.State != m.State {
				l.Errorf("List() has %+v, Get() %+v", m, want)
			}
		}
		want := []string{labID(half), labID(gone)}
		slices.Sort(want)
		want = append(want, running.ID) // those without a domain have no name, and come first
		if !slices.Equal(ids, want) {
			l.Errorf("List() = %q, want %q", ids, want)
		}
		for _, m := range got {
			l.deleted(m.ID)
		}
		l.wantNothingLeft()
	})
}

func TestList_ThousandsOfForeignDomainsCostNoMoreCalls(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		few := l.calls("", func() { l.list() })
		for i := range 3000 {
			l.host.AddForeignDomain(fmt.Sprintf("lab-foreign-%d", i))
		}
		many := l.calls("", func() {
			if got := l.list(); len(got) != 1 || got[0].ID != labID(l.spec) {
				l.Errorf("List() = %+v, want the one machine", got)
			}
		})
		if many != few {
			l.Errorf("%d calls beside 3,000 foreign domains, %d without", many, few)
		}
	})
}

func TestList_AllOrAnError(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		l.running(l.another("web-2"))
		n := l.calls("", func() { l.list() })
		for _, effect := range []fake.Effect{fake.Drop(), fake.Fail(1, "internal error: something"), fake.Fail(38, "Cannot open: Interrupted system call")} {
			for k := 1; k <= n; k++ {
				f := l.host.AddFault(fake.Fault{Nth: l.host.Stats().Calls + k, Effect: effect})
				machines, err := l.p.List(l.Context())
				if !f.Reached() {
					f.Remove()
					continue // a new connection was dialed, or not, so there is a call more or less
				}
				if err == nil || machines != nil {
					l.Errorf("call %d failed: List() = %+v, %v; want an error and nothing", k, machines, err)
				}
			}
		}
	})
}

func TestList_UnreadableMachineIsAnErrorAndNotLeftOut(t *testing.T) {
	for name, metadata := range map[string]string{
		"no metadata":                        "",
		"metadata that are no kvm2 metadata": "<machine/>",
		"another version":                    "<machine version='2' scope='lab'/>",
	} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.running(l.spec)
				l.host.SetMetadataBehind(labDomain(l.spec), metadata)
				_, err := l.p.List(l.Context())
				l.wantError("List()", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
			})
		})
	}
}

func TestProvider_LostConnectionIsNeverNotFoundAndNeverGone(t *testing.T) {
	for _, when := range []fake.When{fake.Before, fake.After} {
		inLab(t, func(l *lab) {
			m := l.running(l.spec)
			for _, op := range []kvm2.Op{kvm2.OpDial, kvm2.OpDomainLookup, kvm2.OpDomainAddresses} {
				l.host.DropSessions()
				l.host.AddFault(fake.Fault{Op: op, When: when, Effect: fake.Drop()})
				_, err := l.p.Get(l.Context(), m.ID)
				l.wantError(fmt.Sprintf("Get() with %s lost", op), err, kvm2.ClassTransient, nil)
				if errors.Is(err, kvm2.ErrNotFound) {
					l.Errorf("Get() = %v", err)
				}
			}
			for _, op := range []kvm2.Op{kvm2.OpDial, kvm2.OpDomainLookup, kvm2.OpDomainUndefine, kvm2.OpVolumeList, kvm2.OpVolumeDelete} {
				l.host.DropSessions()
				l.host.AddFault(fake.Fault{Op: op, When: when, Effect: fake.Drop()})
				l.wantError(fmt.Sprintf("Delete() with %s lost", op), l.p.Delete(l.Context(), m.ID), kvm2.ClassTransient, nil)
			}
			l.deleted(m.ID)
			l.wantNothingLeft()
		})
	}
}

func TestProvider_CallsEndWithTheirContext(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		calls := map[string]func(context.Context) error{
			"Create": func(ctx context.Context) error { _, err := l.p.Create(ctx, l.another("web-2")); return err },
			"Get":    func(ctx context.Context) error { _, err := l.p.Get(ctx, m.ID); return err },
			"Delete": func(ctx context.Context) error { return l.p.Delete(ctx, m.ID) },
			"List":   func(ctx context.Context) error { _, err := l.p.List(ctx); return err },
		}
		for name, call := range calls {
			f := l.host.AddFault(fake.Fault{Times: fake.Always, Effect: fake.Hang()})
			ctx, cancel := context.WithTimeout(l.Context(), 2*time.Second)
			start := time.Now()
			err := call(ctx)
			cancel()
			f.Remove()
			l.wantError(name, err, kvm2.ClassTransient, context.DeadlineExceeded)
			if took := time.Since(start); took > 2*time.Second {
				l.Errorf("%s took %v after a context of 2 s", name, took)
			}
		}
	})
}

func TestProvider_HostThatHangsIsBoundedWithoutADeadline(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.AddFault(fake.Fault{Times: fake.Always, Effect: fake.Hang()})
		start := time.Now()
		_, err := l.p.Get(l.Context(), m.ID)
		l.wantError("Get()", err, kvm2.ClassTransient, context.DeadlineExceeded)
		if took := time.Since(start); took > 30*time.Second {
			l.Errorf("Get() took %v, want at most Config.CallTimeout", took)
		}
	})
}

func TestProvider_WaitingForAnotherCallEndsWithTheContext(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDestroy, Effect: fake.Delay(10 * time.Second)})
		var wg sync.WaitGroup
		wg.Go(func() { _ = l.p.Delete(l.Context(), m.ID) })
		l.wait(time.Second)
		ctx, cancel := context.WithTimeout(l.Context(), time.Second)
		defer cancel()
		_, err := l.p.Create(ctx, l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, context.DeadlineExceeded)
		wg.Wait()
	})
}

func TestProvider_BrokenConnectionIsNotUsedAgain(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainLookup, Effect: fake.Drop()})
		_, err := l.p.Get(l.Context(), m.ID)
		l.wantError("Get()", err, kvm2.ClassTransient, nil)
		dials := l.calls(kvm2.OpDial, func() { l.get(m.ID) })
		if dials != 1 {
			l.Errorf("%d dials after a lost connection, want one", dials)
		}
		l.host.RestartDaemon()
		l.get(m.ID) // the session ended while nobody used it, which nobody has to notice
	})
}

func TestProvider_MachinesDoNotWaitForEachOtherAndConnectionsAreBounded(t *testing.T) {
	inLab(t, func(l *lab) {
		const connections, machines = 3, 12
		p := l.open(func(c *kvm2.Config) { c.MaxConnections = connections })
		l.cached()
		var mu sync.Mutex
		most := 0
		l.host.Intercept(func(fake.Call) error {
			mu.Lock()
			defer mu.Unlock()
			most = max(most, l.host.Stats().OpenSessions)
			return nil
		})
		start := time.Now()
		if _, err := l.create(p, l.spec); err != nil {
			l.Fatal(err)
		}
		alone := time.Since(start)
		start = time.Now()
		var wg sync.WaitGroup
		for i := range machines {
			wg.Go(func() {
				if _, err := l.create(p, l.another(fmt.Sprintf("m-%d", i))); err != nil {
					l.Errorf("Create() = %v", err)
				}
			})
		}
		wg.Wait()
		l.host.Intercept(nil)
		if took := time.Since(start); took > machines*alone/2 {
			l.Errorf("%d machines took %v, one alone %v", machines, took, alone)
		}
		if most > connections+1 { // the lab's own provider keeps one
			l.Errorf("%d sessions were open at once, want at most %d", most, connections)
		}
	}, fake.WithLatency(100*time.Millisecond))
}

func TestProvider_CloseEndsEverything(t *testing.T) {
	inLab(t, func(l *lab) {
		p := l.open(nil)
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.Hang()})
		if _, err := p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(time.Second)
		closeProvider(l.T, p)
		if open := l.host.Stats().OpenSessions; open != 0 {
			l.Errorf("%d sessions open after Close", open)
		}
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("the interrupted transfer left %q", left)
		}
		_, err := p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrClosed)
		_, err = p.List(l.Context())
		l.wantError("List()", err, kvm2.ClassPermanent, kvm2.ErrClosed)
	})
}

func TestMachine_AddressesAppearWhenTheGuestHasBooted(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		if m.Addresses == nil || len(m.Addresses) != 0 {
			l.Errorf("addresses before the guest has booted: %#v, want an empty list", m.Addresses)
		}
		l.wait(time.Minute)
		lease := l.get(m.ID).Addresses
		if len(lease) != 1 || lease[0].Source != kvm2.SourceLease {
			l.Fatalf("addresses: %+v, want the one of the lease", lease)
		}
		if got := l.list()[0].Addresses; !slices.Equal(got, lease) {
			l.Errorf("List() has %+v, want %+v", got, lease)
		}
		agent := netip.MustParseAddr("192.168.122.77")
		l.host.ConnectAgent(labDomain(l.spec), agent, netip.MustParseAddr("fe80::1"))
		got := l.get(m.ID).Addresses
		if len(got) != 1 || got[0].IP != agent || got[0].Source != kvm2.SourceAgent {
			l.Errorf("addresses: %+v, want the agent's %v alone", got, agent)
		}
		l.host.PowerOff(labDomain(l.spec))
		if got := l.get(m.ID).Addresses; got == nil || len(got) != 0 {
			l.Errorf("addresses of a stopped machine: %#v, want an empty list", got)
		}
	}, fake.WithBootTime(30*time.Second))
}

func TestMachine_LeaseOfAnEarlierMachineDoesNotWin(t *testing.T) {
	inLab(t, func(l *lab) {
		old := l.running(l.spec)
		l.wait(time.Minute)
		before := l.get(old.ID).Addresses
		l.deleted(old.ID)
		m := l.running(l.spec) // the same owner: the same MAC
		l.wait(time.Minute)
		after := l.get(m.ID).Addresses
		if len(before) != 1 || len(after) != 1 || before[0].IP == after[0].IP || before[0].MAC != after[0].MAC {
			l.Errorf("addresses: %+v, then %+v; want another lease of the same MAC", before, after)
		}
	}, fake.WithBootTime(30*time.Second))
}

func TestProvider_LogsAndErrorsHoldNoSecrets(t *testing.T) {
	const secret = "hunter2-hunter2"
	inLab(t, func(l *lab) {
		var log bytes.Buffer
		p := l.open(nil, kvm2.WithLogger(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))))
		l.spec.UserData = []byte("#cloud-config\npassword: " + secret + "\n")
		l.spec.VendorData = []byte("#cloud-config\n# " + secret + "\n")
		l.spec.NetworkConfig = []byte(`{"version":2,"secret":"` + secret + `"}`)
		var told []string
		for _, op := range []kvm2.Op{kvm2.OpVolumeUpload, kvm2.OpDomainDefine, kvm2.OpDomainStart} {
			l.host.AddFault(fake.Fault{Op: op, Effect: fake.Drop()})
		}
		for range 50 {
			m, err := p.Create(l.Context(), l.spec)
			told = append(told, fmt.Sprintf("%+v %v", m, err))
			if m.State == kvm2.StateRunning && err == nil {
				break
			}
			l.wait(max(time.Second, kvm2.RetryAfter(err)))
		}
		if !strings.Contains(log.String(), "domain.define") {
			l.Fatalf("the log does not tell what was done:\n%s", &log)
		}
		told = append(told, log.String(), l.host.Dump(), fmt.Sprint(l.host.Calls()))
		for _, text := range told {
			if strings.Contains(text, secret) {
				l.Errorf("the secret is told:\n%s", text)
			}
		}
	})
}

func TestProvider_ErrorsNameMachineHostAndOperation(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainLookup, Effect: fake.Fail(1, "internal error: something")})
		_, err := l.p.Get(l.Context(), m.ID)
		var e *kvm2.Error
		if !errors.As(err, &e) || e.Op != kvm2.OpDomainLookup || e.Host != "localhost" {
			l.Errorf("Get() = %#v, want an *Error with operation and host", err)
		}
		for _, text := range []string{m.ID, "localhost", "domain.lookup", "something"} {
			if !strings.Contains(fmt.Sprint(err), text) {
				l.Errorf("%v does not tell %q", err, text)
			}
		}
	})
}
