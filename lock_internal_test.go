package kvm2

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

var (
	keyA = MachineUUID("prod", "a")
	keyB = MachineUUID("prod", "b")
)

func mustLock(t testing.TB, k *keyedLock, key UUID) (unlock func()) {
	t.Helper()
	unlock, err := k.lock(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return unlock
}

// wantNoLeftovers fails unless all locks have been forgotten.
func wantNoLeftovers(t testing.TB, k *keyedLock) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.locks) != 0 {
		t.Errorf("%d locks are kept that nobody needs", len(k.locks))
	}
}

func TestKeyedLock_OneHolderAtATime(t *testing.T) {
	k := newKeyedLock()
	holders, total := 0, 0 // written under the lock: the race detector watches
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			unlock, err := k.lock(t.Context(), keyA)
			if err != nil {
				t.Error(err)
				return
			}
			if holders++; holders != 1 {
				t.Errorf("%d holders at once", holders)
			}
			total++
			holders--
			unlock()
		})
	}
	wg.Wait()
	if total != 50 {
		t.Errorf("%d of 50 got the lock", total)
	}
	wantNoLeftovers(t, k)
}

func TestKeyedLock_KeysDoNotWaitForEachOther(t *testing.T) {
	k := newKeyedLock()
	unlockA := mustLock(t, k, keyA)
	unlockB := mustLock(t, k, keyB)
	unlockA()
	unlockB()
	wantNoLeftovers(t, k)
}

func TestKeyedLock_WaitersGoInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeyedLock()
		unlock := mustLock(t, k, keyA)
		var order []int
		for i := range 10 {
			go func() {
				unlock, err := k.lock(t.Context(), keyA)
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				unlock()
			}()
			synctest.Wait() // so that the next one comes later
		}
		unlock()
		synctest.Wait()
		for i, got := range order {
			if got != i {
				t.Fatalf("waiters went in the order %v, want that of their coming", order)
			}
		}
		if len(order) != 10 {
			t.Errorf("%d of 10 waiters got the lock", len(order))
		}
		wantNoLeftovers(t, k)
	})
}

func TestKeyedLock_WaitingEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeyedLock()
		unlock := mustLock(t, k, keyA)
		ctx, cancel := context.WithCancel(t.Context())
		var err error
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, err = k.lock(ctx, keyA)
		}()
		synctest.Wait()
		cancel()
		<-done
		if !errors.Is(err, context.Canceled) {
			t.Errorf("lock = %v, want context.Canceled", err)
		}
		unlock()
		wantNoLeftovers(t, k)
		mustLock(t, k, keyA)() // the one who gave up did not take the token along
		wantNoLeftovers(t, k)
	})
}
