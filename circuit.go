package kvm2

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// circuit keeps dials away from a host that cannot be reached. After a failed dial calls get its error at once until
// it is time for the next one; then one of them dials and the others still get the error: controllers poll, so a quick
// answer is worth more than a place in a queue.
type circuit struct {
	dial func(context.Context) (*session, error)

	mu       sync.Mutex
	failures int // in a row
	last     error
	since    time.Time // the first of them
	next     time.Time // not before this is dialed again
	probing  bool      // that dial is under way
}

// The wait after a first failed dial; it doubles with each further one. A daemon that restarts is back in a second. A
// host that refuses key or credential is asked less often, since accounts get locked; a mended key is taken within
// dialDelayMax all the same.
const (
	dialDelayTransient = 500 * time.Millisecond
	dialDelayPermanent = 5 * time.Second
	dialDelayMax       = 30 * time.Second
)

// open dials, unless the host is known to be down.
func (c *circuit) open(ctx context.Context) (*session, error) {
	seen, err := c.admit()
	if err != nil {
		return nil, err
	}
	concluded := false
	defer func() {
		if !concluded {
			c.abandon(seen) // the dialer panicked
		}
	}()
	start := time.Now()
	s, err := c.dial(ctx)
	concluded = true
	switch {
	case err == nil:
		c.succeed()
		return s, nil
	case ClassOf(err) == ClassTransient && gaveUpEarly(ctx, time.Since(start)):
		c.abandon(seen)
		return nil, err
	}
	return nil, c.fail(seen, err)
}

// dialPatience is how long a dial may take until a caller's deadline that ends it speaks against the host. Without it
// a frozen host would keep every caller whose deadline is shorter than the dial's.
const dialPatience = 5 * time.Second

// gaveUpEarly reports whether a caller ended a dial in a way that says nothing about the host.
func gaveUpEarly(ctx context.Context, took time.Duration) bool {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return took < dialPatience
	}
	return ctx.Err() != nil
}

// admit returns how many failures there were when the dial began, or the error that is given instead of a dial.
func (c *circuit) admit() (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures == 0 {
		return 0, nil
	}
	wait, next := time.Until(c.next), "being tried now"
	if wait > 0 {
		next = "next try in " + wait.Round(time.Millisecond).String()
	} else if !c.probing {
		c.probing = true
		return c.failures, nil
	}
	cause := fmt.Errorf("no connection since %s, %s: %w", c.since.UTC().Format(time.RFC3339), next, c.last)
	return 0, &Error{Class: ClassOf(c.last), Err: cause, after: wait}
}

func (c *circuit) succeed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures, c.last, c.probing = 0, nil, false
}

// abandon lets another call dial.
func (c *circuit) abandon(seen int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if seen == c.failures {
		c.probing = false
	}
}

// fail returns err with the time of the next dial. Dials that were under way together count as one failure.
func (c *circuit) fail(seen int, err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if seen == c.failures {
		if seen == 0 {
			c.since = time.Now()
		}
		c.failures++
		c.last, c.probing = err, false
		c.next = time.Now().Add(dialDelay(c.failures, ClassOf(err)))
	}
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return err
	}
	hinted := *e
	hinted.after = time.Until(c.next)
	return &hinted
}

// dialDelay is between a half and the whole of the doubled delay, so that many controllers do not dial in step.
func dialDelay(failures int, class Class) time.Duration {
	first := dialDelayTransient
	if class == ClassPermanent {
		first = dialDelayPermanent
	}
	whole := min(first<<min(failures-1, 10), dialDelayMax)
	return whole/2 + rand.N(whole/2) //nolint:gosec // jitter is no secret
}
