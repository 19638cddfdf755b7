package kvm2_test

import (
	"bytes"
	"crypto/sha256"
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
)

// rawContent is a raw disk image of so many bytes, different for each seed.
func rawContent(n int64, seed byte) []byte {
	b := make([]byte, n)
	for i := 512; i < len(b); i++ {
		b[i] = byte(i>>8) ^ seed
	}
	b[510], b[511] = 0x55, 0xAA
	return b
}

// every is a Reader that gives 256 KiB each time the interval has passed.
func every(d time.Duration, content []byte) io.Reader { return paced{bytes.NewReader(content), d} }

type paced struct {
	r io.Reader
	d time.Duration
}

func (s paced) Read(p []byte) (int, error) {
	time.Sleep(s.d) // in the bubble
	return io.ReadFull(s.r, p[:min(len(p), 256<<10)])
}

// slowly has the image's server take its time.
func (w *webImage) slowly() {
	w.answer = func(int) *http.Response {
		return answerWith(http.StatusOK, every(10*time.Second, w.content), int64(len(w.content)))
	}
}

// large gives the lab's machine a raw image of several packets.
func (l *lab) large(w *webImage) {
	w.content = rawContent(3*mib, 0)
	l.spec.Image.Checksum = w.checksum()
}

// imageUploads are the uploads of image volumes that the host has seen.
func (l *lab) imageUploads() []fake.Call {
	return slices.DeleteFunc(l.host.Calls(), func(c fake.Call) bool { return c.Op != kvm2.OpVolumeUpload || !isImageVolume(c.Object) })
}

func TestImage_LiveAttemptOfAnotherProcessIsWaitedFor(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.large(w)
		w.slowly()
		if _, err := l.p.Create(l.Context(), l.spec); err != nil {
			l.Fatal(err)
		}
		l.wait(15 * time.Second)
		second := l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: refusing{}}))
		spec := l.another("web-2")
		var seen []int64
		for range 200 {
			m, err := second.Create(l.Context(), spec)
			if err != nil {
				l.Fatalf("Create() = %v", err)
			}
			if m.State == kvm2.StateRunning {
				break
			}
			if m.Image.Phase == kvm2.ImageWaiting && m.Image.DoneBytes > 0 && (len(seen) == 0 || seen[len(seen)-1] != m.Image.DoneBytes) {
				seen = append(seen, m.Image.DoneBytes)
			}
			l.wait(time.Second)
		}
		if len(seen) < 5 || !slices.IsSorted(seen) {
			l.Errorf("the other process was seen to have transferred %d bytes, want that to grow", seen)
		}
		l.running(l.spec)
		l.wantImage(w)
		if uploads := l.imageUploads(); len(uploads) != 1 || w.count() != 1 {
			l.Errorf("asked for %d times, uploads: %v; want one", w.count(), uploads)
		}
	})
}

func TestImage_StalledAttemptIsTakenOver(t *testing.T) {
	for name, left := range map[string]int{"half an image": 1000, "an empty volume": 0} {
		t.Run(name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.web(func(c *kvm2.Config) { c.Images.StallTimeout = kvm2.Duration(30 * time.Second) })
				dead := l.pointer(w) + "-0123456789abcdef"
				l.host.AddVolume(labPool, dead, w.content[:left])
				start := time.Now()
				for {
					m, err := l.p.Create(l.Context(), l.spec)
					if err != nil {
						l.Fatalf("Create() = %v", err)
					}
					if m.Image == nil || m.Image.Phase != kvm2.ImageOpening && m.Image.Phase != kvm2.ImageWaiting {
						break
					}
					l.wait(100 * time.Millisecond)
				}
				if took := time.Since(start); took < 30*time.Second || took > 33*time.Second {
					l.Errorf("it was taken over after %v, want 30 s or little more", took)
				}
				l.running(l.spec)
				l.wantImage(w)
				if w.count() != 1 {
					l.Errorf("asked for %d times, want once", w.count())
				}
			})
		})
	}
}

// pointer is the name under which a web server's image is published.
func (*lab) pointer(w *webImage) string {
	return labScope + "-image-" + strings.TrimPrefix(w.checksum(), "sha256:")
}

// A process that cannot remove what it began knows that it is dead, and does not wait for it.
func TestImage_OwnDeadAttemptIsNotWaitedFor(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.CutUpload(100_000)})
		f := l.host.AddFault(fake.Fault{Op: kvm2.OpVolumeDelete, Effect: fake.Drop()})
		start := time.Now()
		l.running(l.spec)
		if took := time.Since(start); took > 20*time.Second || !f.Reached() {
			l.Errorf("it took %v (fault reached: %v), want no more than a wait to try again", took, f.Reached())
		}
		l.wantImage(w)
	})
}

// The controller is killed at every single call that brings an image into the pool. Whatever it leaves, the next one
// publishes the image whole, and nothing else stays.
func TestImage_ProcessKilledAtAnyCall(t *testing.T) {
	reached := 0
	for k := 1; ; k++ {
		met := false
		t.Run(fmt.Sprintf("call %d", k), func(t *testing.T) {
			inLab(t, func(l *lab) {
				killed := make(chan struct{})
				n := 0
				var mu sync.Mutex
				l.host.Intercept(func(fake.Call) error {
					mu.Lock()
					defer mu.Unlock()
					if n++; n < k {
						return nil
					}
					if n == k {
						met = true
						close(killed)
					}
					return errKilled
				})
				victim := l.open(nil)
				l.pollUntil(victim, killed)
				closeProvider(l.T, victim)
				l.host.Intercept(nil)
				l.running(l.spec)
				l.wantOneImage()
			})
		})
		if !met {
			break
		}
		reached++
	}
	if reached < 25 {
		t.Errorf("%d calls reached, want those of a whole creation", reached)
	}
	t.Logf("killed at %d calls", reached)
}

var errKilled = errors.New("the process is dead")

// pollUntil polls until the channel is closed or the machine runs.
func (l *lab) pollUntil(p *kvm2.Provider, end <-chan struct{}) {
	l.Helper()
	for range 100 {
		m, err := p.Create(l.Context(), l.spec)
		select {
		case <-end:
			return
		default:
		}
		if err == nil && m.State == kvm2.StateRunning {
			return
		}
		l.wait(time.Second)
	}
	l.Fatal("the machine neither runs nor was the process killed")
}

// wantOneImage checks that the lab's own image is in the pool, whole and alone.
func (l *lab) wantOneImage() {
	l.Helper()
	names := l.imageVolumes()
	if len(names) != 2 || !strings.HasPrefix(names[1], names[0]+"-") {
		l.Fatalf("image volumes: %q, want a pointer and what it points to", names)
	}
	sum := sha256.Sum256(l.host.VolumeBytes(labPool, names[1]))
	if got := "sha256:" + hex.EncodeToString(sum[:]); got != l.spec.Image.Checksum {
		l.Errorf("the published image has the digest %s, want %s", got, l.spec.Image.Checksum)
	}
}

func TestImage_OutOfSpaceInTheLastPacketIsFound(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(func(c *kvm2.Config) { c.OvercommitPercent = 10_000 })
		l.spec.RootDiskBytes, l.spec.Disks = 16*mib, nil
		w.content = rawContent(2*mib+100_000, 0)
		l.spec.Image.Checksum = w.checksum()
		w.answer = func(int) *http.Response { return answerWith(http.StatusOK, bytes.NewReader(w.content), -1) }
		l.host.FillPool(labPool, 2*mib+50_000)
		l.wantRefresh()
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassQuota, kvm2.ErrQuotaExceeded)
		if !strings.Contains(fmt.Sprint(err), fmt.Sprint(len(w.content))) {
			l.Errorf("%v does not tell how many bytes should have reached the disk", err)
		}
		if left := l.imageVolumes(); len(left) != 0 {
			l.Errorf("image volumes left: %q", left)
		}
		for _, c := range l.imageUploads() {
			if c.Err != nil {
				l.Errorf("the upload failed with %v, want it to report success", c.Err)
			}
		}
		l.host.FillPool(labPool, gib)
		l.wantRefresh()
		l.wait(kvm2.RetryAfter(err))
		l.running(l.spec)
		l.wantImage(w)
	})
}

// wantRefresh has the pool notice what happened to its file system.
func (l *lab) wantRefresh() {
	l.Helper()
	conn, err := l.host.Dial(l.Context())
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.RefreshPool(l.Context(), labPool); err != nil {
		l.Fatal(err)
	}
}

func TestImage_WrongChecksumIsPublishedByNobody(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.spec.Image.Checksum = "sha256:" + strings.Repeat("0", 64)
		second := l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}))
		var wg sync.WaitGroup
		for _, p := range []*kvm2.Provider{l.p, second} {
			wg.Go(func() {
				_, err := l.create(p, l.spec)
				l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
			})
		}
		wg.Wait()
		l.wantNothingLeft()
		if left := l.imageVolumes(); len(left) != 0 || len(l.imageUploads()) != 4 {
			l.Errorf("uploads: %v, volumes left: %q; want two attempts of each, and nothing left", l.imageUploads(), left)
		}
	})
}

// manyImages gives out as many images as are asked for, and notes how many are read at once.
type manyImages struct {
	mu        sync.Mutex
	now, most int
}

func (s *manyImages) RoundTrip(r *http.Request) (*http.Response, error) {
	var seed byte
	if _, err := fmt.Sscanf(r.URL.Path, "/%d", &seed); err != nil {
		return nil, err
	}
	content := rawContent(mib, seed)
	s.count(1)
	resp := answerWith(http.StatusOK, every(time.Second, content), int64(len(content)))
	resp.Body = closing{resp.Body, func() { s.count(-1) }}
	return resp, nil
}

func (s *manyImages) count(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now += n
	s.most = max(s.most, s.now)
}

type closing struct {
	io.ReadCloser
	closed func()
}

func (c closing) Close() error {
	c.closed()
	return c.ReadCloser.Close()
}

func TestImage_TwentyImagesTakeTurns(t *testing.T) {
	inLab(t, func(l *lab) {
		const atOnce = 3
		server := &manyImages{}
		p := l.open(func(c *kvm2.Config) { c.Images.MaxTransfers = atOnce }, kvm2.WithHTTPClient(&http.Client{Transport: server}))
		var wg sync.WaitGroup
		for i := range 20 {
			spec := l.another(fmt.Sprintf("web-%d", i))
			spec.Image.URL = fmt.Sprintf("https://images.example/%d", i)
			spec.Image.Checksum = fmt.Sprintf("sha256:%x", sha256.Sum256(rawContent(mib, byte(i))))
			wg.Go(func() {
				if _, err := l.create(p, spec); err != nil {
					l.Errorf("Create() = %v", err)
				}
			})
		}
		wg.Wait()
		if server.most != atOnce {
			l.Errorf("at most %d images were transferred at once, want %d", server.most, atOnce)
		}
		if uploads := l.imageUploads(); len(uploads) != 20 {
			l.Errorf("%d uploads, want 20", len(uploads))
		}
	})
}

func TestImage_ProgressTellsRateAndAttempt(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.large(w)
		w.answer = func(n int) *http.Response {
			content := slices.Clone(w.content)
			if n == 1 {
				content[len(content)-1]++
			}
			return answerWith(http.StatusOK, every(time.Second, content), int64(len(content)))
		}
		seen := map[int]kvm2.ImageProgress{} // the last of each attempt while bytes moved
		l.create1()
		l.wait(500 * time.Millisecond) // the polls come between the packets
		for range 60 {
			m, err := l.p.Create(l.Context(), l.spec)
			if err != nil {
				l.Fatalf("Create() = %v", err)
			}
			if m.State == kvm2.StateRunning {
				break
			}
			if m.Image.Phase == kvm2.ImageTransferring {
				seen[m.Image.Attempt] = *m.Image
			}
			l.wait(time.Second)
		}
		if len(seen) != 2 || seen[1].DoneBytes == 0 || seen[2].DoneBytes == 0 {
			l.Errorf("progress: %+v, want that of two attempts", seen)
		}
		for _, p := range seen {
			if p.BytesPerSecond < 200<<10 || p.BytesPerSecond > 300<<10 {
				l.Errorf("progress: %+v, want about 256 KiB a second", p)
			}
		}
	})
}

func TestImage_EventsTellEachPhaseAndTheEnd(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		l.large(w)
		var mu sync.Mutex
		var events []kvm2.ImageEvent
		var times []time.Time
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}), kvm2.WithImageProgress(func(e kvm2.ImageEvent) {
			mu.Lock()
			defer mu.Unlock()
			events, times = append(events, e), append(times, time.Now())
		}))
		w.answer = func(n int) *http.Response {
			if n == 1 {
				return answerWith(http.StatusNotFound, strings.NewReader(""), 0)
			}
			return answerWith(http.StatusOK, every(300*time.Millisecond, w.content), int64(len(w.content)))
		}
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrImage)
		l.wait(5 * time.Second)
		l.running(l.spec)
		mu.Lock()
		defer mu.Unlock()
		var phases []kvm2.ImagePhase
		ended := 0
		for i, e := range events {
			if e.Checksum != w.checksum() {
				l.Errorf("event of %q, want %q", e.Checksum, w.checksum())
			}
			if len(phases) == 0 || phases[len(phases)-1] != e.Progress.Phase {
				phases = append(phases, e.Progress.Phase)
			} else if !e.Ended && times[i].Sub(times[i-1]) < time.Second {
				l.Errorf("event %d came %v after the one before, in the same phase", i, times[i].Sub(times[i-1]))
			}
			if e.Ended {
				ended++
				if failed := ended == 1; failed != errors.Is(e.Err, kvm2.ErrImage) {
					l.Errorf("end %d: %v", ended, e.Err)
				}
			}
		}
		want := []kvm2.ImagePhase{kvm2.ImageOpening, kvm2.ImageTransferring, kvm2.ImageVerifying, kvm2.ImagePublishing}
		if !slices.Equal(phases, want) || ended != 2 || !events[len(events)-1].Ended {
			l.Errorf("phases %q, %d ends; want %q and an end for each transfer", phases, ended, want)
		}
		if last := events[len(events)-1].Progress; last.DoneBytes != int64(len(w.content)) || last.Attempt != 2 {
			l.Errorf("the last event: %+v", last)
		}
	})
}

// Processes that begin at the same moment see each other's attempts, and all but one yield.
func TestImage_OfManyThatStartAtOnceOneTransfers(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.web(nil)
		var wg sync.WaitGroup
		for i := range 5 {
			p := l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}))
			wg.Go(func() {
				if _, err := l.create(p, l.another(fmt.Sprintf("web-%d", i))); err != nil {
					l.Errorf("Create() = %v", err)
				}
			})
		}
		wg.Wait()
		l.wantImage(w)
		begun := 0
		for _, c := range l.host.Calls() {
			if c.Op == kvm2.OpVolumeCreate && isImageVolume(c.Object) {
				begun++
			}
		}
		if uploads := l.imageUploads(); len(uploads) != 1 || begun != 6 {
			l.Errorf("%d image volumes were made, uploads: %v; want five attempts and a pointer, and one upload", begun, uploads)
		}
	}, fake.WithLatency(10*time.Millisecond))
}
