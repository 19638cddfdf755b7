package kvm2

import (
	"context"
	"sync"
	"time"
)

// connPool keeps sessions for reuse. An operation has a session to itself; one that broke is closed, never reused.
type connPool struct {
	open  func(context.Context) (*session, error)
	slots chan struct{} // one token for each session that may be open
	idle  time.Duration // how long an unused session is kept

	ctx    context.Context // over when the pool is closed
	cancel context.CancelFunc

	mu     sync.Mutex
	free   []idleSession // the most recently used last
	timer  *time.Timer   // closes what has been idle too long; nil while nothing is free
	closed bool
}

type idleSession struct {
	*session
	since time.Time
}

func newConnPool(open func(context.Context) (*session, error), size int, idle time.Duration) *connPool {
	p := &connPool{open: open, slots: make(chan struct{}, size), idle: idle}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// with runs fn on a session of its own.
func (p *connPool) with(ctx context.Context, fn func(Conn) error) error {
	s, err := p.take(ctx)
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // fn panicked, perhaps in the middle of a call
			s.broken = true
		}
		p.put(s)
	}()
	err = fn(s)
	returned = true
	return err
}

func (p *connPool) take(ctx context.Context) (*session, error) {
	if err := ctx.Err(); err != nil {
		return nil, transient(nil, "%w", err)
	}
	select {
	case p.slots <- struct{}{}:
	case <-p.ctx.Done():
		return nil, errPoolClosed()
	case <-ctx.Done():
		return nil, transient(nil, "waiting for a free connection: %w", ctx.Err())
	}
	opened := false
	defer func() {
		if !opened {
			<-p.slots
		}
	}()
	s, err := p.reuseOrOpen(ctx)
	opened = err == nil
	return s, err
}

// reuseOrOpen ends with the pool as well as with the context.
func (p *connPool) reuseOrOpen(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	for {
		free, err := p.reuse()
		if err != nil {
			return nil, err
		}
		if free.session == nil {
			return p.openUnlessClosed(ctx)
		}
		if !free.alive() {
			_ = free.Close() // it ended while nobody used it
			continue
		}
		if time.Since(free.since) < pingAfter || free.ping(ctx) == nil {
			return free.session, nil
		}
		_ = free.Close()
		if p.ctx.Err() != nil {
			return nil, errPoolClosed()
		}
		if err := ctx.Err(); err != nil { // the caller gave up, which says nothing about the others
			return nil, transient(nil, "asking whether the host still answers: %w", err)
		}
		p.dropFree() // what froze one has frozen the others, and asking each would take long
	}
}

// A session that was not used for pingAfter is asked whether its host still answers, and given pingTimeout for it: a
// host that froze or vanished has not closed the connection. One in steady use is not asked.
const (
	pingAfter   = 10 * time.Second
	pingTimeout = 3 * time.Second
)

func (p *connPool) openUnlessClosed(ctx context.Context) (*session, error) {
	s, err := p.open(ctx)
	if p.ctx.Err() == nil {
		return s, err
	}
	if err == nil {
		_ = s.Close()
	}
	return nil, errPoolClosed()
}

func errPoolClosed() error { return permanent(ErrClosed, "no connection can be opened") }

// reuse takes the session that was used last; one without session when none is free.
func (p *connPool) reuse() (idleSession, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return idleSession{}, errPoolClosed()
	}
	if len(p.free) == 0 {
		return idleSession{}, nil
	}
	last := len(p.free) - 1
	s := p.free[last]
	p.free = p.free[:last]
	return s, nil
}

func (p *connPool) put(s *session) {
	defer func() { <-p.slots }()
	if s.broken || !p.keep(s) {
		_ = s.Close() // nothing can be done about a session that does not close
	}
}

// keep stores the session for reuse; false when the pool is closed.
func (p *connPool) keep(s *session) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.free = append(p.free, idleSession{s, time.Now()})
	if p.timer == nil {
		p.timer = time.AfterFunc(p.idle, p.expire)
	}
	return true
}

// expire closes the sessions that have been free for the idle time, and comes again while others remain.
func (p *connPool) expire() {
	p.mu.Lock()
	var old []idleSession
	now := time.Now()
	for len(p.free) > 0 && now.Sub(p.free[0].since) >= p.idle {
		old, p.free = append(old, p.free[0]), p.free[1:]
	}
	if p.timer != nil {
		p.timer.Stop() // another one, if what was free went while this waited for the lock
		p.timer = nil
	}
	if len(p.free) > 0 && !p.closed {
		p.timer = time.AfterFunc(p.idle-now.Sub(p.free[0].since), p.expire)
	}
	p.mu.Unlock()
	for _, s := range old {
		_ = s.Close()
	}
}

// close ends all waiting and closes the free sessions; those in use are closed when they are put back.
func (p *connPool) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.dropFree()
}

// dropFree closes the free sessions.
func (p *connPool) dropFree() {
	p.mu.Lock()
	free := p.free
	p.free = nil
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	p.mu.Unlock()
	for _, s := range free {
		_ = s.Close()
	}
}
