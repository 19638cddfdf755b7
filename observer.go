package kvm2

import "time"

// Observer is told of every call to the host, for metrics: how many, how long, which errors (ClassOf), how many bytes.
// CallObserved is called by many goroutines at once, after each call and before its caller goes on, so it must be
// quick.
type Observer interface {
	CallObserved(CallEvent)
}

// CallEvent is one finished call to a host.
type CallEvent struct {
	// Host is the host's name, Op the operation. Both are fit to be labels: there are few of them. OpDial is a
	// connection that was opened or failed to; dials that were put off because the host is down are no calls.
	Host string
	Op   Op
	// Duration is the time from request to answer.
	Duration time.Duration
	// Err is nil for success. ClassOf(Err) is a label; its text is not.
	Err error
	// BytesSent and BytesReceived were on the wire during the call, RPC headers included and SSH's own bytes not. They
	// are 0 where the Conn cannot tell.
	BytesSent     uint64
	BytesReceived uint64
}

// WithObserver sets who is told of the calls to the host.
func WithObserver(o Observer) Option { return func(opts *options) { opts.observer = o } }

// traffic counts the bytes of a connection since it was opened.
type traffic struct{ sent, received uint64 }

// trafficOf is zero for a Conn that does not count, and for none.
func trafficOf(conn Conn) traffic {
	c, ok := conn.(interface{ traffic() traffic })
	if !ok {
		return traffic{}
	}
	return c.traffic()
}

func (c *libvirtConn) traffic() traffic {
	s := c.net.Stats()
	return traffic{sent: s.BytesOut, received: s.BytesIn}
}
