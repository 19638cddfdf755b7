package fake

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
)

// A transfer moves the content of one file. The file is found once, as libvirt opens it once: when the volume is
// deleted meanwhile, the transfer goes on.
type transfer struct {
	host   *Host
	pool   *pool
	file   *file
	start  int64
	offset int64
	digest hash.Hash
	buffer []byte // for one packet
}

func (h *Host) openTransfer(poolName, name string, offset int64) (*transfer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settle()
	p, _, err := h.volumeNamed(poolName, name)
	if err != nil {
		return nil, err
	}
	if offset < 0 {
		return nil, unsupported(fmt.Sprintf("offset %d", offset))
	}
	f := p.files[name]
	if f == nil {
		return nil, missingFile("Unable to open stream for '%s'", p.pathOf(name))
	}
	f.opened++
	return &transfer{host: h, pool: p, file: f, start: offset, offset: offset, digest: sha256.New(), buffer: make([]byte, h.settings.packet)}, nil
}

// close ends the transfer, and writes down how much it moved.
func (t *transfer) close(n int) {
	t.host.mu.Lock()
	t.file.close()
	t.host.mu.Unlock()
	t.host.note(n, func(c *Call) {
		c.Bytes, c.SHA256 = t.offset-t.start, hex.EncodeToString(t.digest.Sum(nil))
	})
}

// aside runs a blocking Read or Write of the caller's. The call returns when its context or its session ends, even if
// that does not.
func (c *conn) aside(ctx context.Context, fn func()) error {
	if err := c.over(ctx); err != nil {
		return err
	}
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		fn()
	}()
	select {
	case <-finished:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.reason()
	}
}

func (c *conn) upload(ctx context.Context, p plan, pool, name string, offset int64, r io.Reader) error {
	t, err := c.host.openTransfer(pool, name, offset)
	if err != nil {
		return err
	}
	defer t.close(p.n)
	if err := t.receive(ctx, c, p.uploadCut(), r); err != nil {
		return err
	}
	t.refresh()
	return nil
}

// receive writes packet after packet. That one could not be written shows only when another follows it.
func (t *transfer) receive(ctx context.Context, c *conn, end *cut, r io.Reader) error {
	var unreported error
	for {
		packet, readErr := t.packet(ctx, c, r)
		if len(packet) > 0 && unreported != nil {
			return unreported
		}
		packet, cutErr := t.cut(packet, end)
		unreported = t.write(packet)
		if errors.Is(readErr, io.EOF) && cutErr == nil {
			return nil
		}
		if err := cmp.Or(cutErr, readErr); err != nil {
			return err
		}
	}
}

// packet reads the next packet, which stays valid until the one after it. It comes with io.EOF when it is the last one.
// When the call gives up, the reader may still fill the buffer; nobody looks at that any more.
func (t *transfer) packet(ctx context.Context, c *conn, r io.Reader) ([]byte, error) {
	var n int
	var readErr error
	if err := c.aside(ctx, func() { n, readErr = io.ReadFull(r, t.buffer) }); err != nil {
		return nil, err
	}
	if errors.Is(readErr, io.ErrUnexpectedEOF) {
		readErr = io.EOF
	}
	return t.buffer[:n], readErr
}

// cut shortens a packet to what a fault lets pass.
func (t *transfer) cut(packet []byte, end *cut) ([]byte, error) {
	moved := t.offset - t.start
	if end == nil || moved+int64(len(packet)) <= end.after {
		return packet, nil
	}
	packet = packet[:max(0, end.after-moved)]
	if end.silent {
		return packet, nil
	}
	return packet, errLost
}

// write puts as much of a packet into the file as the file system has room for.
func (t *transfer) write(packet []byte) error {
	t.host.mu.Lock()
	defer t.host.mu.Unlock()
	fits := packet[:min(int64(len(packet)), t.file.room(t.offset, t.pool.free()))]
	if len(fits) > 0 {
		t.file.write(fits, t.offset)
		t.digest.Write(fits)
	}
	t.offset += int64(len(fits))
	t.host.stats.UploadedBytes += int64(len(fits))
	if len(fits) < len(packet) {
		return answer(codeSystem, "Unable to write %s: No space left on device", t.file.path)
	}
	return nil
}

// refresh has the pool look at what an upload brought.
func (t *transfer) refresh() {
	t.host.mu.Lock()
	defer t.host.mu.Unlock()
	if t.pool.active {
		t.pool.refresh()
	}
}

func (c *conn) download(ctx context.Context, p plan, pool, name string, w io.Writer) error {
	t, err := c.host.openTransfer(pool, name, 0)
	if err != nil {
		return err
	}
	defer t.close(p.n)
	for {
		packet := t.next()
		if len(packet) == 0 {
			return nil
		}
		var writeErr error
		if err := c.aside(ctx, func() { _, writeErr = w.Write(packet) }); err != nil {
			return err
		}
		if writeErr != nil {
			return writeErr
		}
	}
}

// next reads the next packet of the file, which stays valid until the one after it; none at the file's end.
func (t *transfer) next() []byte {
	t.host.mu.Lock()
	n := t.file.read(t.buffer, t.offset)
	t.host.mu.Unlock()
	t.offset += int64(n)
	t.digest.Write(t.buffer[:n])
	return t.buffer[:n]
}
