package sshdial

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// conn is an SSH channel that owns all that it rests on.
type conn struct {
	net.Conn // the channel
	route    *route

	// life ends with the connection; its cause is what Read and Write report then.
	life context.Context
	end  context.CancelCauseFunc

	keepalive sync.WaitGroup
}

func newConn(channel net.Conn, r *route, cfg Config) *conn {
	c := &conn{Conn: channel, route: r}
	c.life, c.end = context.WithCancelCause(context.Background())
	if cfg.KeepaliveInterval > 0 {
		k := &keepalive{
			client:   r.client,
			heard:    &r.metered.received,
			interval: cfg.KeepaliveInterval,
			count:    cfg.KeepaliveCount,
		}
		c.keepalive.Go(func() {
			if err := k.watch(c.life.Done()); err != nil {
				c.end(err) // before the close, which makes Read return
				_ = r.tcp.Close()
			}
			k.probes.Wait()
		})
	}
	return c
}

// Read reads from the socket.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	return n, c.reason(err)
}

// Write writes to the socket.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	return n, c.reason(err)
}

// reason returns the cause of the connection's end in place of err, if it has
// ended here: the channel just says io.EOF.
func (c *conn) reason(err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(c.life); cause != nil {
		return cause
	}
	return err
}

// Close closes the TCP connection, and with it all that rests on it. It sends
// nothing: a host that has frozen could block that.
func (c *conn) Close() error {
	c.end(net.ErrClosed)
	err := c.route.tcp.Close()
	c.keepalive.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// SetDeadline returns os.ErrNoDeadline.
func (c *conn) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline returns os.ErrNoDeadline.
func (c *conn) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline returns os.ErrNoDeadline.
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// meteredConn counts what is heard from the peer.
type meteredConn struct {
	net.Conn
	received atomic.Uint64
}

// Read reads and counts.
func (c *meteredConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(uint64(n))
	return n, err
}
