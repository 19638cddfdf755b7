package sshtest

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// pipeSize is how many bytes one direction of a Pipe holds, as a socket buffer
// does. It exceeds the window of an SSH channel, so that a client whose server
// has frozen blocks in the channel, where testing/synctest can see it, and not in
// the transport, where it waits with a mutex held.
const pipeSize = 4 << 20

// Pipe returns the two ends of a connection in memory. Unlike those of net.Pipe
// they are buffered: in SSH both sides speak first. It has no deadlines, and
// works in a testing/synctest bubble.
func Pipe() (net.Conn, net.Conn) {
	there, back := newHalf(), newHalf()
	return &pipeEnd{in: back, out: there}, &pipeEnd{in: there, out: back}
}

// half is one direction.
type half struct {
	mu     sync.Mutex
	moved  sync.Cond
	data   bytes.Buffer
	closed bool
}

func newHalf() *half {
	h := &half{}
	h.moved.L = &h.mu
	return h
}

func (h *half) read(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.data.Len() == 0 && !h.closed {
		h.moved.Wait()
	}
	n, err := h.data.Read(p)
	h.moved.Broadcast()
	return n, err
}

func (h *half) write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	written := 0
	for written < len(p) {
		for h.data.Len() >= pipeSize && !h.closed {
			h.moved.Wait()
		}
		if h.closed {
			return written, io.ErrClosedPipe
		}
		n := min(len(p)-written, pipeSize-h.data.Len())
		h.data.Write(p[written : written+n])
		written += n
		h.moved.Broadcast()
	}
	return written, nil
}

func (h *half) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.moved.Broadcast()
}

type pipeEnd struct{ in, out *half }

func (e *pipeEnd) Read(p []byte) (int, error)  { return e.in.read(p) }
func (e *pipeEnd) Write(p []byte) (int, error) { return e.out.write(p) }

func (e *pipeEnd) Close() error {
	e.in.close()
	e.out.close()
	return nil
}

func (e *pipeEnd) LocalAddr() net.Addr  { return pipeAddr{} }
func (e *pipeEnd) RemoteAddr() net.Addr { return pipeAddr{} }

func (e *pipeEnd) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (e *pipeEnd) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (e *pipeEnd) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }
