package fake

import (
	"context"
	"fmt"
	"time"

	"github.com/kvm2/kvm2"
)

// Fault makes calls go wrong. It strikes the calls that agree with all of Op, Object and Nth.
type Fault struct {
	// Op is the operation; empty means every operation.
	Op kvm2.Op
	// Object is the name of the domain, volume, pool or network, or a domain's UUID; empty means every object.
	Object string
	// Nth picks one call by Call.N; 0 means every call.
	Nth int
	// Skip lets so many of these calls pass first.
	Skip int
	// Times is how many calls are struck: 0 means one, Always all of them.
	Times int
	// When is whether the call does its work first. After it, the fault costs the caller only the reply.
	When When
	// Effect is what happens. It is required.
	Effect Effect
}

// Always as Fault.Times strikes without end.
const Always = -1

// When is whether a fault strikes before or after the call has done its work.
type When int

// The moments at which a fault can strike.
const (
	Before When = iota
	After
)

// Effect is what a Fault does to a call. Fail, FailWith, Drop, Hang, Delay, CutUpload and TruncateUpload make one.
type Effect struct {
	apply  func(context.Context, *conn) error
	upload *cut
}

// cut ends an upload early.
type cut struct {
	after  int64
	silent bool
}

// Fail makes libvirt answer with an error. The session stays good.
func Fail(code int, message string) Effect {
	return FailWith(&kvm2.LibvirtError{Code: code, Message: message})
}

// FailWith makes the call return err. Unless it is a *kvm2.LibvirtError the session is broken.
func FailWith(err error) Effect {
	return Effect{apply: func(context.Context, *conn) error { return err }}
}

// Drop loses the connection.
func Drop() Effect { return FailWith(errLost) }

// Hang makes the call wait until its context or its session ends.
func Hang() Effect {
	return Effect{apply: func(ctx context.Context, c *conn) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.done:
			return c.reason()
		}
	}}
}

// Delay makes the call take longer.
func Delay(d time.Duration) Effect {
	return Effect{apply: func(ctx context.Context, c *conn) error { return c.wait(ctx, d) }}
}

// CutUpload loses the connection once an upload has written so many bytes.
func CutUpload(after int64) Effect { return uploadEffect(cut{after: after}) }

// TruncateUpload throws away what an upload sends beyond so many bytes, and reports success.
func TruncateUpload(after int64) Effect { return uploadEffect(cut{after: after, silent: true}) }

func uploadEffect(c cut) Effect {
	return Effect{apply: func(context.Context, *conn) error { return nil }, upload: &c}
}

// ActiveFault is a fault that has been added to a Host.
type ActiveFault struct {
	host  *Host
	fault Fault

	// guarded by the host's mutex
	matched int
	struck  int
	removed bool
}

// AddFault adds a fault. Several may strike the same call, in the order in which they were added.
func (h *Host) AddFault(f Fault) *ActiveFault {
	if f.Effect.apply == nil {
		panic("fake: a Fault needs an Effect")
	}
	if f.Effect.upload != nil && (f.Op != kvm2.OpVolumeUpload || f.When != Before) {
		panic(fmt.Sprintf("fake: unsupported: this Effect needs Op %q and When Before", kvm2.OpVolumeUpload))
	}
	a := &ActiveFault{host: h, fault: f}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = append(h.faults, a)
	return a
}

// Reached reports whether the fault has struck at least once.
func (a *ActiveFault) Reached() bool { return a.Struck() > 0 }

// Struck returns how many calls the fault has struck.
func (a *ActiveFault) Struck() int {
	a.host.mu.Lock()
	defer a.host.mu.Unlock()
	return a.struck
}

// Remove ends the fault.
func (a *ActiveFault) Remove() {
	a.host.mu.Lock()
	defer a.host.mu.Unlock()
	a.removed = true
}

// Intercept has fn called before each call does its work, with all of the call that is known by then; nil takes it
// away. The call returns fn's error, if any, in place of its own; unless that is a *kvm2.LibvirtError the session is
// broken. fn may use the host's own methods.
func (h *Host) Intercept(fn func(Call) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.intercept = fn
}

// strikes decides about one call, and counts it.
func (a *ActiveFault) strikes(c Call) bool {
	if a.removed || !a.fault.matches(c) {
		return false
	}
	a.matched++
	if a.matched <= a.fault.Skip || a.fault.Times != Always && a.struck >= max(1, a.fault.Times) {
		return false
	}
	a.struck++
	return true
}

func (f Fault) matches(c Call) bool {
	op := f.Op == "" || f.Op == c.Op
	object := f.Object == "" || f.Object == c.Object || !c.UUID.IsZero() && f.Object == c.UUID.String()
	nth := f.Nth == 0 || f.Nth == c.N
	return op && object && nth
}

// uploadCut returns what is to cut an upload off, if anything.
func (p plan) uploadCut() *cut {
	for _, e := range p.before {
		if e.upload != nil {
			return e.upload
		}
	}
	return nil
}
