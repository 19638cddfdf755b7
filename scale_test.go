package kvm2_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// What a poll costs is the same however many machines the host has.
func TestProvider_CallsDoNotDependOnTheNumberOfMachines(t *testing.T) {
	type cost struct{ create, get, list, remove int }
	measure := func(t *testing.T, f *fleet) (c cost) {
		t.Helper()
		calls := func(step func()) int {
			before := f.calls()
			step()
			return f.calls() - before
		}
		c.create = calls(func() { f.create(t, 1) })
		c.get = calls(func() { f.get(t) })
		c.list = calls(func() { f.list(t) })
		c.remove = calls(func() { f.deleteLast(t) })
		return c
	}
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		defer f.close(t)
		f.create(t, 10)
		few := measure(t, f)
		f.create(t, 240)
		many := measure(t, f)
		if few != many {
			t.Errorf("calls with 10 machines: %+v, with 250: %+v", few, many)
		}
		if many.list != 3 {
			t.Errorf("List() takes %d calls, want 3: volumes, domains, leases", many.list)
		}
		t.Logf("calls: %+v", many)
	})
}

// A poll of one machine does not have the host send the leases of all.
func TestProvider_PollsAskForTheLeasesOfTheirMachineAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		defer f.close(t)
		f.create(t, 2)
		m, err := f.provider.Get(t.Context(), f.ids[1])
		if err != nil {
			t.Fatal(err)
		}
		calls := f.host.Calls()
		last := calls[len(calls)-1]
		if want := fmt.Sprintf("MACs [%q]", m.Addresses[0].MAC); last.Op != kvm2.OpDomainAddresses || !strings.Contains(last.Detail, want) {
			t.Errorf("the last call was %v, want one for %s", last, want)
		}
	})
}

// fleet is a provider with many machines on one host, whose image is there.
type fleet struct {
	host     *fake.Host
	provider *kvm2.Provider
	spec     kvm2.Spec
	ids      []string
	made     int
}

func newFleet(tb testing.TB) *fleet {
	tb.Helper()
	w := newSweepWorld(tb)
	w.host = fake.NewHost(fake.WithPool("default", 1<<50), fake.WithNetwork("default", netip.MustParsePrefix("10.0.0.0/12")))
	f := &fleet{host: w.host, provider: w.provider(tb), spec: w.spec, ids: []string{w.id}}
	pollUntilDone(tb, w, f.provider, pollCreate)
	f.deleteLast(tb)
	return f
}

func (f *fleet) close(tb testing.TB) {
	tb.Helper()
	if err := f.provider.Close(); err != nil {
		tb.Errorf("Close() = %v", err)
	}
	_ = f.host.Close() // it never fails
}

func (f *fleet) calls() int { return f.host.Stats().Calls }

// create makes n more machines. Each is done with one poll.
func (f *fleet) create(tb testing.TB, n int) {
	tb.Helper()
	for range n {
		spec := f.spec
		spec.Name = fmt.Sprintf("m-%d", f.made)
		spec.OwnerUID = spec.Name
		f.made++
		m, err := f.provider.Create(tb.Context(), spec)
		if err != nil || m.State != kvm2.StateRunning || len(m.Addresses) != 1 {
			tb.Fatalf("Create() = %s with addresses %v, %v; want it running with one", m.State, m.Addresses, err)
		}
		f.ids = append(f.ids, m.ID)
	}
}

// get asks for the youngest machine.
func (f *fleet) get(tb testing.TB) {
	tb.Helper()
	m, err := f.provider.Get(tb.Context(), f.ids[len(f.ids)-1])
	if err != nil || len(m.Addresses) != 1 {
		tb.Fatalf("Get() has addresses %v, %v; want one", m.Addresses, err)
	}
}

func (f *fleet) list(tb testing.TB) {
	tb.Helper()
	machines, err := f.provider.List(tb.Context())
	if err != nil || len(machines) != len(f.ids) {
		tb.Fatalf("List() has %d machines, %v; want %d", len(machines), err, len(f.ids))
	}
}

// deleteLast deletes the youngest machine.
func (f *fleet) deleteLast(tb testing.TB) {
	tb.Helper()
	last := len(f.ids) - 1
	if err := f.provider.Delete(tb.Context(), f.ids[last]); err != nil {
		tb.Fatal(err)
	}
	f.ids = f.ids[:last]
}
