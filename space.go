package kvm2

import (
	"math"
	"sync"
	"time"
)

// qcow2Overhead is what a qcow2 file of the given capacity may take beyond its data: with 64 KiB clusters, 8 bytes
// of table and 2 of reference count a cluster, and some clusters of headers (QEMU's docs/interop/qcow2).
func qcow2Overhead(capacity int64) int64 { return capacity/(64*kib)*10 + mib }

// machineNeed is the most that a machine's volumes may come to take up, in bytes.
func machineNeed(s Spec, seed int) int64 {
	need := s.RootDiskBytes + qcow2Overhead(s.RootDiskBytes) + int64(seed)
	for _, d := range s.Disks {
		need += d.SizeBytes + qcow2Overhead(d.SizeBytes)
	}
	return need
}

// checkSpace compares what is needed with what the pool can promise. Too little is ErrQuotaExceeded.
func checkSpace(p Pool, need, reserved int64, overcommitPercent int) error {
	percent := int64(overcommitPercent)
	promise := min(p.AvailableBytes/100, math.MaxInt64/percent) * percent // a network file system may claim 8 EiB
	if need <= promise-reserved {
		return nil
	}
	return quota("pool %q has too little space: needed %d bytes, available %d, reserved by other creations %d, capacity %d, overcommit %d%%",
		p.Name, need, p.AvailableBytes, reserved, p.CapacityBytes, overcommitPercent)
}

// reservationTTL is how long a creation that is not polled any more keeps its claim on space.
const reservationTTL = 10 * time.Minute

// reservations are the claims of this process's unfinished creations on each pool's space: what they will write is
// not yet missing from the pool's available bytes.
type reservations struct {
	mu     sync.Mutex
	claims map[string]claim // by provider ID or image pointer
}

// claim is one creation's claim.
type claim struct {
	bytes   int64
	image   string       // the pointer of the image that a machine waits for or is made of; empty for a transfer
	written func() int64 // how much of it is on the disk already, and so no longer among the available; nil: nothing

	pool  string
	until time.Time
}

func (c claim) open() int64 {
	if c.written == nil {
		return c.bytes
	}
	return max(0, c.bytes-c.written())
}

// reserve checks the pool for what c claims beside the claims of others, and enters it for key. Check and entry are
// one step, so that two creations cannot both have the last space.
func (r *reservations) reserve(key string, p Pool, c claim, overcommitPercent int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var others int64
	now := time.Now()
	for k, other := range r.claims {
		if now.After(other.until) {
			delete(r.claims, k)
		} else if k != key && other.pool == p.Name {
			others += other.open()
		}
	}
	if err := checkSpace(p, c.open(), others, overcommitPercent); err != nil {
		delete(r.claims, key)
		return err
	}
	if r.claims == nil {
		r.claims = map[string]claim{}
	}
	c.pool, c.until = p.Name, now.Add(reservationTTL)
	r.claims[key] = c
	return nil
}

// wants reports whether a machine that is being created needs the image.
func (r *reservations) wants(pointer string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, c := range r.claims {
		if c.image == pointer && !now.After(c.until) {
			return true
		}
	}
	return false
}

func (r *reservations) release(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.claims, key)
}
