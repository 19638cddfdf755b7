package kvm2

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/kvm2/kvm2/internal/imageprobe"
)

// imageTransfer brings one image from its source into the pool and publishes it, on a connection of its own.
type imageTransfer struct {
	*imageCache
	image    Image
	name     imageName
	progress *progress
	stalls   *stallWatch // of the current try
}

// sentImage is what a data volume holds after its upload.
type sentImage struct {
	volume      string
	format      string
	virtualSize int64
	bytes       int64
}

// run transfers the image. A wrong checksum is tried once more from the start: proxies and mirrors do serve damaged
// files.
func (t *imageTransfer) run(ctx context.Context) error {
	err := t.try(ctx)
	if errors.Is(err, errWrongChecksum) {
		err = t.try(ctx)
	}
	return err
}

var errWrongChecksum = errors.New("wrong checksum")

// try makes one attempt, which ends when nothing moves for the stall time.
func (t *imageTransfer) try(ctx context.Context) error {
	var cancel context.CancelFunc
	ctx, t.stalls, cancel = watchStalls(ctx, time.Duration(t.cfg.Images.StallTimeout))
	defer cancel()
	err := t.attempt(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return transient(nil, "image transfer: %w", cause)
	}
	return err
}

func (t *imageTransfer) attempt(ctx context.Context) error {
	t.enter(ImageOpening)
	src, err := openSource(ctx, t.http, t.image.URL)
	if err != nil {
		return err
	}
	defer func() { _ = src.body.Close() }()
	conn, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if done, err := t.alreadyPublished(ctx, conn); done || err != nil {
		return err
	}
	volume := t.name.attempt()
	if err := t.fill(ctx, conn, src, volume); err != nil {
		return errors.Join(err, t.removeAttempt(ctx, volume))
	}
	return nil
}

func (t *imageTransfer) enter(phase ImagePhase) {
	t.stalls.moved()
	t.progress.enter(phase)
}

// alreadyPublished looks whether another process was faster.
func (t *imageTransfer) alreadyPublished(ctx context.Context, conn Conn) (bool, error) {
	_, err := t.lookup(ctx, conn, t.name)
	if ClassOf(err) == ClassNotFound {
		return false, nil
	}
	return err == nil, err
}

// fill uploads, verifies and publishes one attempt.
func (t *imageTransfer) fill(ctx context.Context, conn Conn, src source, volume string) error {
	head := bufio.NewReaderSize(src.body, imageprobe.HeadSize)
	info, err := probe(head)
	if err != nil {
		return err
	}
	pool, err := activePool(ctx, conn, t.cfg.Pool)
	if err != nil {
		return err
	}
	if err := t.space.reserve(t.name.pointer, pool, claim{bytes: src.size, written: t.progress.written}, t.cfg.OvercommitPercent); err != nil {
		return err
	}
	xml, err := uploadXML(volume)
	if err != nil {
		return err
	}
	if err := conn.CreateVolume(ctx, t.cfg.Pool, xml); err != nil {
		return err
	}
	sent, err := t.upload(ctx, conn, head, src.size, volume)
	if err != nil {
		return err
	}
	sent.format, sent.virtualSize = string(info.Format), info.VirtualSize
	if info.Format == imageprobe.FormatRaw {
		sent.virtualSize = sent.bytes
	}
	t.enter(ImageVerifying)
	path, err := t.verifyOnHost(ctx, conn, sent)
	if err != nil {
		return err
	}
	t.enter(ImagePublishing)
	return t.publish(ctx, conn, sent, path)
}

// probe reads the header before anything is sent: format and size are looked at, not believed.
func probe(r *bufio.Reader) (imageprobe.Info, error) {
	head, err := r.Peek(imageprobe.HeadSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return imageprobe.Info{}, transient(nil, "reading the image: %w", err)
	}
	info, err := imageprobe.Probe(head)
	if err != nil {
		return imageprobe.Info{}, permanent(ErrImage, "%w", err)
	}
	return info, nil
}

// upload sends the image while hashing and counting it.
func (t *imageTransfer) upload(ctx context.Context, conn Conn, r io.Reader, size int64, volume string) (sentImage, error) {
	t.progress.begin(size)
	digest := newDigest(t.image.Checksum)
	counted := &countingReader{r: io.TeeReader(r, digest), step: func(n int) {
		t.stalls.moved()
		t.progress.add(n)
	}}
	if err := conn.UploadVolume(ctx, t.cfg.Pool, volume, counted); err != nil {
		return sentImage{}, err
	}
	if size > 0 && counted.n != size {
		return sentImage{}, transient(nil, "image transfer: the source sent %d of %d bytes", counted.n, size)
	}
	if got := hex.EncodeToString(digest.Sum(nil)); !strings.HasSuffix(t.image.Checksum, ":"+got) {
		return sentImage{}, permanent(ErrImage, "%w: want %s, got %s", errWrongChecksum, t.image.Checksum, got)
	}
	return sentImage{volume: volume, bytes: counted.n}, nil
}

// verifyOnHost compares the size of the file with what was sent. libvirt reports success for an upload whose last
// bytes did not fit.
func (t *imageTransfer) verifyOnHost(ctx context.Context, conn Conn, sent sentImage) (path string, err error) {
	v, err := conn.Volume(ctx, t.cfg.Pool, sent.volume)
	if err != nil {
		return "", lookAgain(err, "volume %q", sent.volume)
	}
	if v.PhysicalBytes != sent.bytes {
		return "", quota("image: %d of %d bytes reached the disk: pool %q is full", v.PhysicalBytes, sent.bytes, t.cfg.Pool)
	}
	return v.Path, nil
}

// publish creates the pointer. Whoever creates it first has published; everybody else's attempt is garbage then,
// and so is what dead processes have left.
func (t *imageTransfer) publish(ctx context.Context, conn Conn, sent sentImage, path string) error {
	xml, err := overlayXML(t.name.pointer, sent.virtualSize, path, sent.format)
	if err != nil {
		return err
	}
	err = conn.CreateVolume(ctx, t.cfg.Pool, xml)
	if err != nil && !errors.Is(err, ErrConflict) {
		return err
	}
	winner, err := t.lookup(ctx, conn, t.name)
	if err != nil {
		return lookAgain(err, "volume %q", t.name.pointer)
	}
	names, err := conn.VolumeNames(ctx, t.cfg.Pool)
	if err != nil {
		return err
	}
	for _, name := range slices.DeleteFunc(names, func(n string) bool { return !t.name.isAttempt(n) }) {
		if strings.HasSuffix(winner.path, "/"+name) {
			continue
		}
		if err := gone(conn.DeleteVolume(ctx, t.cfg.Pool, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeAttempt removes a failed attempt on a fresh connection: the transfer's own may be broken, its context over.
// If the host cannot be reached, the next publisher removes it.
func (t *imageTransfer) removeAttempt(ctx context.Context, volume string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(t.cfg.CallTimeout))
	defer cancel()
	conn, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if winner, err := t.lookup(ctx, conn, t.name); err == nil && strings.HasSuffix(winner.path, "/"+volume) {
		return nil // the reply that it was published was lost
	}
	return gone(conn.DeleteVolume(ctx, t.cfg.Pool, volume))
}

func newDigest(checksum string) hash.Hash {
	if strings.HasPrefix(checksum, "sha512:") {
		return sha512.New()
	}
	return sha256.New()
}

// countingReader reports every read.
type countingReader struct {
	r    io.Reader
	n    int64
	step func(int)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.step(n)
	return n, err
}

// stallWatch ends a context when nothing has moved for some time.
type stallWatch struct {
	limit time.Duration
	timer *time.Timer
}

func watchStalls(ctx context.Context, limit time.Duration) (context.Context, *stallWatch, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &stallWatch{limit: limit}
	w.timer = time.AfterFunc(limit, func() { cancel(fmt.Errorf("nothing moved for %s", limit)) })
	return ctx, w, func() {
		w.timer.Stop()
		cancel(nil)
	}
}

func (w *stallWatch) moved() { w.timer.Reset(w.limit) }
