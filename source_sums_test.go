package kvm2_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// sumsWeb is a distribution's server: an image, which new builds replace, and the file of checksums beside it.
type sumsWeb struct {
	*webImage
	sums    func() string
	answer  func(n int) *http.Response // to the n-th request for the checksums; nil: the checksums
	asked   []time.Time                // for the checksums
	fetched int                        // images
}

const (
	sumsURL    = "https://images.example/SHA256SUMS"
	sumsImage  = "https://images.example/disk.raw"
	sumsExpiry = 10 * time.Minute
)

func (l *lab) distribution(edit func(*kvm2.Config), opts ...kvm2.Option) *sumsWeb {
	l.Helper()
	w := &sumsWeb{webImage: &webImage{content: randomDisk(256 << 10)}}
	w.sums = func() string { return strings.TrimPrefix(w.checksum(), "sha256:") + " *disk.raw\n" }
	l.spec.Image = kvm2.Image{URL: sumsImage + "?token=" + webSecret, ChecksumURL: sumsURL + "?token=" + webSecret}
	l.p = l.open(edit, append(opts, kvm2.WithHTTPClient(&http.Client{Transport: w}))...)
	return w
}

func (w *sumsWeb) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, r)
	if !strings.HasSuffix(r.URL.Path, "SUMS") {
		w.fetched++
		return answerWith(http.StatusOK, bytes.NewReader(w.content), int64(len(w.content))), nil
	}
	w.asked = append(w.asked, time.Now())
	if w.answer != nil {
		if resp := w.answer(len(w.asked)); resp != nil {
			return resp, nil
		}
	}
	return answerWith(http.StatusOK, strings.NewReader(w.sums()), -1), nil
}

// newBuild is what a distribution publishes next.
func (w *sumsWeb) newBuild() *webImage {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.content = append(bytes.Clone(w.content), make([]byte, 512)...)
	return &webImage{content: w.content}
}

func TestSums_ChecksumComesFromTheFileBesideTheImage(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		l.running(l.spec)
		l.wantImage(w.webImage)
		for i := range 3 {
			l.running(l.another(fmt.Sprint("more-", i)))
		}
		if len(w.asked) != 1 || w.fetched != 1 {
			l.Errorf("the checksums were asked for %d times and the image %d times, want once", len(w.asked), w.fetched)
		}
		l.running(l.spec) // it exists: nothing is looked up
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: refusing{}}))
		if m, err := l.p.Create(l.Context(), l.spec); err != nil || m.Drifted {
			l.Errorf("Create() of a machine that runs = %+v, %v", m, err)
		}
	})
}

func TestSums_LocalFile(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		dir := l.TempDir()
		for name, content := range map[string][]byte{"disk.raw": w.content, "SHA256SUMS": []byte(w.sums())} {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
				l.Fatal(err)
			}
		}
		l.spec.Image = kvm2.Image{URL: "file://" + dir + "/disk.raw", ChecksumURL: "file://" + dir + "/SHA256SUMS"}
		l.running(l.spec)
		l.wantImage(w.webImage)
		l.spec = l.another("second")
		l.spec.Image.ChecksumURL += ".nosuch"
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
	})
}

func TestSums_NewBuildIsForMachinesThatAreBegunLater(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		old := &webImage{content: w.content}
		l.running(l.spec)
		l.wantImage(old)
		next := w.newBuild()
		l.running(l.another("soon"))
		if w.fetched != 1 {
			l.Error("the new build was fetched before the checksum expired")
		}
		l.wait(sumsExpiry)
		l.running(l.another("later"))
		if w.fetched != 2 || len(w.asked) != 2 {
			l.Errorf("%d images and %d checksums were fetched, want 2 and 2", w.fetched, len(w.asked))
		}
		backing := l.volume(labVolume(l.another("later"), "root")).BackingPath
		if !strings.Contains(backing, strings.TrimPrefix(next.checksum(), "sha256:")) {
			l.Errorf("the later machine stands on %q", backing)
		}
	})
}

func TestSums_MachineThatIsHalfMadeKeepsItsBuild(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		old := strings.TrimPrefix(w.checksum(), "sha256:")
		l.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, Effect: fake.Drop()})
		var err error
		for err == nil { // up to the fault: the disks are there, and no domain
			_, err = l.p.Create(l.Context(), l.spec)
			l.wait(time.Second)
		}
		w.newBuild()
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w})) // the controller has restarted
		l.running(l.spec)
		if backing := l.volume(labVolume(l.spec, "root")).BackingPath; !strings.Contains(backing, old) || len(w.asked) != 1 {
			l.Errorf("the machine stands on %q; the checksums were asked for %d times", backing, len(w.asked))
		}
	})
}

func TestSums_BuildThatIsPublishedInBetweenIsFound(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		stale := w.sums()
		next := w.newBuild()
		w.answer = func(n int) *http.Response {
			if n == 1 {
				return answerWith(http.StatusOK, strings.NewReader(stale), -1)
			}
			return nil
		}
		l.running(l.spec)
		l.wantImage(next)
	})
}

func TestSums_ImageThatDoesNotFitIsPermanent(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		w.sums = func() string { return strings.Repeat("0", 64) + "  disk.raw\n" }
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if len(w.asked) != 2 || !strings.Contains(fmt.Sprint(err), "wrong checksum") {
			l.Errorf("Create() = %v after %d looks at the checksums, want 2", err, len(w.asked))
		}
	})
}

func TestSums_Failures(t *testing.T) {
	tests := []struct {
		name   string
		answer func() *http.Response
		class  kvm2.Class
		says   string
	}{
		{"404", func() *http.Response { return answerWith(404, strings.NewReader(""), 0) }, kvm2.ClassPermanent, "404"},
		{"503", func() *http.Response { return answerWith(503, strings.NewReader(""), 0) }, kvm2.ClassTransient, "503"},
		{"broken off", func() *http.Response { return answerWith(200, failing{}, -1) }, kvm2.ClassTransient, errReset.Error()},
		{"too large", func() *http.Response { return answerWith(200, bytes.NewReader(make([]byte, 1<<20+1)), -1) }, kvm2.ClassPermanent, "more than 1048576 bytes"},
		{"no entry", func() *http.Response { return answerWith(200, strings.NewReader("<html>"), -1) }, kvm2.ClassPermanent, `no SHA-256 or SHA-512 entry for "disk.raw"`},
		{"several entries", func() *http.Response {
			return answerWith(200, strings.NewReader(hex64+"  a/disk.raw\n"+strings.Repeat("0", 64)+"  b/disk.raw\n"), -1)
		}, kvm2.ClassPermanent, `2 different sha256 entries for "disk.raw"`},
		{"redirect without encryption", func() *http.Response { return moved("http://images.example/SUMS?token=" + webSecret) }, kvm2.ClassPermanent, "not https"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.distribution(nil)
				w.answer = func(int) *http.Response { return tt.answer() }
				m, err := l.p.Create(l.Context(), l.spec)
				if err != nil || m.Image == nil || m.Image.Phase != kvm2.ImageOpening {
					l.Fatalf("Create() = %+v, %v; want progress", m, err)
				}
				l.wait(time.Second)
				_, err = l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, tt.class, nil)
				if text := fmt.Sprint(err); !strings.Contains(text, tt.says) || !strings.Contains(text, "images.example/SHA256SUMS") || strings.Contains(text, webSecret) {
					l.Errorf("Create() = %v, want it to say %q, and no secret", err, tt.says)
				}
				if tt.class == kvm2.ClassPermanent {
					l.wantNothingLeft()
				}
				for range 60 {
					_, _ = l.p.Create(l.Context(), l.spec)
					l.wait(time.Second)
				}
				if n := len(w.asked); n < 3 || n > 5 || w.fetched != 0 {
					l.Errorf("asked %d times in a minute, want the wait to grow from 5 s", n)
				}
			})
		})
	}
}

func TestSums_PollDoesNotWaitForThem(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		w.answer = func(int) *http.Response { return answerWith(200, silent{l.Context()}, -1) }
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: ctxBody{w}}))
		for range 10 {
			start := time.Now()
			if _, err := l.p.Create(l.Context(), l.spec); err != nil || time.Since(start) != 0 {
				l.Fatalf("Create() = %v after %v", err, time.Since(start))
			}
			l.wait(time.Second)
		}
		l.wait(21 * time.Second) // beyond Config.CallTimeout
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassTransient, nil)
		if err == nil {
			l.Error("Create() = nil, want the look-up to have ended")
		}
	})
}

// ctxBody has the bodies of answers end with their requests, as those of net/http do.
type ctxBody struct{ http.RoundTripper }

func (c ctxBody) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = brokenOff{silent{r.Context()}}
	}
	return resp, err
}

func TestSums_CloseEndsTheLookUp(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil)
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: ctxBody{w}}))
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		start := time.Now()
		if err := l.p.Close(); err != nil || time.Since(start) > time.Second {
			l.Errorf("Close() = %v after %v", err, time.Since(start))
		}
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrClosed)
	})
}

func TestSums_CredentialsAreAddedThereToo(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.distribution(nil, kvm2.WithImageRequest(withCredentials))
		w.answer = func(n int) *http.Response {
			if n == 1 {
				return moved("https://cdn.example/SUMS")
			}
			return nil
		}
		l.running(l.spec)
		for i, want := range []bool{true, false, true} {
			if tellsSecret(w.requests[i].Header) != want {
				l.Errorf("request %d, of %s, has the headers %q", i+1, w.requests[i].URL.Host, w.requests[i].Header)
			}
		}
	})
}
