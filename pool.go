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
	return &connPool{open: open, slots: make(chan struct{}, size), idle: idle}
}

// with runs fn on a session of its own.
func (p *connPool) with(ctx context.Context, fn func(Conn) error) error {
	s, err := p.take(ctx)
	if err != nil {
		return err
	}
	defer p.put(s)
	return fn(s)
}

func (p *connPool) take(ctx context.Context) (*session, error) {
	if err := ctx.Err(); err != nil {
		return nil, transient(nil, "%w", err)
	}
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, transient(nil, "waiting for a free connection: %w", ctx.Err())
	}
	s, err := p.reuseOrOpen(ctx)
	if err != nil {
		<-p.slots
		return nil, err
	}
	return s, nil
}

func (p *connPool) reuseOrOpen(ctx context.Context) (*session, error) {
	for {
		s, err := p.reuse()
		if err != nil {
			return nil, err
		}
		if s == nil {
			return p.open(ctx)
		}
		if s.alive() {
			return s, nil
		}
		_ = s.Close() // it ended while nobody used it
	}
}

// reuse takes the session that was used last; nil when none is free.
func (p *connPool) reuse() (*session, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, permanent(ErrClosed, "no connection can be opened")
	}
	if len(p.free) == 0 {
		return nil, nil //nolint:nilnil // no session and no error means: open one
	}
	last := len(p.free) - 1
	s := p.free[last].session
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
	p.timer = nil
	if len(p.free) > 0 && !p.closed {
		p.timer = time.AfterFunc(p.idle-now.Sub(p.free[0].since), p.expire)
	}
	p.mu.Unlock()
	for _, s := range old {
		_ = s.Close()
	}
}

// close closes the free sessions; those in use are closed when they are put back.
func (p *connPool) close() {
	p.mu.Lock()
	free := p.free
	p.free, p.closed = nil, true
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	p.mu.Unlock()
	for _, s := range free {
		_ = s.Close()
	}
}
