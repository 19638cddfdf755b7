package kvm2_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

// webImage is an image that a web server gives out, without a network between.
type webImage struct {
	content []byte

	mu       sync.Mutex
	requests []*http.Request
	// answer gives the n-th answer, counted from 1; nil gives out the content.
	answer func(n int) *http.Response
}

func (w *webImage) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, r)
	if w.answer != nil {
		return w.answer(len(w.requests)), nil
	}
	return answerWith(http.StatusOK, bytes.NewReader(w.content), int64(len(w.content))), nil
}

func (w *webImage) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.requests)
}

// answerWith is an answer whose length is unknown if it is negative.
func answerWith(status int, body io.Reader, length int64) *http.Response {
	return &http.Response{StatusCode: status, Body: io.NopCloser(body), ContentLength: length, Header: http.Header{}}
}

func (w *webImage) checksum() string {
	sum := sha256.Sum256(w.content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// web has the lab's machine take its image from a web server, and gives it a provider that asks there.
func (l *lab) web(edit func(*kvm2.Config)) *webImage {
	l.Helper()
	content, err := qcow2.MinimalImage(gib)
	if err != nil {
		l.Fatal(err)
	}
	w := &webImage{content: content}
	l.spec.Image = kvm2.Image{URL: "https://images.example/debian.qcow2", Checksum: w.checksum()}
	l.p = l.open(edit, kvm2.WithHTTPClient(&http.Client{Transport: w}))
	return w
}

// gate is a Reader that holds everything up until it is opened, and then has nothing to say.
type gate chan struct{}

func (g gate) Read([]byte) (int, error) {
	<-g
	return 0, io.EOF
}

// held is the content with a gate in the middle. The test must open it.
func (w *webImage) held(g gate) *http.Response {
	half := len(w.content) / 2
	body := io.MultiReader(bytes.NewReader(w.content[:half]), g, bytes.NewReader(w.content[half:]))
	return answerWith(http.StatusOK, body, int64(len(w.content)))
}

func TestImage_CreateDoesNotWaitForItAndReportsProgress(t *testing.T) {
	inLab(t, func(l *lab) {
		w, g := l.web(nil), make(gate)
		w.answer = func(int) *http.Response { return w.held(g) }
		var last kvm2.ImageProgress
		for range 10 {
			start := time.Now()
			m, err := l.p.Create(l.Context(), l.spec)
			if err != nil || m.State != kvm2.StateCreating || m.Image == nil {
				l.Fatalf("Create() = %+v, %v; want it Creating, with progress", m, err)
			}
			if took := time.Since(start); took != 0 {
				l.Errorf("Create() took %v on a host that answers at once", took)
			}
			if m.Image.DoneBytes < last.DoneBytes {
				l.Errorf("the progress went from %+v back to %+v", last, *m.Image)
			}
			last = *m.Image
			l.wait(time.Second)
		}
		want := kvm2.ImageProgress{
			Phase: kvm2.ImageTransferring, DoneBytes: int64(len(w.content) / 2), TotalBytes: int64(len(w.content)), Attempt: 1,
		}
		if last != want {
			l.Errorf("progress: %+v, want %+v", last, want)
		}
		close(g)
		l.running(l.spec)
	})
}

func TestImage_TransferredOnceHoweverManyMachinesWait(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.large(w)
		w.slowly()
		l.spec.RootDiskBytes = 64 * mib
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				if _, err := l.create(l.p, l.another(fmt.Sprintf("web-%d", i))); err != nil {
					l.Errorf("Create() = %v", err)
				}
			})
		}
		wg.Wait()
		if uploads := l.imageUploads(); len(uploads) != 1 || uploads[0].Bytes != int64(len(w.content)) || w.count() != 1 {
			l.Errorf("asked for %d times, uploads: %v; want one of each", w.count(), uploads)
		}
		if domains := l.host.Domains(); len(domains) != 100 {
			l.Errorf("%d domains, want 100", len(domains))
		}
		l.wantImage(w)
	})
}

// wantImage checks that the pool holds one published image, whole.
func (l *lab) wantImage(w *webImage) {
	l.Helper()
	names := l.imageVolumes()
	if len(names) != 2 || !strings.HasPrefix(names[1], names[0]+"-") {
		l.Fatalf("image volumes: %q, want a pointer and what it points to", names)
	}
	if !bytes.Equal(l.host.VolumeBytes(labPool, names[1]), w.content) {
		l.Error("the published image is not the one that the server has")
	}
}

func TestImage_CancelledPollDoesNotCutTheTransfer(t *testing.T) {
	inLab(t, func(l *lab) {
		w, g := l.web(nil), make(gate)
		w.answer = func(int) *http.Response { return w.held(g) }
		ctx, cancel := context.WithCancel(l.Context())
		if _, err := l.p.Create(ctx, l.spec); err != nil {
			l.Fatal(err)
		}
		cancel()
		_, err := l.p.Create(ctx, l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, context.Canceled)
		l.wait(time.Second)
		close(g)
		l.running(l.spec)
		if got := w.count(); got != 1 {
			l.Errorf("the image was asked for %d times, want once", got)
		}
	})
}

func TestImage_WrongChecksumIsPermanentAndLeavesNothing(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.spec.Image.Checksum = "sha256:" + strings.Repeat("0", 64)
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if !strings.Contains(fmt.Sprint(err), strings.TrimPrefix(w.checksum(), "sha256:")) {
			l.Errorf("%v does not tell the checksum that was found", err)
		}
		if got := w.count(); got != 2 {
			l.Errorf("the image was asked for %d times, want twice: mirrors do serve damaged files", got)
		}
		l.wantNothingLeft()
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
	})
}

func TestImage_DamagedOnceIsTriedAgain(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		w.answer = func(n int) *http.Response {
			content := slices.Clone(w.content)
			if n == 1 {
				content[len(content)-1]++
			}
			return answerWith(http.StatusOK, bytes.NewReader(content), int64(len(content)))
		}
		l.running(l.spec)
		l.wantImage(w)
	})
}

func TestImage_RefusedByItsHeaderBeforeAnythingIsWritten(t *testing.T) {
	tests := []struct {
		name string
		edit func([]byte) []byte
		text string
		why  string
	}{
		{"backing file", func(b []byte) []byte {
			binary.BigEndian.PutUint64(b[8:], 512)
			binary.BigEndian.PutUint32(b[16:], 11)
			copy(b[512:], "/etc/shadow")
			return b
		}, "backing file", "the guest would read a file of the host"},
		{"external data file", func(b []byte) []byte { b[79] |= 4; return b }, "external file", "likewise"},
		{"encrypted", func(b []byte) []byte { binary.BigEndian.PutUint32(b[32:], 1); return b }, "encrypt", ""},
		{"web page", func([]byte) []byte { return []byte("<!doctype html>\n<html>Please log in</html>") }, "HTML", "a login page with status 200"},
		{"compressed", func([]byte) []byte { return []byte("\x1f\x8b\x08\x00 and so on") }, "gzip", ""},
		{"VMDK", func([]byte) []byte { return []byte("KDMV\x01\x00\x00\x00 and so on") }, "VMDK", ""},
		{"empty", func([]byte) []byte { return nil }, "", ""},
		{"header cut off", func(b []byte) []byte { return b[:50] }, "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.web(nil)
				w.content = tt.edit(w.content)
				l.spec.Image.Checksum = w.checksum() // it is what its checksum says, and refused all the same
				changed := l.changes(func() {
					_, err := l.create(l.p, l.spec)
					l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
					if !strings.Contains(fmt.Sprint(err), tt.text) {
						l.Errorf("%v does not say %q; %s", err, tt.text, tt.why)
					}
				})
				if len(changed) != 0 {
					l.Errorf("changed: %q, want nothing", changed)
				}
			})
		})
	}
}

func TestImage_UploadThatDidNotReachTheDiskIsNotPublished(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.TruncateUpload(100_000)}) // and reports success
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
		l.wait(kvm2.RetryAfter(err))
		l.running(l.spec)
		l.wantImage(w)
	})
}

func TestImage_SeedThatDidNotReachTheDiskIsNotUsed(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.TruncateUpload(1000)})
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
		l.wantNothingLeft()
	})
}

func TestImage_SourceThatEndsEarlyIsTriedAgain(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		w.answer = func(n int) *http.Response {
			if n == 1 {
				return answerWith(http.StatusOK, bytes.NewReader(w.content[:200_000]), int64(len(w.content)))
			}
			return answerWith(http.StatusOK, bytes.NewReader(w.content), -1) // of unknown length
		}
		m := l.running(l.spec)
		if got := w.count(); got != 2 || m.State != kvm2.StateRunning {
			l.Errorf("the image was asked for %d times, want twice", got)
		}
		l.wantImage(w)
	})
}

func TestImage_StatusDecidesTheClass(t *testing.T) {
	for status, class := range map[int]kvm2.Class{
		400: kvm2.ClassPermanent, 401: kvm2.ClassPermanent, 403: kvm2.ClassPermanent, 404: kvm2.ClassPermanent, 410: kvm2.ClassPermanent,
		408: kvm2.ClassTransient, 429: kvm2.ClassTransient, 500: kvm2.ClassTransient, 502: kvm2.ClassTransient, 503: kvm2.ClassTransient,
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			inLab(t, func(l *lab) {
				const secret = "hunter2"
				w := l.web(nil)
				w.answer = func(int) *http.Response { return answerWith(status, strings.NewReader("sorry"), 5) }
				l.spec.Image.URL = "https://user:" + secret + "@images.example/debian.qcow2?token=" + secret
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("the first Create()", err, kvm2.ClassNone, nil)
				l.wait(time.Second)
				_, err = l.p.Create(l.Context(), l.spec)
				l.wantError("the next Create()", err, class, nil)
				for _, text := range []string{"images.example/debian.qcow2", fmt.Sprint(status)} {
					if !strings.Contains(fmt.Sprint(err), text) {
						l.Errorf("%v does not tell %q", err, text)
					}
				}
				if strings.Contains(fmt.Sprint(err), secret) {
					l.Errorf("%v tells the secret", err)
				}
			})
		})
	}
}

func TestImage_FailureIsReportedUntilItIsTimeToTryAgain(t *testing.T) {
	inLab(t, func(l *lab) {
		w, asked := l.web(nil), make(chan time.Time, 10)
		w.answer = func(n int) *http.Response {
			asked <- time.Now()
			if n <= 2 {
				return answerWith(http.StatusServiceUnavailable, strings.NewReader(""), 0)
			}
			return answerWith(http.StatusOK, bytes.NewReader(w.content), int64(len(w.content)))
		}
		for state := kvm2.StateCreating; state != kvm2.StateRunning; {
			m, err := l.p.Create(l.Context(), l.spec)
			if err == nil && m.State == kvm2.StateCreating && m.Image == nil {
				l.Fatalf("Create() = %+v, want the failure or progress", m)
			}
			state = m.State
			l.wait(time.Second)
		}
		if len(asked) != 3 {
			l.Fatalf("asked %d times, want 3", len(asked))
		}
		first, second, third := <-asked, <-asked, <-asked
		if second.Sub(first) < 5*time.Second || third.Sub(second) < 10*time.Second {
			l.Errorf("asked after %v and %v more, want the wait to grow", second.Sub(first), third.Sub(second))
		}
	})
}

func TestImage_TransferThatStallsEnds(t *testing.T) {
	inLab(t, func(l *lab) {
		w, g := l.web(func(c *kvm2.Config) { c.Images.StallTimeout = kvm2.Duration(20 * time.Second) }), make(gate)
		defer close(g)
		w.answer = func(n int) *http.Response {
			if n == 1 {
				return w.held(g)
			}
			return answerWith(http.StatusOK, bytes.NewReader(w.content), int64(len(w.content)))
		}
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(21 * time.Second)
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		if !strings.Contains(fmt.Sprint(err), "nothing moved for 20s") {
			l.Errorf("Create() = %v, want it to say what happened", err)
		}
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
		l.running(l.spec)
	})
}

// drip is a Reader that gives a byte a second, until it is stopped.
type drip struct{ stop chan struct{} }

func (d drip) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Second):
		return copy(p, "x"), nil
	case <-d.stop:
		return 0, io.EOF
	}
}

func TestImage_WholeTransferIsBounded(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(func(c *kvm2.Config) { c.Images.Timeout = kvm2.Duration(10 * time.Minute) })
		d := drip{make(chan struct{})}
		defer close(d.stop)
		w.answer = func(int) *http.Response {
			return answerWith(http.StatusOK, io.MultiReader(bytes.NewReader(w.content[:70_000]), d), -1)
		}
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(10*time.Minute + time.Second)
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, context.DeadlineExceeded)
	})
}

func TestImage_TransfersAtOnceAreBounded(t *testing.T) {
	inLab(t, func(l *lab) {
		w, g := l.web(func(c *kvm2.Config) { c.Images.MaxTransfers = 2 }), make(gate)
		w.answer = func(int) *http.Response { return w.held(g) }
		specs := make([]kvm2.Spec, 5)
		for i := range specs {
			specs[i] = l.another(fmt.Sprintf("web-%d", i))
			sum := sha512.Sum512([]byte{byte(i)}) // five images, as far as their checksums go
			specs[i].Image.Checksum = "sha512:" + hex.EncodeToString(sum[:])
			if _, err := l.p.Create(l.Context(), specs[i]); err != nil {
				l.Fatal(err)
			}
		}
		l.wait(time.Second)
		if got := w.count(); got != 2 {
			l.Errorf("%d images are transferred at once, want 2", got)
		}
		m, err := l.p.Create(l.Context(), specs[4])
		if err != nil || m.Image == nil {
			l.Errorf("Create() = %+v, %v; want it to wait, with progress", m, err)
		}
		close(g)
		l.wait(time.Second)
	})
}

func TestImage_RootDiskSmallerThanTheImageIsInvalid(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		l.spec.RootDiskBytes = gib - 512
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
		l.wantNothingLeft()
		l.spec.RootDiskBytes = gib
		l.running(l.spec)
	})
}

func TestImage_RawImageIsTakenAsRaw(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		w.content = make([]byte, 3*mib)
		w.content[510], w.content[511] = 0x55, 0xAA
		copy(w.content[mib:], "QFI\xfb") // what a guest writes into its disk must not make it another format
		l.spec.Image.Checksum = w.checksum()
		l.running(l.spec)
		l.wantImage(w)
		for _, v := range l.host.Volumes(labPool) {
			if v.Name == labVolume(l.spec, "root") && v.BackingFormat != "raw" {
				l.Errorf("the root disk takes its backing store for %q, want raw", v.BackingFormat)
			}
		}
	})
}

func TestImage_WhatDeadProcessesLeftIsRemovedByThePublisher(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		pointer := labScope + "-image-" + strings.TrimPrefix(w.checksum(), "sha256:")
		other := labScope + "-image-" + strings.Repeat("0", 64) + "-0123456789abcdef"
		l.host.AddVolume(labPool, pointer+"-0123456789abcdef", w.content[:1000])
		l.host.AddVolume(labPool, other, []byte("another image's"))
		l.running(l.spec)
		names := l.imageVolumes()
		if len(names) != 3 || !slices.Contains(names, other) || slices.Contains(names, pointer+"-0123456789abcdef") {
			l.Errorf("image volumes: %q, want the image's own two and %q", names, other)
		}
	})
}

func TestImage_PointerWithoutItsDataIsReplaced(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.deleted(l.running(l.spec).ID)
		l.host.DeleteVolumeBehind(labPool, l.imageVolumes()[1])
		l.running(l.spec)
		l.wantImage(w)
		if got := w.count(); got != 2 {
			l.Errorf("the image was asked for %d times, want twice", got)
		}
	})
}

func TestImage_VolumeOfAnotherMakerInThePointersPlaceIsRefused(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		pointer := labScope + "-image-" + strings.TrimPrefix(w.checksum(), "sha256:")
		l.host.AddVolume(labPool, pointer, []byte("somebody's"))
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if got := l.host.VolumeBytes(labPool, pointer); string(got) != "somebody's" {
			l.Errorf("the volume holds %q", got)
		}
	})
}

func TestImage_LostReplyOfThePublicationIsLookedUp(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		pointer := labScope + "-image-" + strings.TrimPrefix(w.checksum(), "sha256:")
		f := l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeCreate, Object: pointer, When: fake.After, Effect: fake.Drop()})
		l.running(l.spec)
		l.wantImage(w)
		if !f.Reached() || w.count() != 1 {
			l.Errorf("the image was asked for %d times, want once", w.count())
		}
	})
}

func TestImage_FileOfTheControllersMachine(t *testing.T) {
	inLab(t, func(l *lab) {
		l.spec.Image.URL += ".nosuch"
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		l.spec.Image.URL = "file://" + l.TempDir()
		l.wait(time.Minute)
		_, err = l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if !strings.Contains(fmt.Sprint(err), "not a regular file") {
			l.Errorf("Create() = %v, want it to say that this is a directory", err)
		}
	})
}

func TestImage_ConnectionThatCannotBeOpenedIsTransient(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: refusing{}}))
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("the first Create()", err, kvm2.ClassNone, nil)
		l.wait(time.Second)
		_, err = l.p.Create(l.Context(), l.spec)
		l.wantError("the next Create()", err, kvm2.ClassTransient, errRefused)
		if w.count() != 0 {
			l.Error("the other client was used")
		}
	})
}

type refusing struct{}

var errRefused = errors.New("connection refused")

func (refusing) RoundTrip(*http.Request) (*http.Response, error) { return nil, errRefused }
