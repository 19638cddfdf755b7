package kvm2

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2/internal/sshdial"
)

// gatedDialer answers dials with what answer says, and counts them.
type gatedDialer struct {
	mu     sync.Mutex
	dials  int
	answer func(context.Context) (Conn, error)
}

func (d *gatedDialer) Dial(ctx context.Context) (Conn, error) {
	d.mu.Lock()
	d.dials++
	answer := d.answer
	d.mu.Unlock()
	return answer(ctx)
}

func (d *gatedDialer) set(answer func(context.Context) (Conn, error)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answer = answer
}

func (d *gatedDialer) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dials
}

func (d *gatedDialer) circuit() *circuit {
	dec := (&stubDialer{}).decorator(io.Discard)
	dec.next = d
	return &circuit{dial: dec.open}
}

func refuse(err error) func(context.Context) (Conn, error) {
	return func(context.Context) (Conn, error) { return nil, err }
}

func accept(context.Context) (Conn, error) { return &stubConn{}, nil }

func hang(ctx context.Context) (Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// pollFor opens every tenth of a second for some time.
func pollFor(ctx context.Context, c *circuit, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		_, _ = c.open(ctx)
	}
}

func TestCircuit_HostThatIsDownIsDialedSeldomAndAnsweredForAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("connection refused")
		d := &gatedDialer{answer: refuse(down)}
		c := d.circuit()
		pollFor(t.Context(), c, time.Hour)
		if n := d.count(); n < 60*60/30 || n > 250 {
			t.Errorf("%d dials in an hour, want one in 15 to 30 s", n)
		}
		before, start := d.count(), time.Now()
		_, err := c.open(t.Context())
		for ; err != nil && d.count() != before; _, err = c.open(t.Context()) { // it was just time for a dial
			before = d.count()
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("the answer took %s", took)
		}
		if ClassOf(err) != ClassTransient || !errors.Is(err, down) {
			t.Errorf("open() = %v (%s), want the error of the dial", err, ClassOf(err))
		}
		for _, want := range []string{"since 2000-01-01T00:00:00Z", "next try in "} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
		wait := RetryAfter(err)
		if wait < retryTransient || wait > dialDelayMax {
			t.Errorf("RetryAfter() = %s", wait)
		}
		d.set(accept)
		time.Sleep(wait)
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() after RetryAfter = %v", err)
		}
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() after a success = %v", err)
		}
	})
}

func TestCircuit_HostThatComesBackIsTakenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: refuse(errors.New("connection refused"))}
		c := d.circuit()
		_, _ = c.open(t.Context())
		d.set(accept)
		time.Sleep(dialDelayTransient)
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() = %v", err)
		}
	})
}

func TestCircuit_RefusedCredentialIsNotTriedByEachPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: refuse(&sshdial.AuthError{})}
		c := d.circuit()
		for range 1000 {
			_, err := c.open(t.Context())
			if ClassOf(err) != ClassPermanent || !errors.Is(err, ErrUnauthorized) || RetryAfter(err) != 0 {
				t.Fatalf("open() = %v (%s), want Permanent ErrUnauthorized without a hint", err, ClassOf(err))
			}
		}
		if n := d.count(); n != 1 {
			t.Errorf("1,000 polls made %d dials", n)
		}
		pollFor(t.Context(), c, time.Minute)
		if n := d.count(); n > 7 {
			t.Errorf("%d dials in a minute", n)
		}
		d.set(accept)
		time.Sleep(dialDelayMax)
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() with a mended key = %v", err)
		}
	})
}

func TestCircuit_OneDialAtATimeWhileDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: refuse(errors.New("connection refused"))}
		c := d.circuit()
		_, _ = c.open(t.Context())
		d.set(hang)
		time.Sleep(dialDelayTransient)
		var wg sync.WaitGroup
		var mu sync.Mutex
		quick, start := 0, time.Now()
		for range 100 {
			wg.Go(func() {
				if _, err := c.open(t.Context()); err != nil && time.Since(start) == 0 {
					mu.Lock()
					defer mu.Unlock()
					quick++
				}
			})
		}
		wg.Wait()
		if n := d.count(); n != 2 || quick != 99 {
			t.Errorf("%d dials and %d quick answers, want 2 and 99", n, quick)
		}
	})
}

func TestCircuit_DialsThatFailTogetherCountOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: hang}
		c := d.circuit()
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { _, _ = c.open(t.Context()) })
		}
		wg.Wait()
		d.set(accept)
		time.Sleep(dialDelayTransient)
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() = %v", err)
		}
	})
}

func TestCircuit_CallerThatGivesUpSaysNothingOfTheHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: hang}
		c := d.circuit()
		giveUp := func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, _ = c.open(ctx)
		}
		giveUp()
		d.set(accept)
		if _, err := c.open(t.Context()); err != nil {
			t.Fatalf("open() = %v", err)
		}
		d.set(refuse(errors.New("connection refused")))
		_, _ = c.open(t.Context())
		time.Sleep(dialDelayTransient)
		d.set(hang)
		giveUp() // the one dial that is allowed
		d.set(accept)
		if _, err := c.open(t.Context()); err != nil {
			t.Errorf("open() after the probe was given up = %v", err)
		}
	})
}

func TestCircuit_FrozenHostCountsAgainstShorterDeadlinesToo(t *testing.T) {
	withDeadline := func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, dialPatience)
	}
	tests := []struct {
		name  string
		limit func(context.Context) (context.Context, context.CancelFunc)
		dials int
		why   string
	}{
		{name: "deadline", limit: withDeadline, dials: 1},
		{
			name: "soon", dials: 2, why: "a second says nothing about a host",
			limit: func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, time.Second)
			},
		},
		{
			name: "cancelled", dials: 2, why: "whoever cancels has a reason of his own",
			limit: func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(2*dialPatience, cancel)
				return ctx, cancel
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &gatedDialer{answer: hang}
				c := d.circuit()
				for range 2 {
					ctx, cancel := tt.limit(t.Context())
					if _, err := c.open(ctx); ClassOf(err) != ClassTransient {
						t.Errorf("open() = %v (%s), want Transient", err, ClassOf(err))
					}
					cancel()
				}
				if n := d.count(); n != tt.dials {
					t.Errorf("%d dials, want %d; %s", n, tt.dials, tt.why)
				}
			})
		})
	}
}

func TestCircuit_RefusalCountsThoughTheCallerGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: func(ctx context.Context) (Conn, error) {
			<-ctx.Done()
			return nil, &sshdial.AuthError{}
		}}
		c := d.circuit()
		for range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			_, _ = c.open(ctx)
			cancel()
		}
		if n := d.count(); n != 1 {
			t.Errorf("a refused credential was tried %d times", n)
		}
	})
}

func TestCircuit_SaysWhenAnotherCallIsTrying(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: refuse(errors.New("connection refused"))}
		c := d.circuit()
		_, _ = c.open(t.Context())
		d.set(hang)
		time.Sleep(dialDelayTransient)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.open(t.Context()) })
		synctest.Wait()
		_, err := c.open(t.Context())
		if err == nil || !strings.Contains(err.Error(), "being tried now: kvm-1: dial: connection refused") {
			t.Errorf("open() = %v", err)
		}
		wg.Wait()
	})
}

func TestPool_CloseEndsWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gatedDialer{answer: hang}
		p := newConnPool(d.circuit().open, 1, time.Minute)
		errs := make(chan error, 2)
		for range cap(errs) { // one dials, one waits for a free place
			go func() { errs <- p.with(t.Context(), func(Conn) error { return nil }) }()
		}
		synctest.Wait()
		start := time.Now()
		p.close()
		for range cap(errs) {
			if err := <-errs; !errors.Is(err, ErrClosed) || ClassOf(err) != ClassPermanent {
				t.Errorf("with() = %v, want ErrClosed", err)
			}
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("Close left them waiting for %s", took)
		}
	})
}

// pingConn is a stubConn that can be asked whether its host answers.
type pingConn struct {
	stubConn
	pings  int
	frozen bool
}

func (c *pingConn) Ping(ctx context.Context) error {
	c.pings++
	if c.frozen {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func TestPool_ConnectionIsAskedAfterAPauseOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := &pingConn{}
		d := &gatedDialer{answer: func(context.Context) (Conn, error) { return conn, nil }}
		p := newConnPool(d.circuit().open, 4, time.Minute)
		defer p.close()
		use := func() {
			if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		for range 100 {
			use()
			time.Sleep(pingAfter - time.Second)
		}
		if conn.pings != 0 {
			t.Errorf("a connection in steady use was asked %d times", conn.pings)
		}
		time.Sleep(pingAfter)
		use()
		if conn.pings != 1 || d.count() != 1 {
			t.Errorf("after a pause: %d pings, %d dials; want 1 and 1", conn.pings, d.count())
		}
	})
}

func TestPool_FrozenHostIsNoticedAndDialedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var conns []*pingConn
		d := &gatedDialer{answer: func(context.Context) (Conn, error) {
			conns = append(conns, &pingConn{})
			return conns[len(conns)-1], nil
		}}
		p := newConnPool(d.circuit().open, 4, time.Minute)
		defer p.close()
		nested := func(fn func(Conn) error) error {
			return p.with(t.Context(), func(Conn) error { return p.with(t.Context(), fn) })
		}
		if err := nested(func(Conn) error { return nil }); err != nil {
			t.Fatal(err)
		}
		for _, c := range conns {
			c.frozen = true
		}
		time.Sleep(pingAfter)
		start := time.Now()
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Errorf("with() = %v", err)
		}
		if took := time.Since(start); took != pingTimeout {
			t.Errorf("it took %s, want %s: one question however many had frozen", took, pingTimeout)
		}
		if len(conns) != 3 || conns[0].closed.Load() != 1 || conns[1].closed.Load() != 1 {
			t.Errorf("%d connections; the frozen ones must be closed, and a third opened", len(conns))
		}
	})
}

func TestPool_CallerThatGivesUpLeavesTheOtherConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var conns []*pingConn
		d := &gatedDialer{answer: func(context.Context) (Conn, error) {
			conns = append(conns, &pingConn{})
			return conns[len(conns)-1], nil
		}}
		p := newConnPool(d.circuit().open, 4, time.Minute)
		defer p.close()
		err := p.with(t.Context(), func(Conn) error { return p.with(t.Context(), func(Conn) error { return nil }) })
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(pingAfter)
		conns[0].frozen = true // put back last, so asked first
		ctx, cancel := context.WithTimeout(t.Context(), pingTimeout/2)
		defer cancel()
		err = p.with(ctx, func(Conn) error { return nil })
		if !errors.Is(err, context.DeadlineExceeded) || ClassOf(err) != ClassTransient {
			t.Errorf("with() = %v (%s), want the caller's deadline", err, ClassOf(err))
		}
		if conns[0].closed.Load() != 1 || conns[1].closed.Load() != 0 || d.count() != 2 {
			t.Errorf("closed: %d and %d, dials: %d; want the one closed that was asked, the other kept, none dialed",
				conns[0].closed.Load(), conns[1].closed.Load(), d.count())
		}
	})
}

// A timer that fired while the free sessions were dropped comes late, when there may be another.
func TestPool_HasOneTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := (&stubDialer{}).pool(1, time.Minute)
		defer p.close()
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Fatal(err)
		}
		other := p.timer
		p.expire()
		if other.Stop() {
			t.Error("two timers run")
		}
	})
}

func TestPool_PanicEndsTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(1, time.Minute)
		defer p.close()
		func() {
			defer func() { _ = recover() }()
			_ = p.with(t.Context(), func(Conn) error { panic("in the middle of a call") })
		}()
		if n := d.closed(t); n != 1 {
			t.Errorf("%d connections closed, want the one that panicked", n)
		}
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Errorf("with() = %v", err)
		}
	})
}
