package kvm2

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/kvm2/kvm2/internal/imageprobe"
)

// inPlace looks at a volume that root disks are to stand on as it is. Its header is read and judged like that of any
// image: what libvirt takes it for decides nothing.
func (c *imageCache) inPlace(ctx context.Context, conn Conn, name string) (baseImage, error) {
	v, err := c.ownersVolume(ctx, conn, name)
	if err != nil {
		return baseImage{}, err
	}
	if v.unfinished() {
		return baseImage{}, transient(ErrConflict, "volume %q is just being made", name)
	}
	head, err := c.volumeHead(ctx, name)
	if err != nil {
		return baseImage{}, lookAgain(err, "volume %q", name)
	}
	info, err := imageprobe.Probe(head)
	if err != nil {
		return baseImage{}, permanent(ErrImage, "volume %q: %w", name, err)
	}
	base := baseImage{volume: name, path: v.Path, format: string(info.Format), virtualSize: info.VirtualSize}
	if info.Format == imageprobe.FormatRaw {
		base.virtualSize = v.PhysicalBytes
	}
	return base, nil
}

// ownersVolume looks a volume up that a Spec names: when it is missing, that is Permanent and not NotFound.
func (c *imageCache) ownersVolume(ctx context.Context, conn Conn, name string) (Volume, error) {
	v, err := conn.Volume(ctx, c.cfg.Pool, name)
	if ClassOf(err) == ClassNotFound {
		return Volume{}, permanent(ErrImage, "volume %q does not exist in pool %q", name, c.cfg.Pool)
	}
	return v, err
}

// volumeHead reads the beginning of a volume. It ends the download by an error, which costs the connection: so it takes
// one of its own.
func (c *imageCache) volumeHead(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.cfg.CallTimeout))
	defer cancel()
	conn, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	var head headWriter
	if err := conn.DownloadVolume(ctx, c.cfg.Pool, name, &head); err != nil && !errors.Is(err, errHeadRead) {
		return nil, err
	}
	return head.Bytes(), nil
}

// headWriter keeps the beginning of what is written to it, and then ends it.
type headWriter struct{ bytes.Buffer }

var errHeadRead = errors.New("the head of the volume has been read")

func (w *headWriter) Write(p []byte) (int, error) {
	n, _ := w.Buffer.Write(p[:min(len(p), imageprobe.HeadSize-w.Len())])
	if w.Len() == imageprobe.HeadSize {
		return n, errHeadRead
	}
	return n, nil
}
