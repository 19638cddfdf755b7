package kvm2

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// attempts is what this process knows of the data volumes that no pointer leads to. Nothing says who writes to one, or
// whether anybody does; but its size shows, as it grows. When it has stood still for the stall time by this process's own
// clock, the attempt is dead: a process that is alive gives its own up after that time.
type attempts struct {
	stall time.Duration

	mu   sync.Mutex
	own  map[string]bool // those that this process writes to
	seen map[string]sighting
}

type sighting struct {
	physical, allocated int64
	since               time.Time // when it was first seen at that size
	abandoned           bool      // this process made it and could not remove it
}

func newAttempts(stall time.Duration) *attempts {
	return &attempts{stall: stall, own: map[string]bool{}, seen: map[string]sighting{}}
}

func (a *attempts) begin(volume string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.own[volume] = true
}

// end says that this process does not write to the volume any more, and that it is published or gone.
func (a *attempts) end(volume string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.own, volume)
}

// abandon says that this process does not write to the volume any more, and that it may still be there.
func (a *attempts) abandon(volume string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.own, volume)
	a.seen[volume] = sighting{abandoned: true}
}

// dead notes an attempt's size and reports whether nobody is at it any more.
func (a *attempts) dead(v Volume) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.own[v.Name] {
		return false
	}
	s, known := a.seen[v.Name]
	if s.abandoned {
		return true
	}
	if !known || s.physical != v.PhysicalBytes || s.allocated != v.AllocatedBytes {
		s = sighting{physical: v.PhysicalBytes, allocated: v.AllocatedBytes, since: time.Now()}
		a.seen[v.Name] = s
	}
	return time.Since(s.since) >= a.stall
}

// retain forgets the attempts that are not among the pool's volumes any more.
func (a *attempts) retain(volumes []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name := range a.seen {
		if _, there := slices.BinarySearch(volumes, name); !there {
			delete(a.seen, name)
		}
	}
}

// errOthers says that another process may be transferring the image.
var errOthers = errors.New("another process transfers the image")

// yield returns errOthers when another process may be at the image already. own is this process's own attempt if it has
// made one. Two that make theirs at once see each other: the one whose volume comes first by name goes on, unless the
// other already uploads. So of any number at most all but one yield.
func (t *imageTransfer) yield(ctx context.Context, conn Conn, own string) error {
	others, err := t.others(ctx, conn, own)
	if err != nil {
		return err
	}
	for _, v := range others {
		if own == "" || v.PhysicalBytes > 0 || v.Name < own {
			return transient(ErrConflict, "%w", errOthers)
		}
	}
	return nil
}

// others are the attempts at the image, besides own, that somebody may still be at.
func (t *imageTransfer) others(ctx context.Context, conn Conn, own string) ([]Volume, error) {
	names, err := conn.VolumeNames(ctx, t.cfg.Pool)
	if err != nil {
		return nil, err
	}
	t.attempts.retain(names)
	var out []Volume
	for _, name := range names {
		if name == own || !t.name.isAttempt(name) {
			continue
		}
		v, err := conn.Volume(ctx, t.cfg.Pool, name)
		if gone(err) != nil {
			return nil, err
		}
		if err == nil && !t.attempts.dead(v) {
			out = append(out, v)
		}
	}
	return out, nil
}

// watchEvery is how often another process's attempt is looked at.
const watchEvery = 2 * time.Second

// waitForOthers returns when the image is published, or when nobody is at it any more.
func (t *imageTransfer) waitForOthers(ctx context.Context) (published bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.cfg.Images.Timeout))
	defer cancel()
	for {
		var others []Volume
		err := t.with(ctx, func(conn Conn) (err error) {
			if published, err = t.alreadyPublished(ctx, conn); published || err != nil {
				return err
			}
			others, err = t.others(ctx, conn, "")
			return err
		})
		if err != nil || published || len(others) == 0 {
			return published, err
		}
		t.progress.waiting(furthest(others))
		select {
		case <-time.After(min(watchEvery, t.attempts.stall)):
		case <-ctx.Done():
			return false, transient(nil, "waiting for another process to transfer the image: %w", context.Cause(ctx))
		}
	}
}

func furthest(others []Volume) int64 {
	var most int64
	for _, v := range others {
		most = max(most, v.PhysicalBytes)
	}
	return most
}

// removeDead removes what dead processes left of the image, once it is published. A volume that something stands on is
// not removed: its pointer was, and machines may still use it.
func (t *imageTransfer) removeDead(ctx context.Context, conn Conn) error {
	names, err := conn.VolumeNames(ctx, t.cfg.Pool)
	if err != nil {
		return err
	}
	found := slices.ContainsFunc(names, func(n string) bool { return t.name.isAttempt(n) && !t.attempts.isOwn(n) })
	if !found {
		return nil
	}
	volumes, err := conn.Volumes(ctx, t.cfg.Pool)
	if err != nil {
		return err
	}
	users := usersOf(volumes)
	for _, v := range volumes {
		if !t.name.isAttempt(v.Name) || users[v.Name] > 0 || !t.attempts.dead(v) {
			continue
		}
		if err := gone(conn.DeleteVolume(ctx, t.cfg.Pool, v.Name)); err != nil {
			return err
		}
	}
	return nil
}

func (a *attempts) isOwn(volume string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.own[volume]
}

// usersOf counts, by name, how many volumes stand on each. Paths are compared by their last element: a link or another
// name of the pool's directory must not hide a user.
func usersOf(volumes []Volume) map[string]int {
	users := map[string]int{}
	for _, v := range volumes {
		if v.BackingPath != "" {
			users[v.backingName()]++
		}
	}
	return users
}

// backingName is the name of the volume that this one stands on, if that is in a pool.
func (v Volume) backingName() string {
	return v.BackingPath[strings.LastIndexByte(v.BackingPath, '/')+1:]
}
