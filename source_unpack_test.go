package kvm2_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// bzip2Image is what bzip2 makes of the lab's image: an empty qcow2 image of 1 GiB.
const bzip2Image = "QlpoOTFBWSZTWVDJo3kACCX3IP0IQAAIAEEgIAAAQAAgAoggAFCmmRiYmIFSTSmjIw1PeLzvV+tAE6ragDOWKj5UEAuVEgG2MTVO" +
	"PM25pzTzvVxAGv4u5IpwoSChk0by"

func gzipped(content []byte) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	_, _ = z.Write(content)
	_ = z.Close()
	return b.Bytes()
}

// packed has the server give out a compressed file. The web image's content stays what is in it.
func (l *lab) packed(file []byte, edit func(*kvm2.Config), opts ...kvm2.Option) *webImage {
	l.Helper()
	w := l.web(edit)
	l.spec.Image.Checksum = (&webImage{content: file}).checksum()
	w.answer = func(int) *http.Response { return answerWith(http.StatusOK, bytes.NewReader(file), int64(len(file))) }
	l.p = l.open(edit, append(opts, kvm2.WithHTTPClient(&http.Client{Transport: w}))...)
	return w
}

func TestUnpack_CompressedImagesArePublishedUnpacked(t *testing.T) {
	bzip, err := base64.StdEncoding.DecodeString(bzip2Image)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		pack func(image []byte) []byte
	}{
		{"gzip", gzipped},
		{"gzip in two members", func(b []byte) []byte { return append(gzipped(b[:1000]), gzipped(b[1000:])...) }},
		{"bzip2", func([]byte) []byte { return bzip }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.web(nil)
				file := tt.pack(w.content)
				l.packed(file, nil)
				m := l.running(l.spec)
				l.wantImage(w)
				if root := l.volume(labVolume(l.spec, "root")); root.BackingFormat != "qcow2" || m.State != kvm2.StateRunning {
					l.Errorf("the root disk: %+v", root)
				}
			})
		})
	}
}

// volume is a volume of the lab's pool.
func (l *lab) volume(name string) kvm2.Volume {
	l.Helper()
	volumes := l.host.Volumes(labPool)
	i := slices.IndexFunc(volumes, func(v kvm2.Volume) bool { return v.Name == name })
	if i < 0 {
		l.Fatalf("there is no volume %q", name)
	}
	return volumes[i]
}

func TestUnpack_ProgressIsThatOfTheFile(t *testing.T) {
	inLab(t, func(l *lab) {
		image := randomDisk(mib)
		file, g := gzipped(image), make(gate)
		w := l.packed(file, nil)
		half := len(file) / 2
		w.answer = func(int) *http.Response {
			return answerWith(http.StatusOK, io.MultiReader(bytes.NewReader(file[:half]), g, bytes.NewReader(file[half:])), int64(len(file)))
		}
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(time.Second)
		m, err := l.p.Create(l.Context(), l.spec)
		want := kvm2.ImageProgress{Phase: kvm2.ImageTransferring, DoneBytes: int64(half), TotalBytes: int64(len(file)), BytesPerSecond: int64(half), Attempt: 1}
		if err != nil || m.Image == nil || *m.Image != want {
			l.Errorf("Create() = %+v, %v; want %+v", m.Image, err, want)
		}
		close(g)
		l.running(l.spec)
		w.content = image
		l.wantImage(w)
	})
}

func TestUnpack_ResumesInTheMiddleOfACompressedFile(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(func(c *kvm2.Config) { c.Images.MaxRetries = 10 })
		image := w.content
		w.content = gzipped(image)
		w.breaks = tenths(len(w.content))
		l.spec.Image.Checksum = w.checksum()
		l.running(l.spec)
		l.wantImage(&webImage{content: image})
		if w.served != int64(len(w.content)) {
			l.Errorf("the server sent %d bytes of %d", w.served, len(w.content))
		}
	})
}

func TestUnpack_Refused(t *testing.T) {
	image := randomDisk(mib)
	damaged := gzipped(image)
	damaged[len(damaged)/2]++
	tests := []struct {
		name     string
		file     []byte
		edit     func(*kvm2.Config)
		says     string
		requests int
		why      string
	}{
		{"damaged, as its checksum says", damaged, nil, "cannot be decompressed (gzip)", 1, "another attempt brings the same"},
		{"damaged header", append([]byte("\x1f\x8b\x08\xe0"), image...), nil, "cannot be decompressed (gzip)", 1, ""},
		{"cut off, as its checksum says", gzipped(image)[:len(image)/2], nil, "unexpected EOF", 1, ""},
		{"trailing bytes", append(gzipped(image), "and more"...), nil, "cannot be decompressed (gzip)", 1, "nobody can tell what they are"},
		{"too much in it", gzipped(make([]byte, 2*mib)), func(c *kvm2.Config) { c.Images.MaxExpandedBytes = mib }, "recognised", 1, "its head comes first"},
		{"too much behind a head", gzipped(append(image, make([]byte, mib)...)), func(c *kvm2.Config) { c.Images.MaxExpandedBytes = mib + 1 }, "more than 1048577 bytes", 1, ""},
		{"compressed twice", gzipped(gzipped(image)), nil, "compressed with gzip", 1, ""},
		{"web page in it", gzipped([]byte("<html>")), nil, "HTML", 1, ""},
		{"nothing in it", gzipped(nil), nil, "it is empty", 1, ""},
		{"xz", []byte("\xfd7zXZ\x00 and so on"), nil, "compressed with xz; kvm2 takes qcow2 or raw: decompress it first, or give kvm2 a way to by WithDecompressor", 1, ""},
		{"zstd", []byte("\x28\xb5\x2f\xfd and so on"), nil, "compressed with zstd; kvm2 takes qcow2 or raw: decompress it first, or give kvm2 a way to by WithDecompressor", 1, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.packed(tt.file, tt.edit)
				_, err := l.create(l.p, l.spec)
				l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
				if !strings.Contains(fmt.Sprint(err), tt.says) {
					l.Errorf("Create() = %v, want it to say %q; %s", err, tt.says, tt.why)
				}
				if w.count() != tt.requests {
					l.Errorf("the image was asked for %d times, want %d; %s", w.count(), tt.requests, tt.why)
				}
				if left := l.imageVolumes(); len(left) != 0 {
					l.Errorf("image volumes left: %q", left)
				}
				l.wantNothingLeft()
			})
		})
	}
}

func TestUnpack_AsManyBytesAsAllowedAreTaken(t *testing.T) {
	inLab(t, func(l *lab) {
		image := randomDisk(mib)
		l.packed(gzipped(image), func(c *kvm2.Config) { c.Images.MaxExpandedBytes = mib })
		l.running(l.spec)
		l.wantImage(&webImage{content: image})
	})
}

func TestUnpack_BoundIsOnWhatIsWritten(t *testing.T) {
	inLab(t, func(l *lab) {
		const most = 4 * mib
		l.packed(gzipped(append(randomDisk(mib), make([]byte, 16*mib)...)), func(c *kvm2.Config) { c.Images.MaxExpandedBytes = most })
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if sent := l.host.Stats().UploadedBytes; sent > most {
			l.Errorf("%d bytes reached the host, want no more than %d", sent, most)
		}
	})
}

func TestUnpack_FileThatWasDamagedOnItsWayIsTriedAgain(t *testing.T) {
	for name, damage := range map[string]func([]byte){
		"in its header": func(b []byte) { b[3] = 0xff },
		"at its start":  func(b []byte) { clear(b[20:60]) },
		"in the middle": func(b []byte) { b[len(b)/2]++ },
		"at its end":    func(b []byte) { b[len(b)-1]++ },
	} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				image := randomDisk(mib)
				file := gzipped(image)
				w := l.packed(file, nil)
				w.answer = func(n int) *http.Response {
					sent := slices.Clone(file)
					if n == 1 {
						damage(sent)
					}
					return answerWith(http.StatusOK, bytes.NewReader(sent), int64(len(sent)))
				}
				l.running(l.spec)
				l.wantImage(&webImage{content: image})
				if w.count() != 2 {
					l.Errorf("the image was asked for %d times, want twice", w.count())
				}
			})
		})
	}
}

// half is a made-up compression: its magic, and then every byte twice.
type half struct {
	in     io.Reader
	closed *atomic.Int32
}

func (h half) Read(p []byte) (int, error) {
	for n := range p {
		var b [2]byte
		if _, err := io.ReadFull(h.in, b[:]); err != nil {
			return n, err
		}
		if b[0] != b[1] {
			return n, errors.New("the bytes differ")
		}
		p[n] = b[0]
	}
	return len(p), nil
}

func (h half) Close() error {
	h.closed.Add(1)
	return nil
}

const (
	halfMagic = "HALF"
	halfSize  = 128 << 10 // of images that are packed so, which is slow
)

func halved(image []byte) []byte {
	out := []byte(halfMagic)
	for _, b := range image {
		out = append(out, b, b)
	}
	return out
}

// halves is a Decompressor that reads size bytes and leaves what follows.
func halves(size int64, closed *atomic.Int32) kvm2.Option {
	return kvm2.WithDecompressor(kvm2.Decompressor{Name: "half", Magic: []byte(halfMagic), NewReader: func(r io.Reader) (io.Reader, error) {
		if _, err := io.CopyN(io.Discard, r, int64(len(halfMagic))); err != nil {
			return nil, err
		}
		h := half{in: r, closed: closed}
		return struct {
			io.Reader
			io.Closer
		}{io.LimitReader(h, size), h}, nil
	}})
}

func TestUnpack_WithADecompressorOfOnesOwn(t *testing.T) {
	inLab(t, func(l *lab) {
		var closed atomic.Int32
		image := randomDisk(halfSize)
		l.packed(halved(image), nil, halves(halfSize, &closed))
		l.running(l.spec)
		l.wantImage(&webImage{content: image})
		if closed.Load() != 1 {
			l.Errorf("the reader was closed %d times, want once", closed.Load())
		}
	})
}

func TestUnpack_TrailingBytesThatADecompressorLeavesAreVerifiedToo(t *testing.T) {
	for _, tt := range []struct {
		name  string
		sent  string
		class kvm2.Class
	}{{"as they should be", "trailer", kvm2.ClassNone}, {"other ones", "Trailer", kvm2.ClassPermanent}, {"none", "", kvm2.ClassPermanent}} {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				var closed atomic.Int32
				image := randomDisk(halfSize)
				w := l.packed(append(halved(image), "trailer"...), nil, halves(halfSize, &closed))
				w.answer = func(int) *http.Response {
					return answerWith(http.StatusOK, bytes.NewReader(append(halved(image), tt.sent...)), -1)
				}
				_, err := l.create(l.p, l.spec)
				if kvm2.ClassOf(err) != tt.class || (err == nil) != (len(l.imageVolumes()) == 2) {
					l.Errorf("Create() = %v, want class %v; volumes %q", err, tt.class, l.imageVolumes())
				}
			})
		})
	}
}

func TestUnpack_DecompressorIsClosedWhenTheTransferFails(t *testing.T) {
	tests := []struct {
		name  string
		fault fake.Fault
	}{
		{"before the upload", fake.Fault{Op: kvm2.OpVolumeCreate, Effect: fake.Drop()}},
		{"in the upload", fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.Drop()}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				var closed, opened atomic.Int32
				image := randomDisk(halfSize)
				l.packed(halved(image), nil, halves(halfSize, &closed), kvm2.WithImageRequest(func(*http.Request) error {
					opened.Add(1)
					return nil
				}))
				l.host.AddFault(tt.fault)
				l.running(l.spec)
				if closed.Load() != opened.Load() || opened.Load() != 2 {
					l.Errorf("opened %d times, closed %d times; want 2", opened.Load(), closed.Load())
				}
			})
		})
	}
}

func TestUnpack_CancelledTransferLeavesNothing(t *testing.T) {
	inLab(t, func(l *lab) {
		file, ctx := gzipped(randomDisk(mib)), l.Context()
		w := l.packed(file, nil)
		w.answer = func(int) *http.Response {
			return answerWith(http.StatusOK, io.MultiReader(bytes.NewReader(file[:len(file)/2]), silent{ctx}), int64(len(file)))
		}
		if _, err := l.p.Create(ctx, l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(time.Minute + time.Second) // it stalls
		_, err := l.p.Create(ctx, l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
	})
}

// silent is a Reader that has nothing to say until the test ends.
type silent struct{ context.Context }

func (u silent) Read([]byte) (int, error) {
	<-u.Done()
	return 0, u.Err()
}
