package kvm2

import (
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestMachineNeed_CoversAllVolumes(t *testing.T) {
	s := testSpec()
	s.RootDiskBytes = 10 * gib
	if got, want := machineNeed(s, 1000), 10*gib+qcow2Overhead(10*gib)+1000; got != want {
		t.Errorf("need = %d, want %d", got, want)
	}
	s.Disks = []Disk{{Name: "a", SizeBytes: gib}, {Name: "b", SizeBytes: 2 * gib}}
	if got, want := machineNeed(s, 0), 13*gib+qcow2Overhead(10*gib)+qcow2Overhead(gib)+qcow2Overhead(2*gib); got != want {
		t.Errorf("need with disks = %d, want %d", got, want)
	}
	s.RootDiskBytes = 64 * tib
	s.Disks = nil
	for range maxDisks {
		s.Disks = append(s.Disks, Disk{SizeBytes: 64 * tib})
	}
	if got := machineNeed(s, 3*MaxUserDataBytes); got <= 17*64*tib {
		t.Errorf("need of the largest machine = %d, which is too little: it overflowed", got)
	}
}

func TestQcow2Overhead_IsMoreThanTheTables(t *testing.T) {
	for _, capacity := range []int64{mib, gib, 20 * gib, 64 * tib} {
		clusters := (capacity + 64*kib - 1) / (64 * kib)
		if tables := clusters*8 + clusters*2; qcow2Overhead(capacity) < tables {
			t.Errorf("overhead of %d bytes is %d, less than the %d bytes of its tables", capacity, qcow2Overhead(capacity), tables)
		}
	}
}

func TestCheckSpace(t *testing.T) {
	tests := []struct {
		name                      string
		available, need, reserved int64
		percent                   int
		fits                      bool
		why                       string
	}{
		{name: "fits", available: 1000, need: 999, percent: 100, fits: true},
		{name: "fits exactly", available: 1000, need: 1000, percent: 100, fits: true},
		{name: "one byte too much", available: 1000, need: 1001, percent: 100},
		{name: "beside others exactly", available: 1000, need: 400, reserved: 600, percent: 100, fits: true},
		{name: "beside others too much", available: 1000, need: 401, reserved: 600, percent: 100},
		{name: "overcommitted", available: 1000, need: 2000, percent: 200, fits: true},
		{name: "overcommitted too far", available: 1000, need: 2001, percent: 200},
		{name: "half is kept free", available: 1000, need: 501, percent: 50},
		{name: "others hold more than there is", available: 100, need: 1, reserved: 1000, percent: 100},
		{name: "full pool", available: 0, need: 1, percent: 10_000},
		{name: "a network file system without limit", available: math.MaxInt64, need: 100 * tib, percent: 100, fits: true},
		{name: "the same, overcommitted", available: math.MaxInt64, need: 100 * tib, percent: 10_000, fits: true, why: "the product does not fit into 64 bits"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := Pool{Name: "default", AvailableBytes: tt.available, CapacityBytes: 5000}
			err := checkSpace(p, tt.need, tt.reserved, tt.percent)
			if tt.fits {
				if err != nil {
					t.Errorf("checkSpace = %v, want nil; %s", err, tt.why)
				}
				return
			}
			if ClassOf(err) != ClassQuota {
				t.Fatalf("checkSpace = %v, want class Quota; %s", err, tt.why)
			}
			wantIs(t, err, ErrQuotaExceeded)
		})
	}
}

func TestCheckSpace_TellsNeededAndAvailable(t *testing.T) {
	err := checkSpace(Pool{Name: "fast", AvailableBytes: 111_100, CapacityBytes: 222_200}, 333_300, 44_400, 150)
	for _, want := range []string{`"fast"`, "needed 333300", "available 111100", "44400", "capacity 222200", "150%"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("checkSpace = %v, want it to say %q", err, want)
		}
	}
}

func TestReservations_ClaimsOfOthersCount(t *testing.T) {
	r := &reservations{}
	pool, other := Pool{Name: "default", AvailableBytes: 1000}, Pool{Name: "other", AvailableBytes: 1000}
	steps := []struct {
		key  string
		pool Pool
		need int64
		fits bool
		why  string
	}{
		{key: "a", pool: pool, need: 600, fits: true},
		{key: "a", pool: pool, need: 600, fits: true, why: "a poll of the same machine claims nothing new"},
		{key: "a", pool: pool, need: 1000, fits: true, why: "its own claim does not stand in its way"},
		{key: "a", pool: pool, need: 700, fits: true, why: "the new claim replaces the old one"},
		{key: "b", pool: pool, need: 400},
		{key: "b", pool: pool, need: 300, fits: true},
		{key: "c", pool: pool, need: 100},
		{key: "c", pool: other, need: 1000, fits: true, why: "each pool has its own space"},
		{key: "b", pool: pool, need: 400, why: "it grew"},
		{key: "d", pool: pool, need: 300, fits: true, why: "what was refused claims nothing"},
	}
	for i, s := range steps {
		if err := r.reserve(s.key, s.pool, claim{bytes: s.need}, 100); (err == nil) != s.fits {
			t.Errorf("step %d: reserve(%q, %d) = %v, want it to fit: %t; %s", i, s.key, s.need, err, s.fits, s.why)
		}
	}
	r.release("a")
	r.release("a") // again is harmless
	r.release("unknown")
	if err := r.reserve("e", pool, claim{bytes: 700}, 100); err != nil {
		t.Errorf("reserve after a release: %v", err)
	}
}

func TestReservations_WhatIsWrittenIsNotCountedTwice(t *testing.T) {
	r := &reservations{}
	var done int64
	image := claim{bytes: 800, written: func() int64 { return done }}
	if err := r.reserve("image", Pool{Name: "default", AvailableBytes: 1000}, image, 100); err != nil {
		t.Fatal(err)
	}
	done = 500 // and so missing from what is available
	halfway := Pool{Name: "default", AvailableBytes: 500}
	if err := r.reserve("a", halfway, claim{bytes: 201}, 100); !errors.Is(err, ErrQuotaExceeded) {
		t.Errorf("reserve beside what is still to come = %v, want ErrQuotaExceeded", err)
	}
	if err := r.reserve("a", halfway, claim{bytes: 200}, 100); err != nil {
		t.Errorf("reserve of the rest: %v", err)
	}
	done = 900 // more than was claimed
	if err := r.reserve("b", Pool{Name: "default", AvailableBytes: 300}, claim{bytes: 101}, 100); !errors.Is(err, ErrQuotaExceeded) {
		t.Errorf("reserve = %v, want ErrQuotaExceeded: a claim that is used up gives nothing away", err)
	}
}

func TestReservations_ExpireWhenNobodyPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reservations{}
		pool, all := Pool{Name: "default", AvailableBytes: 1000}, claim{bytes: 1000}
		if err := r.reserve("a", pool, all, 100); err != nil {
			t.Fatal(err)
		}
		time.Sleep(reservationTTL)
		if err := r.reserve("b", pool, all, 100); !errors.Is(err, ErrQuotaExceeded) {
			t.Errorf("reserve while the claim holds = %v, want ErrQuotaExceeded", err)
		}
		if err := r.reserve("a", pool, all, 100); err != nil {
			t.Errorf("a poll: %v", err)
		}
		time.Sleep(time.Second)
		if err := r.reserve("b", pool, all, 100); !errors.Is(err, ErrQuotaExceeded) {
			t.Errorf("reserve after the poll = %v, want ErrQuotaExceeded: it renewed the claim", err)
		}
		time.Sleep(reservationTTL)
		if err := r.reserve("b", pool, all, 100); err != nil {
			t.Errorf("reserve after the claim ended: %v", err)
		}
		if len(r.claims) != 1 {
			t.Errorf("%d claims are kept, want 1: those that ended are forgotten", len(r.claims))
		}
	})
}

func TestReservations_LastSpaceGoesToOne(t *testing.T) {
	r := &reservations{}
	pool := Pool{Name: "default", AvailableBytes: 1000}
	var winners atomic.Int32
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if r.reserve(string(rune('a'+i)), pool, claim{bytes: 600}, 100) == nil {
				winners.Add(1)
			}
		})
	}
	wg.Wait()
	if winners.Load() != 1 {
		t.Errorf("%d creations got the last space", winners.Load())
	}
}
