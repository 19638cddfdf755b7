package kvm2

import (
	"io"
	"sync"
)

// readAhead reads an image, and so decompresses and hashes its file, in a goroutine of its own, while what it has read before is being sent. It has a
// fixed number of buffers, so its memory does not depend on the file.
type readAhead struct {
	moved func(n int)

	free   chan []byte // empty buffers
	full   chan []byte // filled ones; closed after the last
	err    error       // why there are no more; valid once full is closed
	reader []byte      // the buffer that the receiver has

	mu      sync.Mutex
	n       int64
	stopped bool
	end     chan struct{} // closed by stop
}

// Three buffers: one is filled, one is sent, and one more evens out that neither takes always equally long. Their size
// is that of the packets that libvirtd takes fastest.
const (
	readAheadBuffers = 3
	readAheadBytes   = uploadPacket
)

// startReadAhead begins to read r. Each read is reported to moved, until stop. The goroutine ends with r or after stop,
// but not before r.Read has returned: who stops early closes what r reads from.
func startReadAhead(r io.Reader, moved func(n int)) *readAhead {
	a := &readAhead{
		moved: moved,
		free:  make(chan []byte, readAheadBuffers), full: make(chan []byte), end: make(chan struct{}),
	}
	for range readAheadBuffers {
		a.free <- make([]byte, readAheadBytes)
	}
	go a.run(r)
	return a
}

// stop ends it at once, also a next under way. What is called moved will not be called any more.
func (a *readAhead) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.stopped {
		a.stopped = true
		close(a.end)
	}
}

// run is the goroutine.
func (a *readAhead) run(r io.Reader) {
	defer close(a.full)
	for a.err == nil {
		select {
		case buf := <-a.free:
			a.err = a.fill(r, buf)
		case <-a.end:
			a.err = io.ErrClosedPipe
		}
	}
}

// fill reads until the buffer is full, and hands it over.
func (a *readAhead) fill(r io.Reader, buf []byte) error {
	n := 0
	var err error
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
		if !a.add(m) {
			return io.ErrClosedPipe
		}
	}
	if n == 0 {
		return err
	}
	select {
	case a.full <- buf[:n]:
		return err
	case <-a.end:
		return io.ErrClosedPipe
	}
}

// add counts what was read, and reports whether to go on.
func (a *readAhead) add(n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.stopped {
		a.n += int64(n)
		a.moved(n)
	}
	return !a.stopped
}

// next returns the bytes that follow, which are valid until the next call; after the last ones the error of r.
func (a *readAhead) next() ([]byte, error) {
	if a.reader != nil {
		a.free <- a.reader[:cap(a.reader)] // never blocks: there is a place for each
		a.reader = nil
	}
	select {
	case buf, ok := <-a.full:
		if !ok {
			return nil, a.err
		}
		a.reader = buf
		return buf, nil
	case <-a.end:
		return nil, io.ErrClosedPipe
	}
}

// count is how many bytes have been read.
func (a *readAhead) count() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n
}
