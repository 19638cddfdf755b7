// Package rpcguard puts a wall between a libvirt host and the go-libvirt
// client: a [Conn] wraps the net.Conn under the client, follows the framing of
// libvirt's RPC in both directions, and lets nothing through that the client
// cannot bear.
//
// The client reads in a goroutine of its own, where it believes what it is
// told. A frame shorter than its header panics there and ends the process. A
// frame it hands to a caller who is no longer listening blocks that goroutine
// for good while it holds the client's lock, and no Close gets it out. So the
// guard checks each header before the client sees a byte of it:
//
//   - A length outside the bounds of the protocol is a [FrameError].
//   - A reply must answer a call that is outstanding and fully written, with
//     the program, version and procedure of the call; each call has one. Any
//     other reply is a FrameError: libvirt's own client gives up on it too
//     (virNetClientCallDispatchReply).
//   - A stream ends with its first end marker: status OK, status ERROR, or an
//     empty data packet. What follows for that stream is dropped, and so is a
//     packet for a stream that does not exist. libvirt's own client does the
//     same (virNetClientCallDispatchStream), and it has to: a daemon whose write
//     fails while the client's finish request is already queued sends the error
//     and then confirms the finish.
//   - A message without a call (an event, a keepalive ping) is dropped. The
//     client decodes events in its read goroutine and takes unknown ones for
//     replies; kvm2 subscribes to none. It does not answer pings either, and a
//     daemon sends them only to a client that declared the keepalive feature
//     (VIR_DRV_FEATURE_PROGRAM_KEEPALIVE), which this one never does.
//   - Every error ends the connection and is repeated from then on, so that the
//     client, which retries what a net.OpError calls temporary, stops.
//
// Payloads are not stored: they go straight into the reader's buffer, and
// writes are passed on as they come. [BoundReplies], which goes on top, stores
// replies, but no stream packets: the client would allocate whatever length a
// reply claims. One thing the guard cannot prevent: a
// stream whose local Writer fails leaves the client deaf to the packets still
// to come. Give it Writers that do not fail.
//
// The wire format is described in libvirt's docs/kbase/internals/rpc and
// src/rpc/virnetprotocol.x.
package rpcguard
