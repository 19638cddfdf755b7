package kvm2

import (
	"sync"
	"time"
)

// ImageEvent tells how far an image is.
type ImageEvent struct {
	// Checksum identifies the image, as in Image.Checksum.
	Checksum string
	// Progress is how far it is.
	Progress ImageProgress
	// Ended marks the last event of a transfer: the image is in the pool, or Err says why it is not. After a failure
	// another transfer begins with the first Create behind the time to wait.
	Ended bool
	Err   error
}

// WithImageProgress has fn called as images are brought into the pool: at the start of each phase, each second while
// bytes move, and at the end. The calls for one image come one after another, from the goroutine that moves its bytes:
// fn must return soon, and must not call Provider.Close. Calls for several images may come at once.
func WithImageProgress(fn func(ImageEvent)) Option { return func(o *options) { o.progress = fn } }

// progressEvery is how often an event comes while bytes move.
const progressEvery = time.Second

// progress is an ImageProgress that several goroutines watch.
type progress struct {
	image string
	tell  func(ImageEvent) // may be nil

	mu      sync.Mutex
	attempt int
	phase   ImagePhase
	done    int64
	total   int64
	rate    rate
	told    time.Time

	telling sync.Mutex // held while fn runs, so that events come one after another, each newer than the one before
}

func (p *progress) enter(phase ImagePhase) { p.begin(phase, func() {}) }

// transferring begins an upload of so many bytes; 0 while that is unknown.
func (p *progress) transferring(total int64) {
	p.begin(ImageTransferring, func() { p.done, p.total, p.rate = 0, total, rate{start: time.Now()} })
}

// another begins an attempt beyond the first.
func (p *progress) another() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attempt++
}

// waiting says how many bytes another process has transferred.
func (p *progress) waiting(done int64) {
	p.mu.Lock()
	first := p.phase != ImageWaiting
	p.mu.Unlock()
	if first {
		p.begin(ImageWaiting, func() { p.done, p.total, p.rate = done, 0, rate{start: time.Now()} })
		return
	}
	p.move(func(now time.Time) {
		p.rate.add(now, max(0, done-p.done))
		p.done = done
	})
}

func (p *progress) add(n int) {
	p.move(func(now time.Time) {
		p.rate.add(now, int64(n))
		p.done += int64(n)
	})
}

func (p *progress) begin(phase ImagePhase, edit func()) {
	p.mu.Lock()
	p.phase, p.told = phase, time.Now()
	edit()
	p.mu.Unlock()
	p.event(false, nil)
}

func (p *progress) move(edit func(now time.Time)) {
	p.mu.Lock()
	now := time.Now()
	edit(now)
	due := now.Sub(p.told) >= progressEvery
	if due {
		p.told = now
	}
	p.mu.Unlock()
	if due {
		p.event(false, nil)
	}
}

// event tells whoever wants to know.
func (p *progress) event(ended bool, err error) {
	if p.tell == nil {
		return
	}
	p.telling.Lock()
	defer p.telling.Unlock()
	p.tell(ImageEvent{Checksum: p.image, Progress: *p.snapshot(), Ended: ended, Err: err})
}

func (p *progress) written() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done
}

func (p *progress) attempts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.attempt
}

func (p *progress) snapshot() *ImageProgress {
	p.mu.Lock()
	defer p.mu.Unlock()
	phase := p.phase
	if phase == "" {
		phase = ImageOpening
	}
	return &ImageProgress{
		Phase: phase, DoneBytes: p.done, TotalBytes: p.total, BytesPerSecond: p.rate.perSecond(time.Now()), Attempt: p.attempt,
	}
}

// rateWindow is over how many seconds a rate is measured.
const rateWindow = 5

// rate counts what moved in each of the last seconds.
type rate struct {
	start  time.Time
	second int64 // since the start, the one that is counted now
	moved  [rateWindow]int64
}

func (r *rate) add(now time.Time, n int64) {
	r.advance(now)
	r.moved[r.second%rateWindow] += n
}

// advance forgets the seconds that have left the window.
func (r *rate) advance(now time.Time) {
	second := int64(now.Sub(r.start) / time.Second)
	for s := max(r.second+1, second-rateWindow+1); s <= second; s++ {
		r.moved[s%rateWindow] = 0
	}
	r.second = max(r.second, second)
}

// perSecond is 0 in the first second.
func (r *rate) perSecond(now time.Time) int64 {
	if r.start.IsZero() || now.Sub(r.start) < time.Second {
		return 0
	}
	r.advance(now)
	var sum int64
	for _, n := range r.moved {
		sum += n
	}
	covered := min(now.Sub(r.start), now.Sub(r.start)%time.Second+(rateWindow-1)*time.Second)
	return int64(float64(sum) / covered.Seconds())
}
