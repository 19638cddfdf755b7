package fake

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvm2/kvm2"
)

// Call is one call that a host received, as the log keeps it.
type Call struct {
	// N counts the host's calls from 1, dials included.
	N int
	// Session is the session that the call came over; sessions count from 1.
	Session int
	// Op is the operation.
	Op kvm2.Op
	// Pool is the storage pool of a volume operation.
	Pool string
	// Object is the name of the domain, volume, pool or network; the UUID of a domain that does not exist.
	Object string
	// UUID is the domain's UUID, where the call gave one.
	UUID kvm2.UUID
	// Detail summarises the other arguments. It never holds content.
	Detail string
	// Bytes and SHA256 are how much an upload or a download moved, and the digest of it in hexadecimal.
	Bytes  int64
	SHA256 string
	// Err is what the call returned.
	Err error
}

// String returns the call in one line.
func (c Call) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "#%d session %d %s", c.N, c.Session, c.Op)
	if c.Object != "" || c.Pool != "" {
		fmt.Fprintf(&b, " %s", strings.TrimPrefix(c.Pool+"/"+c.Object, "/"))
	}
	if c.Detail != "" {
		fmt.Fprintf(&b, " (%s)", c.Detail)
	}
	if c.SHA256 != "" {
		fmt.Fprintf(&b, " %d bytes sha256:%s", c.Bytes, c.SHA256)
	}
	if c.Err != nil {
		fmt.Fprintf(&b, ": %v", c.Err)
	}
	return b.String()
}

// plan is what is to happen to one call.
type plan struct {
	n      int
	before []Effect
	after  []Effect
}

// run takes one call through the host: its faults, its latency, and in the end its effect.
func run[T any](ctx context.Context, c *conn, call Call, effect func(plan) (T, error)) (T, error) {
	var zero T
	if err := c.enter(); err != nil {
		return zero, err
	}
	defer c.leave()
	if err := ctx.Err(); err != nil {
		return zero, c.fail(err)
	}
	p, veto := c.host.announce(c, call)
	v, err := perform(ctx, c, p, veto, effect)
	c.host.conclude(p.n, err)
	if err != nil {
		return zero, c.fail(err)
	}
	return v, nil
}

func perform[T any](ctx context.Context, c *conn, p plan, veto error, effect func(plan) (T, error)) (T, error) {
	var zero T
	if err := c.wait(ctx, c.host.settings.latency); err != nil {
		return zero, err
	}
	if veto != nil {
		return zero, veto
	}
	for _, e := range p.before {
		if err := e.apply(ctx, c); err != nil {
			return zero, err
		}
	}
	v, err := effect(p)
	for _, e := range p.after {
		if lost := e.apply(ctx, c); lost != nil {
			return zero, lost
		}
	}
	return v, err
}

// announce writes the call down, and decides what befalls it.
func (h *Host) announce(c *conn, call Call) (plan, error) {
	h.mu.Lock()
	if call.Op == kvm2.OpDial {
		h.stats.Sessions++
		c.number = h.stats.Sessions
	}
	if d := h.domains[call.UUID]; d != nil {
		call.Object = d.name
	} else if !call.UUID.IsZero() {
		call.Object = call.UUID.String()
	}
	h.stats.Calls++
	call.N, call.Session = h.stats.Calls, c.number
	h.calls = append(h.calls, call)
	p := plan{n: call.N}
	for _, f := range h.faults {
		if !f.strikes(call) {
			continue
		}
		if f.fault.When == After {
			p.after = append(p.after, f.fault.Effect)
		} else {
			p.before = append(p.before, f.fault.Effect)
		}
	}
	intercept := h.intercept
	h.mu.Unlock()
	if intercept == nil {
		return p, nil
	}
	return p, intercept(call)
}

func (h *Host) conclude(n int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls[n-1].Err = err
}

// note adds to the log what is only known once the call is done.
func (h *Host) note(n int, edit func(*Call)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	edit(&h.calls[n-1])
}

// isAnswer reports whether an error is one that libvirt itself gives.
func isAnswer(err error) bool {
	_, ok := errors.AsType[*kvm2.LibvirtError](err)
	return ok
}

// wait returns after d, or with the reason for which the call cannot go on.
func (c *conn) wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return c.over(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.reason()
	}
}

// over returns the reason for which a call cannot go on; nil while it can.
func (c *conn) over(ctx context.Context) error {
	select {
	case <-c.done:
		return c.reason()
	default:
		return ctx.Err()
	}
}
