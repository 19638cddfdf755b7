package kvm2

import (
	"context"
	"sync"
)

// keyedLock is one lock for each machine, held only while somebody needs it.
type keyedLock struct {
	mu    sync.Mutex
	locks map[UUID]*countedLock
}

type countedLock struct {
	token chan struct{} // holds one token while the lock is free
	users int           // holders and waiters
}

func newKeyedLock() *keyedLock { return &keyedLock{locks: map[UUID]*countedLock{}} }

// lock waits for the key's lock until ctx ends.
func (k *keyedLock) lock(ctx context.Context, key UUID) (unlock func(), err error) {
	l := k.join(key)
	select {
	case <-l.token:
		return func() {
			l.token <- struct{}{}
			k.leave(key, l)
		}, nil
	case <-ctx.Done():
		k.leave(key, l)
		return nil, ctx.Err()
	}
}

func (k *keyedLock) join(key UUID) *countedLock {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.locks[key]
	if l == nil {
		l = &countedLock{token: make(chan struct{}, 1)}
		l.token <- struct{}{}
		k.locks[key] = l
	}
	l.users++
	return l
}

func (k *keyedLock) leave(key UUID, l *countedLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.locks, key)
	}
}
