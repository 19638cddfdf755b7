package fake

import (
	"slices"

	"github.com/kvm2/kvm2"
)

// Stats are a host's counters.
type Stats struct {
	// Dials is how many sessions were opened, Sessions how many were tried.
	Dials    int
	Sessions int
	// OpenSessions is how many sessions are open now.
	OpenSessions int
	// Calls is how many calls arrived, dials included.
	Calls int
	// UploadedBytes is how many bytes uploads wrote.
	UploadedBytes int64
}

// Stats returns the host's counters.
func (h *Host) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.OpenSessions = len(h.conns)
	return s
}

// Calls returns the log of all calls, in the order in which they arrived.
func (h *Host) Calls() []Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls)
}

// info answers what the options say.
func (h *Host) info() (kvm2.HostInfo, error) {
	s := h.settings
	return kvm2.HostInfo{
		Hostname: s.hostname, Libvirt: s.libvirt, Hypervisor: s.hypervisor, Arch: s.arch, CPUs: s.cpus, MemoryBytes: s.memory,
		DomainTypes: slices.Clone(s.domainTypes),
	}, nil
}

// Domain is a domain with what a session does not show.
type Domain struct {
	kvm2.Domain
	// Persistent and Running tell which configurations it has: at least one of them.
	Persistent bool
	Running    bool
	// XML is the persistent configuration as it was defined, or the running one where that is all there is.
	XML string
}

// Domains returns all domains, sorted by name.
func (h *Host) Domains() []Domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settle()
	var out []Domain
	for _, d := range h.sortedDomains() {
		c := d.persistent
		if c == nil {
			c = d.running.config
		}
		out = append(out, Domain{Domain: d.seen(), Persistent: d.persistent != nil, Running: d.running != nil, XML: c.xml})
	}
	return out
}

// Volumes returns the volumes that a pool knows, sorted by name, active or not. Those whose file is gone are left
// out.
func (h *Host) Volumes(pool string) []kvm2.Volume {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.mustPool(pool)
	var out []kvm2.Volume
	for _, name := range p.volumeNames() {
		if v, err := p.seenVolume(p.volumes[name]); err == nil {
			out = append(out, v)
		}
	}
	return out
}

// VolumeBytes returns the content of a volume's file.
func (h *Host) VolumeBytes(pool, name string) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mustFile(pool, name).content()
}
