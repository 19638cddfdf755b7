package rpcguard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Conn is a net.Conn that carries libvirt RPC and passes on only what the
// client can take; the package comment lists the rules. Reads must come from
// one goroutine at a time, as go-libvirt's do. Everything else is safe for
// concurrent use.
type Conn struct {
	net.Conn

	in  inbound // of the reading goroutine
	wmu sync.Mutex
	out outbound // guarded by wmu

	mu    sync.Mutex
	moved sync.Cond        // a call has been written out, or err is set
	calls map[uint32]*call // by serial; guarded by mu
	err   error            // why the connection ended; guarded by mu

	closeOnce sync.Once

	bytesIn, bytesOut, sent, replies, dropped atomic.Uint64
}

// Stats counts the traffic of a connection.
type Stats struct {
	// BytesIn and BytesOut are bytes on the wire, headers included.
	BytesIn, BytesOut uint64
	// Calls counts calls that were written, Replies the answers to them that
	// were passed on. A reply is one completed round trip.
	Calls, Replies uint64
	// Dropped counts frames that were legal but not passed on: surplus stream
	// packets, events and keepalives.
	Dropped uint64
}

// call is a call the client has started to write and the host has not answered
// for good.
type call struct {
	program, version, procedure uint32
	phase                       phase
}

type phase int

const (
	writing   phase = iota // not all of it has been handed to the connection
	waiting                // for the reply
	streaming              // replied to; stream packets may follow
)

// New returns a guard around conn, and takes it over: the guard closes it on
// the first error.
func New(conn net.Conn) *Conn {
	c := &Conn{Conn: conn, calls: make(map[uint32]*call)}
	c.moved.L = &c.mu
	return c
}

// Stats returns the counts so far.
func (c *Conn) Stats() Stats {
	return Stats{
		BytesIn:  c.bytesIn.Load(),
		BytesOut: c.bytesOut.Load(),
		Calls:    c.sent.Load(),
		Replies:  c.replies.Load(),
		Dropped:  c.dropped.Load(),
	}
}

// Err returns the error that ended the connection, and nil while it lasts. It
// is what the client's own error (an interrupted call) does not tell: a
// *FrameError, io.EOF when the host closed the connection between two frames,
// io.ErrUnexpectedEOF when within one, net.ErrClosed after Close.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close closes the connection under the guard. Calls after the first do nothing
// and return nil, for both the guard and the client close.
func (c *Conn) Close() error {
	return c.end(net.ErrClosed)
}

// end makes cause the reason the connection ended, unless there is one already,
// and closes it.
func (c *Conn) end(cause error) error {
	c.mu.Lock()
	if c.err == nil {
		c.err = cause
		c.moved.Broadcast()
	}
	c.mu.Unlock()

	var err error
	c.closeOnce.Do(func() { err = c.Conn.Close() })
	return err
}

// fail ends the connection because of cause and returns the reason it ended,
// which is an earlier one if there was one.
func (c *Conn) fail(cause error) error {
	_ = c.end(cause)
	return c.Err()
}

// inbound is the state of the parser of what the host sends.
type inbound struct {
	ready   []byte // of head: an admitted header the reader has still to get
	payload uint32 // bytes of the current frame still to come
	drop    bool   // the current frame is not passed on
	have    int    // bytes in head of a header that is not complete
	head    [headerLen]byte
}

// Read reads frames that have passed the guard. Its errors are final.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if n := copy(p, c.in.ready); n > 0 {
			c.in.ready = c.in.ready[n:]
			return n, nil
		}
		if err := c.Err(); err != nil {
			return 0, err
		}
		n, err := c.fill(p)
		if err != nil {
			_ = c.end(err)
		}
		if n > 0 {
			return n, nil
		}
	}
}

// fill reads from the connection once. It returns how many bytes at the start
// of p may be passed on, which can be none.
func (c *Conn) fill(p []byte) (int, error) {
	in := &c.in
	if in.have > 0 || in.payload == 0 && len(p) < headerLen {
		n, err := c.receive(in.head[in.have:])
		in.have += n
		if frameErr := c.finishHeader(); frameErr != nil {
			return 0, frameErr
		}
		return 0, c.readError(err)
	}
	if len(p) < headerLen {
		p = p[:min(len(p), int(in.payload))]
	}
	n, err := c.receive(p)
	n, frameErr := c.sift(p[:n])
	if frameErr != nil {
		return n, frameErr
	}
	return n, c.readError(err)
}

// receive reads from the connection under the guard.
func (c *Conn) receive(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.bytesIn.Add(uint64(n))
	return n, err
}

// readError returns err in the form the client gets to see. It is never a bare
// *net.OpError, which the client may call temporary and retry without end.
func (c *Conn) readError(err error) error {
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("libvirt RPC: read: %w", err)
	case c.in.have > 0 || c.in.payload > 0:
		return io.ErrUnexpectedEOF
	}
	return io.EOF
}

// sift checks the headers in b, which starts where the parser stands, and moves
// what may be passed on to the start of b. It returns its length. A header that
// b holds only a part of is kept back.
func (c *Conn) sift(b []byte) (int, error) {
	in := &c.in
	kept := 0
	for pos := 0; pos < len(b); {
		n := min(len(b)-pos, int(in.payload))
		if n == 0 {
			if len(b)-pos < headerLen {
				in.have = copy(in.head[:], b[pos:])
				return kept, c.finishHeader()
			}
			if err := c.startFrame(parseHeader(b[pos:])); err != nil {
				return kept, err
			}
			n = headerLen
		} else {
			in.payload -= uint32(n)
		}
		if !in.drop {
			if kept != pos {
				copy(b[kept:], b[pos:pos+n])
			}
			kept += n
		}
		pos += n
	}
	return kept, nil
}

// finishHeader acts on the header in head as far as it is there. The length is
// judged as soon as it is known: a host that sends a bad one and then nothing
// must not keep the client waiting.
func (c *Conn) finishHeader() error {
	in := &c.in
	if in.have >= 4 {
		if err := checkLength(binary.BigEndian.Uint32(in.head[:])); err != nil {
			return err
		}
	}
	if in.have < headerLen {
		return nil
	}
	in.have = 0
	if err := c.startFrame(parseHeader(in.head[:])); err != nil {
		return err
	}
	if !in.drop {
		in.ready = in.head[:]
	}
	return nil
}

// startFrame decides what becomes of the frame that h begins.
func (c *Conn) startFrame(h header) error {
	if err := checkLength(h.length); err != nil {
		return err
	}
	pass, err := c.admit(h)
	if err != nil {
		return err
	}
	if !pass {
		c.dropped.Add(1)
	}
	c.in.payload, c.in.drop = h.payload(), !pass
	return nil
}

// admit reports whether a frame may be passed on. An error ends the connection.
func (c *Conn) admit(h header) (bool, error) {
	switch h.typ {
	case typeReply:
		return true, c.admitReply(h)
	case typeStream:
		return c.admitStream(h)
	case typeMessage:
		return false, nil
	}
	return false, h.error("a message type that no daemon sends to this client")
}

// admitReply returns an error unless h is the one reply to an outstanding call.
func (c *Conn) admitReply(h header) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	k := c.calls[h.serial]
	// An honest reply to a call that is still being written can only mean that
	// Write has not returned yet. If it fails, the client drops the call and must
	// not get a reply to it any more.
	for k != nil && k.phase == writing && c.err == nil {
		c.moved.Wait()
	}
	switch {
	case c.err != nil:
		return c.err
	case k == nil:
		return h.error("a reply to no outstanding call")
	case k.phase == streaming:
		return h.error("a second reply to a call")
	case !k.matches(h):
		return h.error("a reply with the program, version or procedure of another call")
	case h.status != statusOK && h.status != statusError:
		return h.error("a reply with a status that replies do not have")
	}
	if h.status == statusOK && opensStream(h.program, h.procedure) {
		k.phase = streaming
	} else {
		delete(c.calls, h.serial)
	}
	c.replies.Add(1)
	return nil
}

// admitStream reports whether a stream packet belongs to a stream that the
// client still listens to.
func (c *Conn) admitStream(h header) (bool, error) {
	if h.status != statusOK && h.status != statusError && h.status != statusContinue {
		return false, h.error("a stream packet with an unknown status")
	}
	c.mu.Lock()
	defer c.mu.Unlock()

	k := c.calls[h.serial]
	switch {
	case k == nil:
		return false, nil
	case k.phase != streaming:
		return false, h.error("a stream packet for a call without a reply")
	case !k.matches(h):
		return false, h.error("a stream packet with the program, version or procedure of another call")
	}
	// An empty data packet is how a daemon says end of file.
	if h.status != statusContinue || h.payload() == 0 {
		delete(c.calls, h.serial)
	}
	return true, nil
}

// matches reports whether h names the procedure of the call.
func (k *call) matches(h header) bool {
	return k.program == h.program && k.version == h.version && k.procedure == h.procedure
}

// outbound is the state of the parser of what the client sends.
type outbound struct {
	payload uint32  // bytes of the current frame still to come
	current *call   // the call being written, nil for another kind of frame
	whole   []*call // the calls that the current Write completes
	have    int     // bytes in head of a header that is not complete
	head    [headerLen]byte
}

// Write passes p on as it is. After an error the connection is closed, for the
// host may have got a part of a frame.
func (c *Conn) Write(p []byte) (int, error) {
	c.wmu.Lock()
	defer c.wmu.Unlock()

	if err := c.Err(); err != nil {
		return 0, err
	}
	if err := c.track(p); err != nil {
		return 0, c.fail(err)
	}
	n, err := c.Conn.Write(p)
	c.bytesOut.Add(uint64(n))
	if err != nil {
		return n, c.fail(fmt.Errorf("libvirt RPC: write: %w", err))
	}
	c.release()
	return n, nil
}

// track follows the frames in p and registers the calls among them.
func (c *Conn) track(p []byte) error {
	out := &c.out
	out.whole = out.whole[:0]
	for len(p) > 0 {
		if out.payload == 0 {
			n := copy(out.head[out.have:], p)
			p = p[n:]
			if out.have += n; out.have < headerLen {
				return nil
			}
			out.have = 0
			if err := c.register(parseHeader(out.head[:])); err != nil {
				return err
			}
		}
		n := min(len(p), int(out.payload))
		out.payload -= uint32(n)
		p = p[n:]
		if out.payload == 0 && out.current != nil {
			out.whole = append(out.whole, out.current)
			out.current = nil
		}
	}
	return nil
}

// register begins an outgoing frame.
func (c *Conn) register(h header) error {
	if err := checkLength(h.length); err != nil {
		return err
	}
	c.out.payload = h.payload()
	if h.typ != typeCall {
		return nil
	}
	c.out.current = &call{program: h.program, version: h.version, procedure: h.procedure}
	c.mu.Lock()
	c.calls[h.serial] = c.out.current
	c.mu.Unlock()
	return nil
}

// release lets the replies to the calls that have now been written pass.
func (c *Conn) release() {
	if len(c.out.whole) == 0 {
		return
	}
	c.sent.Add(uint64(len(c.out.whole)))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.out.whole {
		k.phase = waiting
	}
	c.moved.Broadcast()
}
