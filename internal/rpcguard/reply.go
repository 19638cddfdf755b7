package rpcguard

import (
	"bytes"
	"encoding/binary"
	"io"
	"math"
	"net"
)

// BoundReplies returns conn with replies checked on their way to the client,
// which allocates for an array or a string whatever length the reply claims: a
// reply of four bytes could end the process. A claim that the rest of the reply
// cannot hold is a [FrameError] and ends the connection. The memory that a reply
// takes is thus bounded by a small multiple of its own length.
//
// Replies to procedures with no layout here pass as they are.
func BoundReplies(conn *Conn) net.Conn { return &boundConn{Conn: conn} }

type boundConn struct {
	*Conn
	ready   bytes.Buffer // a header, and the payload if it is of a reply
	payload int64        // bytes of a frame of another kind still to come
}

// Read reads frames. It is called by one goroutine at a time, as Conn.Read is.
func (c *boundConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if c.ready.Len() == 0 && c.payload == 0 {
		if err := c.next(); err != nil {
			return 0, err
		}
	}
	if c.ready.Len() > 0 {
		return c.ready.Read(p)
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), c.payload)])
	c.payload -= int64(n)
	return n, err
}

// next reads a header, and for a reply all of the frame. The buffer grows with
// what arrives and not with what is announced.
func (c *boundConn) next() error {
	if c.ready.Cap() > keepBuffer {
		c.ready = bytes.Buffer{}
	}
	c.ready.Reset()
	if _, err := io.CopyN(&c.ready, c.Conn, headerLen); err != nil {
		return c.fail(err)
	}
	h := parseHeader(c.ready.Bytes())
	if h.typ != typeReply {
		c.payload = int64(h.payload())
		return nil
	}
	if _, err := io.CopyN(&c.ready, c.Conn, int64(h.payload())); err != nil {
		return c.fail(err)
	}
	w := walker{rest: c.ready.Bytes()[headerLen:]}
	w.reply(h)
	if w.overclaims {
		c.ready.Reset()
		return c.fail(h.error("a reply that claims more than it holds"))
	}
	return nil
}

// keepBuffer is how much a connection keeps for the next reply.
const keepBuffer = 1 << 20

// walker follows the layout of a reply as the client decodes it. It judges
// lengths only; at the first thing that is wrong otherwise it stops, for the
// client stops there too.
type walker struct {
	rest       []byte
	overclaims bool
}

func (w *walker) stop() { w.rest = nil }

func (w *walker) skip(n int) {
	if n > len(w.rest) {
		w.stop()
		return
	}
	w.rest = w.rest[n:]
}

func (w *walker) word() uint32 {
	if len(w.rest) < 4 {
		w.stop()
		return 0
	}
	v := binary.BigEndian.Uint32(w.rest)
	w.rest = w.rest[4:]
	return v
}

// claim reads a length, of things that take least bytes each on the wire.
func (w *walker) claim(least int) int {
	n := w.word()
	if n > math.MaxInt32 || int64(n)*int64(least) > int64(len(w.rest)) {
		w.overclaims = true
		w.stop()
		return 0
	}
	return int(n)
}

func (w *walker) strings(count int) {
	for range count {
		n := w.claim(1)
		w.skip(n + (4-n%4)%4)
	}
}

func (w *walker) each(least int, element func()) {
	for range w.claim(least) {
		element()
	}
}

// optional is a string or none: an array of strings, to the client.
func (w *walker) optional() { w.each(4, func() { w.strings(1) }) }

// reply walks a reply. The layouts are those of src/remote/remote_protocol.x.
func (w *walker) reply(h header) {
	if h.status == statusError {
		whole := w.rest
		code := w.failure()
		if code != 0 {
			return
		}
		w.rest = whole // an error with the code of success: the client decodes it once more, as a result
	}
	w.result(h)
}

// failure walks remote_error as far as the client reads it, and returns its code.
func (w *walker) failure() uint32 {
	code := w.word()
	w.skip(8)
	w.strings(1)
	return code
}

func (w *walker) result(h header) {
	if h.program != remoteProgram {
		return
	}
	switch h.procedure {
	case 66: // AUTH_LIST
		w.each(4, func() { w.skip(4) })
	case 7, 59, 88, 99, 265, // capabilities, host name, XML of pool and volume, metadata
		23, 24, 350, // domains
		46, 84: // network, pool
		w.strings(1)
	case 93: // a volume
		w.strings(3)
	case 282: // STORAGE_POOL_LIST_ALL_VOLUMES
		w.each(12, func() { w.strings(3) })
	case 341: // NETWORK_GET_DHCP_LEASES
		w.each(40, w.lease)
	case 344: // CONNECT_GET_ALL_DOMAIN_STATS
		w.each(28, func() {
			w.strings(1)
			w.skip(20)
			w.each(12, w.typedParam)
		})
	case 353: // DOMAIN_INTERFACE_ADDRESSES
		w.each(12, func() {
			w.strings(1)
			w.optional()
			w.each(12, func() {
				w.skip(4)
				w.strings(1)
				w.skip(4)
			})
		})
	}
}

func (w *walker) lease() {
	w.strings(1)
	w.skip(12)
	w.optional()
	w.optional()
	w.strings(1)
	w.skip(4)
	w.optional()
	w.optional()
}

// typedParam is a name and a value of one of the types of virTypedParameterType.
func (w *walker) typedParam() {
	w.strings(1)
	switch w.word() {
	case 1, 2, 6: // int, uint, boolean
		w.skip(4)
	case 3, 4, 5: // llong, ullong, double
		w.skip(8)
	case 7:
		w.strings(1)
	default:
		w.stop()
	}
}
