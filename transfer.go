package kvm2

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
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
	retries  *retries    // of all tries together
	damaged  bool        // a wrong checksum has been tried again
}

// sentImage is what a data volume holds after its upload.
type sentImage struct {
	volume      string
	format      string
	virtualSize int64
	bytes       int64
}

// run brings the image into the pool. As long as another process is at it, it is waited for: its bytes need not be
// sent twice.
func (t *imageTransfer) run(ctx context.Context) error {
	for {
		err := t.transferInSlot(ctx)
		if !errors.Is(err, errOthers) {
			return err
		}
		if published, err := t.waitForOthers(ctx); published || err != nil {
			return err
		}
	}
}

func (t *imageTransfer) transferInSlot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.cfg.Images.Timeout))
	defer cancel()
	if err := t.waitForSlot(ctx); err != nil {
		return err
	}
	defer func() { <-t.slots }()
	return t.transfer(ctx)
}

// transfer transfers the image, and starts over when the source broke off and cannot go on. A wrong checksum is tried
// once more from the start as well: proxies and mirrors do serve damaged files. It stays at once also when another
// process is waited for in between, or two could keep each other at it.
func (t *imageTransfer) transfer(ctx context.Context) error {
	for {
		err := t.try(ctx)
		if !errors.Is(err, errStartOver) && !t.damagedFirst(err) {
			return err
		}
		t.progress.another()
	}
}

// damagedFirst reports whether err is the first wrong checksum, and there is a retry for it.
func (t *imageTransfer) damagedFirst(err error) bool {
	if t.damaged || !errors.Is(err, errWrongChecksum) {
		return false
	}
	t.damaged = true
	return t.retries.take()
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
	conn, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if done, err := t.alreadyPublished(ctx, conn); done || err != nil {
		return err
	}
	if err := t.yield(ctx, conn, ""); err != nil {
		return err
	}
	src, err := t.openSource(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = src.body.Close() }()
	return t.fill(ctx, conn, src)
}

// enter begins a phase. Nothing but bytes resets the clock for standing still: to other processes an attempt is dead when
// it has not grown for that time, so by then it must be published or given up.
func (t *imageTransfer) enter(phase ImagePhase) { t.progress.enter(phase) }

// alreadyPublished looks whether another process was faster.
func (t *imageTransfer) alreadyPublished(ctx context.Context, conn Conn) (bool, error) {
	_, err := t.lookup(ctx, conn, t.name)
	if ClassOf(err) == ClassNotFound {
		return false, nil
	}
	return err == nil, err
}

// fill makes one attempt: it looks at the image's header before anything is written, then uploads, verifies and
// publishes.
func (t *imageTransfer) fill(ctx context.Context, conn Conn, src source) error {
	t.progress.transferring(src.size)
	file := t.newFileReader(src)
	defer file.stop()
	content, info, err := t.look(file)
	if err != nil {
		return err
	}
	defer content.close()
	pool, err := activePool(ctx, conn, t.cfg.Pool)
	if err != nil {
		return err
	}
	if err := t.space.reserve(t.name.pointer, pool, claim{bytes: src.size, written: t.progress.written}, t.cfg.OvercommitPercent); err != nil {
		return err
	}
	volume := t.name.attempt()
	xml, err := uploadXML(volume)
	if err != nil {
		return err
	}
	t.attempts.begin(volume)
	err = conn.CreateVolume(ctx, t.cfg.Pool, xml)
	if err == nil {
		err = t.write(ctx, conn, content, file, volume, info)
	}
	return t.conclude(ctx, volume, err)
}

// write puts the image into its volume and publishes it, unless another process is found to do so.
func (t *imageTransfer) write(ctx context.Context, conn Conn, content *imageContent, file *fileReader, volume string, info imageprobe.Info) error {
	if err := t.yield(ctx, conn, volume); err != nil {
		return err
	}
	hole, err := t.shortestHole(ctx, conn, info.Format, volume)
	if err != nil {
		return err
	}
	sent, err := t.upload(ctx, conn, content, file, hole, volume)
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
		return imageprobe.Info{}, fmt.Errorf("reading the image: %w", err)
	}
	info, err := imageprobe.Probe(head)
	if err != nil {
		return imageprobe.Info{}, permanent(ErrImage, "%w", err)
	}
	return info, nil
}

// shortestHole says from which length on zeros need not be sent. A new volume without a byte on the disk is a file, and
// what is skipped reads as zeros later; on a device, what was there before would show. A qcow2 file has no holes worth it.
func (t *imageTransfer) shortestHole(ctx context.Context, conn Conn, format imageprobe.Format, volume string) (int64, error) {
	if format != imageprobe.FormatRaw {
		return math.MaxInt64, nil
	}
	v, err := conn.Volume(ctx, t.cfg.Pool, volume)
	if err != nil {
		return 0, lookAgain(err, "volume %q", volume)
	}
	if v.PhysicalBytes != 0 {
		return math.MaxInt64, nil
	}
	return minHole, nil
}

// upload sends what is in the file without its holes, while it is read and hashed, and makes sure that the file was the
// right one to its end.
func (t *imageTransfer) upload(ctx context.Context, conn Conn, content *imageContent, file *fileReader, hole int64, volume string) (sentImage, error) {
	ahead := startReadAhead(content, func(int) { t.stalls.moved() })
	defer ahead.stop()
	defer context.AfterFunc(ctx, ahead.stop)()
	err := t.send(ctx, conn, volume, &dataRanges{source: ahead, hole: hole})
	if err != nil && !errors.Is(err, errUnpack) {
		return sentImage{}, err
	}
	content.close()
	if err := file.judge(t.image.Checksum, err); err != nil {
		return sentImage{}, err
	}
	return sentImage{volume: volume, bytes: ahead.count()}, nil
}

// send uploads range after range. Before each further one it makes sure that the last one is on the disk: afterwards a
// part that is missing there would look like a hole.
func (t *imageTransfer) send(ctx context.Context, conn Conn, volume string, ranges *dataRanges) error {
	for sent := int64(0); ; sent = ranges.offset {
		offset, err := ranges.begin()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if sent > 0 {
			if _, err := t.onDisk(ctx, conn, volume, sent); err != nil {
				return err
			}
		}
		if err := conn.UploadVolume(ctx, t.cfg.Pool, volume, offset, ranges); err != nil {
			return err
		}
	}
}

// verifyOnHost compares the size of the file with what was sent.
func (t *imageTransfer) verifyOnHost(ctx context.Context, conn Conn, sent sentImage) (path string, err error) {
	v, err := t.onDisk(ctx, conn, sent.volume, sent.bytes)
	return v.Path, err
}

// onDisk returns the volume if its file is as long as it must be. libvirt reports success for an upload whose last bytes
// did not fit.
func (t *imageTransfer) onDisk(ctx context.Context, conn Conn, volume string, want int64) (Volume, error) {
	v, err := conn.Volume(ctx, t.cfg.Pool, volume)
	if err != nil {
		return Volume{}, lookAgain(err, "volume %q", volume)
	}
	if v.PhysicalBytes != want {
		return Volume{}, quota("image: %d of %d bytes reached the disk: pool %q is full", v.PhysicalBytes, want, t.cfg.Pool)
	}
	return v, nil
}
