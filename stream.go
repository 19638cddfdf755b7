package kvm2

import (
	"context"
	"errors"
	"io"
	"sync"
)

// Volume content over go-libvirt, whose streams need care: a Writer that fails makes the client hang for good, and
// after an upload has failed it may go on reading.

func (c *libvirtConn) UploadVolume(ctx context.Context, pool, name string, offset int64, r io.Reader) error {
	up := &uploadReader{r: r}
	defer up.detach()
	err := c.do(ctx, func() error { return c.client.StorageVolUpload(volumeRef(pool, name), up, uint64(offset), 0, 0) })
	if readErr := up.failure(); readErr != nil {
		_ = c.Close() // the stream was cut off in the middle
		return readErr
	}
	return err
}

// uploadReader is what go-libvirt reads an upload from. Small reads make small packets, which libvirtd handles much
// faster than the client's own 4 MiB. After an upload failed the client may go on reading: detach stops that.
type uploadReader struct {
	r io.Reader

	mu       sync.Mutex
	err      error
	detached bool
}

const uploadPacket = 256 << 10

func (u *uploadReader) Read(p []byte) (int, error) {
	u.mu.Lock()
	detached := u.detached
	u.mu.Unlock()
	if detached {
		return 0, io.ErrClosedPipe
	}
	n, err := u.r.Read(p[:min(len(p), uploadPacket)])
	if err != nil && !errors.Is(err, io.EOF) {
		u.mu.Lock()
		u.err = err
		u.mu.Unlock()
	}
	return n, err
}

func (u *uploadReader) detach() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.detached = true
}

func (u *uploadReader) failure() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}

func (c *libvirtConn) DownloadVolume(ctx context.Context, pool, name string, w io.Writer) error {
	down := &downloadWriter{w: w, abort: c.Close}
	err := c.do(ctx, func() error { return c.client.StorageVolDownload(volumeRef(pool, name), down, 0, 0, 0) })
	if writeErr := down.failure(); writeErr != nil {
		return writeErr
	}
	return err
}

// downloadWriter never fails: a Writer that does makes go-libvirt hang for good. It closes the connection instead.
type downloadWriter struct {
	w     io.Writer
	abort func() error

	mu  sync.Mutex
	err error
}

func (d *downloadWriter) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return len(p), nil
	}
	if _, d.err = d.w.Write(p); d.err != nil {
		_ = d.abort()
	}
	return len(p), nil
}

func (d *downloadWriter) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}
