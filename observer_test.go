package kvm2_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// counter counts calls as a Prometheus counter vector with the labels op and class does.
type counter struct {
	mu    sync.Mutex
	calls map[string]int
}

func (c *counter) CallObserved(e kvm2.CallEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls == nil {
		c.calls = map[string]int{}
	}
	c.calls[fmt.Sprintf("%s %s", e.Op, kvm2.ClassOf(e.Err))]++
}

func (c *counter) lines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for k, n := range c.calls {
		out = append(out, fmt.Sprintf("%s %d", k, n))
	}
	slices.Sort(out)
	return out
}

func ExampleWithObserver() {
	host := fake.NewHost()
	defer func() { _ = host.Close() }()
	calls := &counter{}
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "ci"}, kvm2.WithDialer(host), kvm2.WithObserver(calls))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = p.Close() }()
	_, _ = p.List(context.Background())
	_, _ = p.Get(context.Background(), kvm2.ID{Host: "localhost", UUID: kvm2.MachineUUID("ci", "nobody")}.String())
	for _, line := range calls.lines() {
		fmt.Println(line)
	}
	// Output:
	// dial None 1
	// domain.list None 1
	// domain.lookup NotFound 1
	// volume.list None 2
}

func TestObserver_SeesWhatTheHostSees(t *testing.T) {
	inLab(t, func(l *lab) {
		calls := &counter{}
		p := l.open(nil, kvm2.WithObserver(calls))
		before := len(l.host.Calls())
		if _, err := p.List(l.Context()); err != nil {
			l.Fatal(err)
		}
		seen := 0
		for _, line := range calls.lines() {
			var op, class string
			var n int
			if _, err := fmt.Sscan(line, &op, &class, &n); err != nil {
				l.Fatal(err)
			}
			seen += n
		}
		if made := len(l.host.Calls()) - before; seen != made || made == 0 {
			l.Errorf("the observer saw %d calls, the host %d", seen, made)
		}
	})
}
