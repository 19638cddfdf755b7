package kvm2_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// sparseDisk is a raw disk with a boot sector, data here and there, and holes.
func sparseDisk() (disk []byte, data int64) {
	disk = make([]byte, 96*mib)
	disk[510], disk[511] = 0x55, 0xaa
	for _, at := range []int64{30 * mib, 31 * mib, 70*mib + 12345} {
		copy(disk[at:], bytes.Repeat([]byte{0xd1}, int(mib/2)))
	}
	// The boot sector; two stretches with half a MiB of zeros between them; one more; the last byte.
	return disk, 512 + 3*mib/2 + mib/2 + 1
}

func TestImage_HolesOfARawImageAreNotSent(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		var data int64
		w.content, data = sparseDisk()
		l.spec.Image.Checksum = w.checksum()
		before := l.host.Stats().UploadedBytes
		l.cached()
		const seeds = mib
		if sent := l.host.Stats().UploadedBytes - before; sent < data || sent > data+seeds {
			l.Errorf("%d bytes were sent, want the %d of data and a seed", sent, data)
		}
		l.wantImage(w)
		for _, v := range l.host.Volumes(labPool) {
			if v.PhysicalBytes == int64(len(w.content)) && v.AllocatedBytes > data+mib {
				l.Errorf("the image takes up %d bytes on the host, want its holes not to", v.AllocatedBytes)
			}
		}
	})
}

func TestImage_Qcow2IsSentAsItIs(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		w.content = append(w.content, make([]byte, 32*mib)...)
		l.spec.Image.Checksum = w.checksum()
		if got := l.calls(kvm2.OpVolumeUpload, l.cached); got != 2 {
			l.Errorf("%d uploads, want one of the image and one of the seed", got)
		}
		l.wantImage(w)
	})
}

func TestImage_RangeThatDidNotReachTheDiskIsNotTakenForAHole(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		w.content, _ = sparseDisk()
		l.spec.Image.Checksum = w.checksum()
		// The second range ends early, without a word; after the third the file would have its full size.
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Skip: 1, Effect: fake.TruncateUpload(1000)})
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
		if _, err := l.createPastQuota(); err != nil {
			l.Fatal(err)
		}
		l.wantImage(w)
	})
}

// createPastQuota polls on although there was too little space.
func (l *lab) createPastQuota() (m kvm2.Machine, err error) {
	for range 100 {
		if m, err = l.create(l.p, l.spec); kvm2.ClassOf(err) != kvm2.ClassQuota {
			return m, err
		}
		l.wait(kvm2.RetryAfter(err))
	}
	return m, err
}

// lostBody is an answer's body that breaks off or stands still in the middle.
type lostBody struct {
	io.Reader
	closed chan struct{}
}

func (b *lostBody) Close() error {
	close(b.closed)
	return nil
}

// untilClosed is a Reader that stands still until the body that it belongs to is closed.
type untilClosed struct{ closed chan struct{} }

func (u untilClosed) Read([]byte) (int, error) {
	<-u.closed
	return 0, io.ErrClosedPipe
}

// The bubble of the lab fails a test whose goroutines are left.
func TestImage_SourceThatBlocksForeverIsClosed(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(*lab)
	}{
		{"the transfer stalls", func(l *lab) { l.wait(time.Hour) }},
		{"the provider is closed", func(l *lab) {
			if err := l.p.Close(); err != nil {
				l.Errorf("Close() = %v", err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.web(nil)
				w.content, _ = sparseDisk()
				l.spec.Image.Checksum = w.checksum()
				body := &lostBody{closed: make(chan struct{})}
				body.Reader = io.MultiReader(bytes.NewReader(w.content[:50*mib]), untilClosed{body.closed})
				w.answer = func(int) *http.Response {
					r := answerWith(http.StatusOK, nil, int64(len(w.content)))
					r.Body = body
					return r
				}
				if _, err := l.p.Create(l.Context(), l.spec); err != nil {
					l.Fatal(err)
				}
				l.wait(time.Second)
				tt.end(l)
				<-body.closed
				if left := l.imageVolumes(); len(left) != 0 {
					l.Errorf("image volumes left: %q", left)
				}
			})
		})
	}
}

func TestImage_HostThatGivesUpEndsAWaitForTheSource(t *testing.T) {
	inLab(t, func(l *lab) {
		w, g := l.web(nil), make(gate)
		defer close(g)
		disk, _ := sparseDisk()
		w.content = disk
		l.spec.Image.Checksum = w.checksum()
		w.answer = func(int) *http.Response {
			return answerWith(http.StatusOK, io.MultiReader(bytes.NewReader(disk[:31*mib]), g), int64(len(disk)))
		}
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Skip: 1, Effect: fake.CutUpload(1000)})
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(time.Second)
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		if err == nil || !strings.Contains(err.Error(), "connection") {
			l.Errorf("Create() = %v, want the error of the upload", err)
		}
	})
}
