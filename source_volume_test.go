package kvm2_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

const goldenVolume = "golden.qcow2"

// inPlace has the lab's machine stand on a volume of somebody's.
func (l *lab) inPlace(content []byte) {
	l.Helper()
	l.host.AddVolume(labPool, goldenVolume, content)
	l.spec.Image = kvm2.Image{Volume: goldenVolume}
}

func qcow2Of(t testing.TB, size int64) []byte {
	t.Helper()
	b, err := qcow2.MinimalImage(size)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestVolume_IsUsedInPlaceAndLeftAlone(t *testing.T) {
	for name, content := range map[string][]byte{"qcow2": qcow2Of(t, gib), "raw": randomDisk(mib), "raw, smaller than a header": randomDisk(1024)} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.inPlace(content)
				before := l.volume(goldenVolume)
				m := l.running(l.spec)
				root := l.volume(labVolume(l.spec, "root"))
				format, _, _ := strings.Cut(name, ",")
				if root.BackingPath != before.Path || root.BackingFormat != format || root.CapacityBytes != l.spec.RootDiskBytes {
					l.Errorf("the root disk: %+v", root)
				}
				l.running(l.another("second"))
				l.deleted(m.ID)
				if got := l.volume(goldenVolume); got != before || !bytes.Equal(l.host.VolumeBytes(labPool, goldenVolume), content) {
					l.Errorf("the volume became %+v, it was %+v", got, before)
				}
				if images := l.imageVolumes(); len(images) != 0 {
					l.Errorf("image volumes: %q, want none", images)
				}
			})
		})
	}
}

func TestVolume_OnlyItsHeadIsRead(t *testing.T) {
	inLab(t, func(l *lab) {
		l.inPlace(randomDisk(16 * mib))
		l.running(l.spec)
		for _, c := range l.host.Calls() {
			if c.Op == kvm2.OpVolumeDownload && c.Bytes > mib {
				l.Errorf("%d bytes were read", c.Bytes)
			}
		}
		if l.host.Stats().OpenSessions > 1 {
			l.Errorf("%d sessions open", l.host.Stats().OpenSessions)
		}
	})
}

func TestVolume_Refused(t *testing.T) {
	tests := []struct {
		name string
		edit func([]byte) []byte
		says string
	}{
		{"backing file", func(b []byte) []byte {
			binary.BigEndian.PutUint64(b[8:], 512)
			binary.BigEndian.PutUint32(b[16:], 11)
			copy(b[512:], "/etc/shadow")
			return b
		}, "backing file"},
		{"external data file", func(b []byte) []byte { b[79] |= 4; return b }, "external file"},
		{"encrypted", func(b []byte) []byte { binary.BigEndian.PutUint32(b[32:], 1); return b }, "encrypted"},
		{"unknown feature", func(b []byte) []byte { b[72] |= 1; return b }, "features that are not known"},
		{"absurd size", func(b []byte) []byte { b[24] = 0x7f; return b }, "L1 table"},
		{"absurd clusters", func(b []byte) []byte { b[23] = 40; return b }, "clusters of 2^40"},
		{"compressed", gzipped, "compressed with gzip"},
		{"VMDK", func(b []byte) []byte { copy(b, "KDMV"); return b }, "VMDK"},
		{"empty", func([]byte) []byte { return nil }, "it is empty"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.inPlace(tt.edit(qcow2Of(t, gib)))
				before := l.host.VolumeBytes(labPool, goldenVolume)
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
				if !strings.Contains(fmt.Sprint(err), tt.says) || !strings.Contains(fmt.Sprint(err), goldenVolume) {
					l.Errorf("Create() = %v, want it to say %q and which volume", err, tt.says)
				}
				l.wantVolumes(goldenVolume)
				if !bytes.Equal(l.host.VolumeBytes(labPool, goldenVolume), before) {
					l.Error("the volume was changed")
				}
			})
		})
	}
}

func TestVolume_MissingIsPermanent(t *testing.T) {
	inLab(t, func(l *lab) {
		l.spec.Image = kvm2.Image{Volume: goldenVolume}
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		l.wantNothingLeft()
		l.inPlace(qcow2Of(t, gib))
		l.running(l.spec)
	})
}

func TestVolume_GoneWhileTheMachineIsMadeIsSeen(t *testing.T) {
	inLab(t, func(l *lab) {
		l.inPlace(qcow2Of(t, gib))
		root := labVolume(l.spec, "root")
		l.host.Intercept(func(c fake.Call) error {
			if c.Op == kvm2.OpVolumeLookup && slices.Contains(l.allVolumes(), root) {
				l.host.Intercept(nil)
				l.host.DeleteVolumeBehind(labPool, goldenVolume)
			}
			return nil
		})
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		l.wantNothingLeft()
	})
}

func TestVolume_LargerThanTheRootDiskIsInvalid(t *testing.T) {
	for name, content := range map[string][]byte{"qcow2": qcow2Of(t, 4*gib), "raw": randomDisk(3 * mib)} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.inPlace(content)
				l.spec.RootDiskBytes = 2 * mib
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
			})
		})
	}
}

func TestVolume_HostThatDoesNotAnswerIsTransientAndBounded(t *testing.T) {
	for name, effect := range map[string]fake.Effect{"hangs": fake.Hang(), "breaks off": fake.Drop()} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.inPlace(qcow2Of(t, gib))
				l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeDownload, Effect: effect})
				start := time.Now()
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, kvm2.ClassTransient, nil)
				if err == nil || time.Since(start) > 31*time.Second {
					l.Errorf("Create() = %v after %v", err, time.Since(start))
				}
				l.running(l.spec)
			})
		})
	}
}

func TestVolume_Rendered(t *testing.T) {
	inLab(t, func(l *lab) {
		for image, want := range map[kvm2.Image]string{
			{Volume: goldenVolume}: "/var/lib/libvirt/images/" + goldenVolume + "<",
			{URL: "https://images.example/i", ChecksumURL: "https://images.example/SUMS"}: "/var/lib/libvirt/images/lab-image-DIGEST-ATTEMPT<",
		} {
			l.spec.Image = image
			r, err := l.p.Render(l.spec)
			if err != nil || !strings.Contains(r.Volumes[0], want) {
				l.Errorf("Render() = %q, %v; want %q in it", r.Volumes, err, want)
			}
		}
	})
}
