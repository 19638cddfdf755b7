package kvm2

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"regexp"
	"strings"
	"sync"
	"time"
)

// imageName is how an image is called in a pool. Its bytes are in a data volume of one transfer attempt; a pointer
// volume, whose backing store is that data volume, says that they are complete and verified. Creating the pointer is
// atomic and exclusive, which publishes the image: libvirt can neither rename a volume nor tell a whole upload from a
// truncated one.
type imageName struct {
	checksum string
	pointer  string
}

func newImageName(scope, checksum string) imageName {
	_, digest, _ := strings.Cut(checksum, ":")
	return imageName{checksum: checksum, pointer: scope + "-image-" + digest}
}

// attempt is the name of a data volume. It is random, so that no two attempts write to one volume.
func (n imageName) attempt() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return n.pointer + "-" + hex.EncodeToString(b[:])
}

// isAttempt reports whether a volume is an attempt at the image. A name that only begins like one is somebody else's.
func (n imageName) isAttempt(volume string) bool {
	attempt, ok := strings.CutPrefix(volume, n.pointer+"-")
	return ok && attemptForm.MatchString(attempt)
}

var attemptForm = regexp.MustCompile(`^[0-9a-f]{16}$`)

// imageOfVolume says which image of the scope a volume belongs to, as its pointer or as an attempt at it. The form is
// strict, so that no name is one of two scopes, whatever dashes they have.
func imageOfVolume(scope, volume string) (imageName, bool) {
	rest, ok := strings.CutPrefix(volume, scope+"-image-")
	digest, attempt, isAttempt := strings.Cut(rest, "-")
	checksum := checksumOf(digest)
	if !ok || checksum == "" || isAttempt && !attemptForm.MatchString(attempt) {
		return imageName{}, false
	}
	return newImageName(scope, checksum), true
}

// imageOfData says which image of the scope the volume holds the bytes of.
func imageOfData(scope, volume string) (imageName, bool) {
	name, ok := imageOfVolume(scope, volume)
	return name, ok && name.isAttempt(volume)
}

// baseImage is a published image, or a volume that is used in place, as root disks need it.
type baseImage struct {
	name        imageName // of a published image
	volume      string    // that is used in place
	path        string
	format      string
	virtualSize int64
}

// isIn reports whether the image's bytes are in that volume.
func (b baseImage) isIn(volume string) bool { return path.Base(b.path) == volume }

// imageCache makes images available in the pool. Within the process an image is transferred once however many
// machines wait for it.
type imageCache struct {
	cfg     Config
	open    func(context.Context) (*session, error)       // a connection of one's own
	with    func(context.Context, func(Conn) error) error // a short use of one that is shared
	sources imageSources
	log     *slog.Logger
	tell    func(ImageEvent) // may be nil
	space   *reservations
	slots   chan struct{} // one token for each transfer under way
	ctx     context.Context
	cancel  context.CancelFunc

	attempts *attempts

	mu   sync.Mutex
	jobs map[string]*imageJob // by checksum
	sums map[sumsKey]*sumsJob
	wg   sync.WaitGroup
}

// imageJob is one image's transfer, under way or failed.
type imageJob struct {
	progress *progress // nil while none is under way
	attempts int       // how many have been made
	failures int
	err      error     // of the last transfer; nil while one is under way
	retry    time.Time // not before this may another begin
}

func newImageCache(e endpoint, open func(context.Context) (*session, error), conns *connPool, space *reservations) *imageCache {
	ctx, cancel := context.WithCancel(context.Background())
	return &imageCache{
		cfg: e.cfg, open: open, with: conns.with, sources: e.sources, log: e.log, tell: e.progress, space: space,
		slots: make(chan struct{}, e.cfg.Images.MaxTransfers),
		ctx:   ctx, cancel: cancel, jobs: map[string]*imageJob{}, sums: map[sumsKey]*sumsJob{},
		attempts: newAttempts(time.Duration(e.cfg.Images.StallTimeout)),
	}
}

// close ends all transfers and waits until they have ended.
func (c *imageCache) close() {
	c.cancel()
	c.wg.Wait()
}

// ensure returns the published image. While it is being transferred it returns the progress instead; when the
// transfer failed, its error.
func (c *imageCache) ensure(ctx context.Context, conn Conn, image Image) (baseImage, *ImageProgress, error) {
	name := newImageName(c.cfg.Scope, image.Checksum)
	base, err := c.lookup(ctx, conn, name)
	if err == nil {
		c.forget(name)
		return base, nil, nil
	}
	if ClassOf(err) != ClassNotFound {
		return baseImage{}, nil, err
	}
	progress, err := c.join(image, name)
	return baseImage{}, progress, err
}

// lookup finds the published image; NotFound when it is not there. A pointer whose data volume is gone is no use to
// anybody and is removed.
func (c *imageCache) lookup(ctx context.Context, conn Conn, name imageName) (baseImage, error) {
	pointer, err := conn.Volume(ctx, c.cfg.Pool, name.pointer)
	if err != nil {
		return baseImage{}, err
	}
	if pointer.unfinished() {
		return baseImage{}, transient(ErrConflict, "volume %q is just being made by another process", name.pointer)
	}
	dataName := pointer.backingName()
	if !name.isAttempt(dataName) {
		return baseImage{}, notAnImage(pointer)
	}
	if _, err := conn.Volume(ctx, c.cfg.Pool, dataName); err != nil {
		if ClassOf(err) == ClassNotFound {
			err = errors.Join(err, gone(conn.DeleteVolume(ctx, c.cfg.Pool, name.pointer)))
		}
		return baseImage{}, err
	}
	return baseImage{name: name, path: pointer.BackingPath, format: pointer.BackingFormat, virtualSize: pointer.CapacityBytes}, nil
}

// notAnImage is the error for a volume that stands in a pointer's place.
func notAnImage(v Volume) error {
	return permanent(ErrImage, "volume %q is no image of kvm2: its backing store is %q; remove it", v.Name, clip(v.BackingPath))
}

// join starts the image's transfer or joins the one under way. After a failure it returns the error until it is time
// to try again.
func (c *imageCache) join(image Image, name imageName) (*ImageProgress, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.ctx.Err(); err != nil {
		return nil, permanent(ErrClosed, "no transfer can be started")
	}
	job := c.jobs[name.checksum]
	if job == nil {
		job = &imageJob{}
		c.jobs[name.checksum] = job
	}
	if job.err != nil && time.Now().Before(job.retry) {
		return nil, fmt.Errorf("image: %w", job.err)
	}
	if job.progress == nil {
		job.err = nil
		job.progress = &progress{image: name.checksum, tell: c.tell, attempt: job.attempts + 1}
		c.wg.Go(func() { c.transfer(image, name, job) })
	}
	return job.progress.snapshot(), nil
}

// transfer runs one transfer to its end and keeps the outcome for the next Create.
func (c *imageCache) transfer(image Image, name imageName, job *imageJob) {
	t := &imageTransfer{imageCache: c, image: image, name: name, progress: job.progress, retries: newRetries(c.cfg.Images)}
	err := t.run(c.ctx)
	c.space.release(name.pointer)
	t.progress.event(true, err)
	c.conclude(name, job, err)
}

func (c *imageCache) conclude(name imageName, job *imageJob, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	job.attempts = job.progress.attempts()
	job.progress, job.err = nil, err
	if err == nil {
		delete(c.jobs, name.checksum)
		return
	}
	job.failures++
	job.retry = time.Now().Add(max(retryDelay(job.failures), askedDelay(err)))
	level := slog.LevelWarn
	if errors.Is(err, ErrConflict) {
		level = slog.LevelInfo // another process was faster
	}
	c.log.LogAttrs(c.ctx, level, "image transfer failed",
		slog.String("image", name.checksum), slog.Int("failures", job.failures), slog.String("error", err.Error()))
}

func (c *imageCache) waitForSlot(ctx context.Context) error {
	select {
	case c.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return transient(nil, "waiting for other image transfers: %w", context.Cause(ctx))
	}
}

// retryDelay is how long a failure is reported before another transfer begins: 5 s, doubled with each failure, at
// most 2 min.
func retryDelay(failures int) time.Duration {
	return min(retryTransient<<min(failures-1, 10), retryQuota)
}

// forget drops what is remembered of failures, once the image is there.
func (c *imageCache) forget(name imageName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if job := c.jobs[name.checksum]; job != nil && job.progress == nil {
		delete(c.jobs, name.checksum)
	}
}
