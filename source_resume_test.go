package kvm2_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
)

// flakyWeb is a web server whose connections break off.
type flakyWeb struct {
	*webImage
	etag     string
	modified string
	noRanges bool
	breaks   []int64 // the offsets at which a connection breaks, each one once
	always   int64   // if not 0, every connection breaks at this offset
	truncate bool    // connections do not break, but end

	served int64
	asked  []time.Time
	// instead gives another answer than the file's to the n-th request, counted from 1, or nil.
	instead func(n int) *http.Response
}

var errReset = errors.New("connection reset by peer")

// flaky has the lab's machine take a raw image from a server that breaks off.
func (l *lab) flaky(edit func(*kvm2.Config)) *flakyWeb {
	l.Helper()
	w := &flakyWeb{webImage: &webImage{content: randomDisk(mib)}, etag: `"v1"`}
	l.spec.Image = kvm2.Image{URL: "https://images.example/disk.raw?token=" + webSecret, Checksum: w.checksum()}
	l.p = l.open(edit, kvm2.WithHTTPClient(&http.Client{Transport: w}))
	return w
}

const webSecret = "hunter2"

// randomDisk is a raw image with a boot sector.
func randomDisk(size int64) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b)
	copy(b, "boot")
	b[510], b[511] = 0x55, 0xaa
	return b
}

func (w *flakyWeb) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests, w.asked = append(w.requests, r), append(w.asked, time.Now())
	if w.instead != nil {
		if resp := w.instead(len(w.requests)); resp != nil {
			return resp, nil
		}
	}
	var first int64
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &first); err == nil && !w.noRanges && w.unchanged(r.Header.Get("If-Range")) {
		resp := w.from(http.StatusPartialContent, first)
		resp.Header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, len(w.content)-1, len(w.content)))
		return resp, nil
	}
	return w.from(http.StatusOK, 0), nil
}

func (w *flakyWeb) unchanged(validator string) bool {
	return validator != "" && (validator == w.etag || validator == w.modified)
}

// from is an answer with the file from an offset on.
func (w *flakyWeb) from(status int, offset int64) *http.Response {
	body := &flakyBody{w: w, content: w.content, offset: offset}
	resp := answerWith(status, body, int64(len(w.content))-offset)
	if w.etag != "" {
		resp.Header.Set("ETag", w.etag)
	}
	if w.modified != "" {
		resp.Header.Set("Last-Modified", w.modified)
	}
	return resp
}

type flakyBody struct {
	w       *flakyWeb
	content []byte
	offset  int64
}

func (b *flakyBody) Read(p []byte) (int, error) {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	end := int64(len(b.content))
	if b.w.always != 0 {
		end = b.w.always
	}
	next := slices.IndexFunc(b.w.breaks, func(at int64) bool { return at >= b.offset })
	if next >= 0 {
		end = b.w.breaks[next]
	}
	n := copy(p, b.content[b.offset:max(b.offset, end)])
	b.offset, b.w.served = b.offset+int64(n), b.w.served+int64(n)
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	if end == int64(len(b.content)) {
		return 0, io.EOF
	}
	if next >= 0 {
		b.w.breaks = slices.Delete(b.w.breaks, next, next+1)
	}
	if b.w.truncate {
		return 0, io.EOF
	}
	return 0, errReset
}

// tenths are the offsets at every tenth of a file, the beginning included.
func tenths(size int) []int64 {
	var out []int64
	for i := range int64(10) {
		out = append(out, i*int64(size)/10)
	}
	return out
}

func TestResume_GoesOnWhereItBrokeOff(t *testing.T) {
	tests := []struct {
		name string
		edit func(*flakyWeb)
	}{
		{"ETag", func(*flakyWeb) {}},
		{"date", func(w *flakyWeb) { w.etag, w.modified = "", "Tue, 03 Mar 2026 10:00:00 GMT" }},
		{"weak ETag and date", func(w *flakyWeb) { w.etag, w.modified = `W/"v1"`, "Tue, 03 Mar 2026 10:00:00 GMT" }},
		{"body shorter than its length", func(w *flakyWeb) { w.truncate = true }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.flaky(func(c *kvm2.Config) { c.Images.MaxRetries = 10 })
				tt.edit(w)
				w.breaks = tenths(len(w.content))
				l.running(l.spec)
				l.wantImage(w.webImage)
				if size := int64(len(w.content)); w.served != size {
					l.Errorf("the server sent %d bytes of %d", w.served, size)
				}
				if got := w.count(); got != 11 {
					l.Errorf("the image was asked for %d times, want once and after each of ten breaks", got)
				}
			})
		})
	}
}

func TestResume_StartsOverWhereItCannotGoOn(t *testing.T) {
	tests := []struct {
		name     string
		edit     func(*flakyWeb)
		requests int
		why      string
	}{
		{"no ranges", func(w *flakyWeb) { w.noRanges = true }, 3, "the answer to the range is the whole file"},
		{"no validator", func(w *flakyWeb) { w.etag = "" }, 2, "nothing would say that it is the same file"},
		{"weak ETag", func(w *flakyWeb) { w.etag = `W/"v1"` }, 2, "it does not promise the same bytes"},
	}
	for _, tt := range tests {
		for i, at := range tenths(int(mib)) {
			t.Run(fmt.Sprintf("%s, %d0%%", tt.name, i), func(t *testing.T) {
				inLab(t, func(l *lab) {
					w := l.flaky(nil)
					tt.edit(w)
					w.breaks = []int64{at}
					l.running(l.spec)
					l.wantImage(w.webImage)
					requests := tt.requests
					if at == 0 {
						requests = 2 // nothing of it has arrived, so it is opened anew
					}
					if w.count() != requests || w.served != at+mib {
						l.Errorf("%d requests, %d bytes; want %d and %d; %s", w.count(), w.served, requests, at+mib, tt.why)
					}
				})
			})
		}
	}
}

// partial is an answer to a range that claims whatever the header says.
func (w *flakyWeb) partial(contentRange, etag string) *http.Response {
	resp := answerWith(http.StatusPartialContent, bytes.NewReader(w.content[mib/2:]), mib/2)
	resp.Header.Set("Content-Range", contentRange)
	resp.Header.Set("ETag", etag)
	return resp
}

func TestResume_AnswersThatDoNotFitHaveItStartOver(t *testing.T) {
	tests := []struct {
		name   string
		answer func(*flakyWeb) *http.Response
	}{
		{"other range", func(w *flakyWeb) *http.Response { return w.partial("bytes 0-1048575/1048576", w.etag) }},
		{"other size", func(w *flakyWeb) *http.Response { return w.partial("bytes 524288-1048576/1048577", w.etag) }},
		{"smaller size", func(w *flakyWeb) *http.Response { return w.partial("bytes 524288-1048574/1048575", w.etag) }},
		{"no range", func(w *flakyWeb) *http.Response { return w.partial("", w.etag) }},
		{"other unit", func(w *flakyWeb) *http.Response { return w.partial("lines 524288-1048575/1048576", w.etag) }},
		{"backwards", func(w *flakyWeb) *http.Response { return w.partial("bytes 524288-0/1048576", w.etag) }},
		{"other ETag", func(w *flakyWeb) *http.Response { return w.partial("bytes 524288-1048575/1048576", `"v2"`) }},
		{"412", func(*flakyWeb) *http.Response { return answerWith(412, strings.NewReader(""), 0) }},
		{"416", func(*flakyWeb) *http.Response { return answerWith(416, strings.NewReader(""), 0) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.flaky(nil)
				w.breaks = []int64{mib / 2}
				w.instead = func(n int) *http.Response {
					if n == 2 {
						return tt.answer(w)
					}
					return nil
				}
				l.running(l.spec)
				l.wantImage(w.webImage)
				if w.count() != 3 {
					l.Errorf("%d requests, want 3", w.count())
				}
			})
		})
	}
}

func TestResume_FileThatChangesInBetweenIsTakenWhole(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(nil)
		w.breaks = []int64{mib / 2}
		w.content[mib-1]++
		w.etag = `"v2"`
		l.spec.Image.Checksum = w.checksum()
		w.instead = func(n int) *http.Response {
			if n != 1 {
				return nil
			}
			before := slices.Clone(w.content)
			before[mib-1]--
			resp := answerWith(http.StatusOK, &flakyBody{w: w, content: before}, mib)
			resp.Header.Set("ETag", `"v1"`)
			return resp
		}
		l.running(l.spec)
		l.wantImage(w.webImage)
	})
}

func TestResume_RetriesAreCounted(t *testing.T) {
	for setting, want := range map[int]int{0: 6, -1: 1, 1: 2, 7: 8} {
		t.Run(fmt.Sprint(setting), func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.flaky(func(c *kvm2.Config) { c.Images.MaxRetries = setting })
				w.always = mib / 2
				var err error
				for err == nil {
					_, err = l.p.Create(l.Context(), l.spec)
					l.wait(time.Second)
				}
				l.wantError("Create()", err, kvm2.ClassTransient, errReset)
				if got := w.count(); got != want {
					l.Errorf("the image was asked for %d times, want %d", got, want)
				}
				for _, text := range []string{"images.example/disk.raw", "524288 bytes", fmt.Sprintf("%d retries", want-1)} {
					if !strings.Contains(fmt.Sprint(err), text) {
						l.Errorf("%v does not tell %q", err, text)
					}
				}
				if strings.Contains(fmt.Sprint(err), webSecret) {
					l.Errorf("%v tells the secret", err)
				}
				if left := l.imageVolumes(); len(left) != 0 {
					l.Errorf("image volumes left: %q", left)
				}
				for i, delay := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second} {
					if i+1 < len(w.asked) && w.asked[i+1].Sub(w.asked[i]) < delay {
						l.Errorf("retry %d came after %v, want %v", i+1, w.asked[i+1].Sub(w.asked[i]), delay)
					}
				}
			})
		})
	}
}

func TestResume_StartingOverCountsToo(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(func(c *kvm2.Config) { c.Images.MaxRetries = 2 })
		w.noRanges, w.always, w.truncate = true, mib/2, true
		var err error
		for err == nil {
			_, err = l.p.Create(l.Context(), l.spec)
			l.wait(time.Second)
		}
		l.wantError("Create()", err, kvm2.ClassTransient, io.ErrUnexpectedEOF)
		if got := w.count(); got != 5 {
			l.Errorf("%d requests, want the first and two for each retry", got)
		}
	})
}

func TestResume_WholeFileIsVerified(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(nil)
		right := w.checksum()
		w.breaks = []int64{mib / 2, mib / 2}
		w.instead = func(int) *http.Response {
			w.content[len(w.content)-1]++ // beyond the break, under the same ETag
			return nil
		}
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if !strings.Contains(fmt.Sprint(err), right) {
			l.Errorf("Create() = %v, want the checksum to be wrong", err)
		}
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
	})
}

func TestResume_WrongChecksumIsNotTriedAgainWithoutRetries(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(func(c *kvm2.Config) { c.Images.MaxRetries = -1 })
		l.spec.Image.Checksum = "sha256:" + strings.Repeat("0", 64)
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		if got := w.count(); got != 1 {
			l.Errorf("the image was asked for %d times, want once", got)
		}
	})
}

func TestResume_FileThatIsGoneInTheMiddleIsPermanent(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(nil)
		w.breaks = []int64{mib / 2}
		w.instead = func(n int) *http.Response {
			if n > 1 {
				return answerWith(http.StatusGone, strings.NewReader(""), 0)
			}
			return nil
		}
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
	})
}

func TestResume_RetryAfterIsHonoured(t *testing.T) {
	inLab(t, func(l *lab) {
		start := time.Now()
		busy := func(status int, retryAfter string) *http.Response {
			resp := answerWith(status, strings.NewReader(""), 0)
			resp.Header.Set("Retry-After", retryAfter)
			return resp
		}
		w := l.flaky(func(c *kvm2.Config) { c.Images.StallTimeout = kvm2.Duration(20 * time.Second) })
		w.breaks = []int64{mib / 2}
		w.instead = func(n int) *http.Response {
			switch n {
			case 1:
				return busy(429, "90")
			case 3: // resuming
				return busy(503, "80")
			case 4:
				return busy(503, start.Add(24*time.Hour).UTC().Format(http.TimeFormat))
			}
			return nil
		}
		for range 3 {
			if _, err := l.create(l.p, l.spec); err == nil {
				break
			}
		}
		l.wantImage(w.webImage)
		if w.served != mib || len(w.asked) != 5 {
			l.Fatalf("%d requests and %d bytes, want 5 and %d: waiting is no stall", len(w.asked), w.served, mib)
		}
		for i, want := range map[int]time.Duration{1: 90 * time.Second, 2: time.Second, 3: 80 * time.Second, 4: 2 * time.Minute} {
			if got := w.asked[i].Sub(w.asked[i-1]); got < want || got > want+10*time.Second {
				l.Errorf("request %d came after %v, want %v", i+1, got, want)
			}
		}
	})
}

func TestResume_CloseEndsTheWait(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(nil)
		w.breaks = []int64{mib / 2}
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(time.Second / 2) // it waits to go on
		start := time.Now()
		if err := l.p.Close(); err != nil || time.Since(start) > time.Second/4 {
			l.Errorf("Close() = %v after %v", err, time.Since(start))
		}
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
	})
}
