package kvm2test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
)

// Provider is the contract that TestProvider checks. A *kvm2.Provider keeps it.
type Provider interface {
	Create(ctx context.Context, spec kvm2.Spec) (kvm2.Machine, error)
	Get(ctx context.Context, id string) (kvm2.Machine, error)
	Delete(ctx context.Context, id string) error
	List(ctx context.Context) ([]kvm2.Machine, error)
}

var _ Provider = (*kvm2.Provider)(nil)

// Factory makes what TestProvider works with.
type Factory struct {
	// Scope is a scope that the suite has to itself. All of its machines are deleted, before, between and after the
	// cases. The scope's image remains on the host. It is required, and so are New and Spec.
	Scope string
	// New returns another provider of the scope on the same host, as a controller has after a restart. It is to be
	// closed at the end of t.
	New func(t *testing.T, scope string) Provider
	// Spec returns a valid spec of a small machine. Each call with the same arguments returns an equal one.
	Spec func(name, ownerUID string) kvm2.Spec
	// PollInterval is the time between two polls of Create or Delete: half a second if zero.
	PollInterval time.Duration
	// Timeout bounds each case, the transfer of the image included: ten minutes if zero.
	Timeout time.Duration
}

// A providerCase is one rule of the contract, and how to see whether it is kept.
type providerCase struct {
	Name string
	Rule string
	Run  func(*contract)
}

func providerCases() []providerCase {
	return slices.Concat(createCases(), refusalCases(), getCases(), deleteCases(), listCases(), processCases())
}

// TestProvider checks that the providers that f makes keep the contract of a machine provider.
func TestProvider(t *testing.T, f Factory) {
	t.Helper()
	if f.Scope == "" || f.New == nil || f.Spec == nil {
		t.Fatal("kvm2test: Factory.Scope, Factory.New and Factory.Spec are required")
	}
	f.PollInterval = cmp.Or(f.PollInterval, 500*time.Millisecond)
	f.Timeout = cmp.Or(f.Timeout, 10*time.Minute)
	for _, c := range providerCases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Log("rule: " + c.Rule)
			c.Run(newContract(t, f))
		})
	}
}

// contract is one case at work.
type contract struct {
	*testing.T
	f   Factory
	p   Provider
	ctx context.Context
}

func newContract(t *testing.T, f Factory) *contract {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), f.Timeout)
	t.Cleanup(cancel)
	first := f.New(t, f.Scope) // it outlives those that a case makes
	c := &contract{T: t, f: f, p: first, ctx: ctx}
	c.clear(ctx, first)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), f.Timeout) // t's own has ended by now
		defer cancel()
		c.clear(ctx, first)
	})
	return c
}

// clear deletes every machine of the scope.
func (c *contract) clear(ctx context.Context, p Provider) {
	c.Helper()
	machines, err := p.List(ctx)
	if err != nil {
		c.Errorf("clean up: %v", err)
	}
	for _, m := range machines {
		if err := c.pollDelete(ctx, p, m.ID); err != nil {
			c.Errorf("clean up: %v", err)
		}
	}
}

// poll repeats step until it says that it is done, as long as its errors are Transient.
func (c *contract) poll(ctx context.Context, step func() (done bool, err error)) error {
	tick := time.NewTicker(c.f.PollInterval)
	defer tick.Stop()
	for {
		done, err := step()
		if done || kvm2.ClassOf(err) > kvm2.ClassTransient {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("polling: %w", ctx.Err()), err)
		}
	}
}

// pollCreate polls Create until the machine runs, or cannot.
func (c *contract) pollCreate(p Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	var m kvm2.Machine
	err := c.poll(c.ctx, func() (bool, error) {
		var err error
		m, err = p.Create(c.ctx, spec)
		return err == nil && m.State == kvm2.StateRunning, err
	})
	return m, err
}

func (c *contract) pollDelete(ctx context.Context, p Provider, id string) error {
	return c.poll(ctx, func() (bool, error) {
		err := p.Delete(ctx, id)
		return err == nil, err
	})
}

// spec is the machine called name, of the owner with that name.
func (c *contract) spec(name string) kvm2.Spec { return c.f.Spec(name, "owner-of-"+name) }

// running makes a machine that runs.
func (c *contract) running(spec kvm2.Spec) kvm2.Machine {
	c.Helper()
	m, err := c.pollCreate(c.p, spec)
	if err != nil {
		c.Fatalf("Create: %v", err)
	}
	return m
}

func (c *contract) get(id string) kvm2.Machine {
	c.Helper()
	m, err := c.p.Get(c.ctx, id)
	if err != nil {
		c.Fatalf("Get: %v", err)
	}
	return m
}

func (c *contract) list() []kvm2.Machine {
	c.Helper()
	machines, err := c.p.List(c.ctx)
	if err != nil {
		c.Fatalf("List: %v", err)
	}
	return machines
}

func (c *contract) delete(id string) {
	c.Helper()
	if err := c.pollDelete(c.ctx, c.p, id); err != nil {
		c.Fatalf("Delete: %v", err)
	}
}

// wantError checks an error's class and sentinel.
func (c *contract) wantError(what string, err error, class kvm2.Class, sentinel error) {
	c.Helper()
	if kvm2.ClassOf(err) != class || !errors.Is(err, sentinel) {
		c.Errorf("%s: got error %v of class %v, want class %v and %q", what, err, kvm2.ClassOf(err), class, sentinel)
	}
}

// wantSame checks that a machine is still the one that it was.
func (c *contract) wantSame(got, want kvm2.Machine) {
	c.Helper()
	if got.ID != want.ID || got.UUID != want.UUID || got.Name != want.Name || got.OwnerUID != want.OwnerUID ||
		got.State != want.State || !got.CreatedAt.Equal(want.CreatedAt) || !maps.Equal(got.Labels, want.Labels) {
		c.Errorf("got machine %+v, want %+v", got, want)
	}
}

// wantOnly checks that exactly these machines are listed.
func (c *contract) wantOnly(want ...kvm2.Machine) {
	c.Helper()
	got := c.list()
	if len(got) != len(want) {
		c.Fatalf("List: got %+v, want %d machines", got, len(want))
	}
	for i := range want {
		c.wantSame(got[i], want[i])
	}
}

// atOnce runs fn so many times at once.
func atOnce(n int, fn func(int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}
