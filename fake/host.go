package fake

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"

	"github.com/kvm2/kvm2"
)

// Host is an in-memory libvirt host. It implements kvm2.Dialer and is safe for concurrent use; each session that it
// opens is, like any kvm2.Conn, for one goroutine at a time.
type Host struct {
	settings settings // fixed once NewHost has returned

	mu        sync.Mutex // guards everything below
	pools     map[string]*pool
	networks  map[string]*network
	domains   map[kvm2.UUID]*domain
	byName    map[string]*domain
	agenda    agenda
	conns     map[*conn]struct{}
	faults    []*ActiveFault
	intercept func(Call) error
	calls     []Call
	stats     Stats
	random    *rand.Rand
	inodes    int64
	closed    bool
}

var _ kvm2.Dialer = (*Host)(nil)

// NewHost returns a host with one active storage pool and one active network, both called "default", unless options
// say otherwise.
func NewHost(opts ...Option) *Host {
	s := defaults()
	for _, opt := range opts {
		opt(&s)
	}
	h := &Host{
		settings: s,
		pools:    map[string]*pool{},
		networks: map[string]*network{},
		domains:  map[kvm2.UUID]*domain{},
		byName:   map[string]*domain{},
		conns:    map[*conn]struct{}{},
		random:   rand.New(rand.NewPCG(s.seed, s.seed)), //nolint:gosec // it is to be repeatable
	}
	for _, p := range s.pools {
		h.pools[p.name] = newPool(p)
	}
	for _, n := range s.networks {
		h.networks[n.name] = newNetwork(n)
	}
	return h
}

// errHostClosed is what a Host says after Close.
var errHostClosed = errors.New("fake: the host is closed")

// Dial opens a session.
func (h *Host) Dial(ctx context.Context) (kvm2.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c := h.newConn()
	_, err := run(ctx, c, Call{Op: kvm2.OpDial}, func(plan) (struct{}, error) { return struct{}{}, h.admit(c) })
	if err != nil {
		c.end(err)
		return nil, err
	}
	return c, nil
}

func (h *Host) admit(c *conn) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errHostClosed
	}
	h.stats.Dials++
	h.conns[c] = struct{}{}
	return nil
}

// Close ends all sessions; no further one can be opened.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.dropSessions(errHostClosed)
	return nil
}

// dropSessions ends every session for the reason given.
func (h *Host) dropSessions(cause error) {
	h.mu.Lock()
	conns := h.conns
	h.conns = map[*conn]struct{}{}
	h.mu.Unlock()
	for c := range conns {
		c.end(cause)
	}
}

func (h *Host) forget(c *conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.conns, c)
}

// errLost is what a caller sees when the connection goes away under it.
var errLost = &lostError{}

type lostError struct{}

func (*lostError) Error() string { return "fake: the connection to the host was lost" }

func (*lostError) Unwrap() error { return io.ErrUnexpectedEOF }
