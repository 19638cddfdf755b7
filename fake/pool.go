package fake

import (
	"path"
	"slices"

	"github.com/kvm2/kvm2"
)

// A pool is a storage pool: a directory, and what the pool knows of it.
type pool struct {
	name   string
	path   string
	active bool

	capacity int64
	filler   int64            // bytes that others take up on the same file system
	files    map[string]*file // the directory
	taken    int64            // what the files take up, those included that are deleted but still open
	changed  map[string]bool  // names of files that changed since the last refresh

	volumes  map[string]*volume
	names    []string // of the volumes, sorted
	reported figures
}

// figures are what a pool last found out about its file system.
type figures struct{ capacity, allocated, available int64 }

func newPool(s poolSetting) *pool {
	p := &pool{
		name: s.name, path: "/var/lib/libvirt/pools/" + s.name, active: true, capacity: s.capacity,
		files: map[string]*file{}, changed: map[string]bool{}, volumes: map[string]*volume{},
	}
	if s.name == "default" {
		p.path = "/var/lib/libvirt/images"
	}
	p.refresh()
	return p
}

func (h *Host) poolNamed(name string) (*pool, error) {
	p := h.pools[name]
	if p == nil {
		return nil, answer(codeNoPool, "Storage pool not found: no storage pool with matching name '%s'", name)
	}
	return p, nil
}

func (h *Host) activePool(name string) (*pool, error) {
	p, err := h.poolNamed(name)
	if err != nil {
		return nil, err
	}
	if !p.active {
		return nil, invalidOperation("storage pool '%s' is not active", name)
	}
	return p, nil
}

func (p *pool) seen() kvm2.Pool {
	return kvm2.Pool{
		Name: p.name, Active: p.active, TargetPath: p.path,
		CapacityBytes: p.reported.capacity, AllocatedBytes: p.reported.allocated, AvailableBytes: p.reported.available,
	}
}

// used is what really is taken of the file system. A deleted file takes up space until the last guest closes it.
func (p *pool) used() int64 {
	return p.filler + p.taken
}

func (p *pool) free() int64 { return max(0, p.capacity-p.used()) }

// refresh looks at the directory and the file system again. Where nothing has changed it would see what it knows.
func (p *pool) refresh() {
	for name := range p.changed {
		if f := p.files[name]; f != nil {
			p.know(&volume{name: name, head: probe(f)})
		} else {
			p.forget(name)
		}
	}
	clear(p.changed)
	p.measure()
}

// know notes what the pool has found of a volume.
func (p *pool) know(v *volume) {
	if p.volumes[v.name] == nil {
		at, _ := slices.BinarySearch(p.names, v.name)
		p.names = slices.Insert(p.names, at, v.name)
	}
	p.volumes[v.name] = v
}

func (p *pool) forget(name string) {
	if p.volumes[name] == nil {
		return
	}
	delete(p.volumes, name)
	at, _ := slices.BinarySearch(p.names, name)
	p.names = slices.Delete(p.names, at, at+1)
}

func (p *pool) measure() {
	p.reported = figures{p.capacity, min(p.used(), p.capacity), p.free()}
}

func (p *pool) pathOf(name string) string { return path.Join(p.path, name) }

// fileAt finds a file by its path.
func (h *Host) fileAt(where string) *file {
	for _, p := range h.pools {
		if p.path == path.Dir(where) {
			return p.files[path.Base(where)]
		}
	}
	return nil
}

// link gives a file a free name in the directory.
func (p *pool) link(name string, f *file) {
	p.files[name] = f
	f.pool = p
	p.taken += f.allocated()
	p.changed[name] = true
}

// unlink takes a name out of the directory.
func (p *pool) unlink(name string) {
	f := p.files[name]
	if f == nil {
		return
	}
	delete(p.files, name)
	p.changed[name] = true
	f.unlinked = true
	f.release()
}

func (p *pool) volumeNames() []string { return slices.Clone(p.names) }
