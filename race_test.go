package kvm2_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// Two controllers that know nothing of each other work on one host. In the bubble time is the schedule: each call is
// put off by a random time, so each seed gives another interleaving.

// raceSeeds is how many interleavings a test goes through. CI sets KVM2_RACE_SEEDS to more than the default.
func raceSeeds(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("KVM2_RACE_SEEDS")
	if text == "" {
		return 150
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		t.Fatalf("KVM2_RACE_SEEDS: %v", err)
	}
	return n
}

func race(t *testing.T, seed uint64, verify func(*testing.T, *sweepWorld), jobs ...func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newSweepWorld(t)
		defer w.host.Close()
		shuffleCalls(w.host, seed)
		var wg sync.WaitGroup
		for _, job := range jobs {
			p := w.provider(t)
			wg.Go(func() {
				defer closeProvider(t, p)
				if err := pollOn(t.Context(), w, p, job); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		w.host.Intercept(nil)
		verify(t, w)
		if open := w.host.Stats().OpenSessions; open != 0 {
			t.Errorf("%d sessions left open", open)
		}
		if t.Failed() {
			for _, c := range w.host.Calls() {
				t.Log(c)
			}
		}
	})
}

// shuffleCalls puts every call off by a random time.
func shuffleCalls(h *fake.Host, seed uint64) {
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	h.Intercept(func(fake.Call) error {
		mu.Lock()
		d := time.Duration(random.IntN(1000)) * time.Microsecond
		mu.Unlock()
		time.Sleep(d)
		return nil
	})
}

// pollOn polls until the job is done. It runs beside the test's own goroutine, so it returns what goes wrong.
func pollOn(ctx context.Context, w *sweepWorld, p *kvm2.Provider, job func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)) error {
	return pollUpTo(ctx, 100, time.Millisecond, w, p, job)
}

func pollUpTo(ctx context.Context, polls int, wait time.Duration, w *sweepWorld, p *kvm2.Provider, job func(context.Context, *sweepWorld, *kvm2.Provider) (bool, error)) error {
	var err error
	for range polls {
		var done bool
		if done, err = job(ctx, w, p); done {
			return nil
		}
		if kvm2.ClassOf(err) == kvm2.ClassPermanent {
			return fmt.Errorf("polling ended: %w", err)
		}
		time.Sleep(wait)
	}
	return fmt.Errorf("not done after %d polls: %w", polls, err)
}

func TestRace_TwoCreationsOfOneMachineMakeOne(t *testing.T) {
	for seed := range raceSeeds(t) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { race(t, seed, verifyCreated, pollCreate, pollCreate) })
	}
}

func TestRace_CreateAgainstDeleteLosesNoDisk(t *testing.T) {
	for seed := range raceSeeds(t) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { race(t, seed, verifyWholeOrGone, pollCreate, pollDelete) })
	}
}

func TestRace_TwoTransfersPublishOneWholeImage(t *testing.T) {
	other := func(ctx context.Context, w *sweepWorld, p *kvm2.Provider) (bool, error) {
		spec := w.spec
		spec.Name, spec.OwnerUID = "web-2", "owner-2"
		m, err := p.Create(ctx, spec)
		return m.State == kvm2.StateRunning && err == nil, err
	}
	for seed := range raceSeeds(t) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { race(t, seed, verifyImage, pollCreate, other) })
	}
}

// verifyWholeOrGone accepts a machine that runs with all of its disks, and none at all; in between only what the next
// polls mend: the machine comes to run, and can be deleted without a trace.
func verifyWholeOrGone(t *testing.T, w *sweepWorld) {
	t.Helper()
	domains := w.host.Domains()
	if len(domains) > 1 {
		t.Errorf("%d domains, want one at most", len(domains))
	}
	if len(domains) == 1 && domains[0].Running && strings.Contains(domains[0].Metadata, `phase="started"`) && len(machineVolumes(w)) != 3 {
		t.Errorf("a running machine has lost disks: it has %q", machineVolumes(w))
	}
	p := w.provider(t)
	defer closeProvider(t, p)
	pollUntilDone(t, w, p, pollCreate)
	verifyCreated(t, w)
	pollUntilDone(t, w, p, pollDelete)
	verifyDeleted(t, w)
}
