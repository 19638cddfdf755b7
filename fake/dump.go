package fake

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Dump describes all of the host's state in text that compares well: sorted, one object or part of one to a line, and
// the same for the same state. It holds no content of volumes, and no times.
func (h *Host) Dump() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settle()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(h.pools)) {
		h.pools[name].dump(&b)
	}
	for _, name := range slices.Sorted(maps.Keys(h.networks)) {
		h.networks[name].dump(&b)
	}
	for _, d := range h.sortedDomains() {
		d.dump(&b)
	}
	return b.String()
}

func activity(active bool) string {
	if active {
		return "active"
	}
	return "inactive"
}

func (p *pool) dump(b *strings.Builder) {
	fmt.Fprintf(b, "pool %s %s, %d of %d bytes free\n", p.name, activity(p.active), p.free(), p.capacity)
	for _, name := range p.volumeNames() {
		v, err := p.seenVolume(p.volumes[name])
		if err != nil {
			fmt.Fprintf(b, "  volume %s without its file\n", name)
			continue
		}
		fmt.Fprintf(b, "  volume %s %s, capacity %d, physical %d, allocated %d", name, v.Format, v.CapacityBytes, v.PhysicalBytes, v.AllocatedBytes)
		if v.BackingPath != "" {
			fmt.Fprintf(b, ", on %s (%s)", v.BackingPath, v.BackingFormat)
		}
		b.WriteString("\n")
	}
	for _, name := range slices.Sorted(maps.Keys(p.files)) {
		if p.volumes[name] == nil {
			fmt.Fprintf(b, "  unknown file %s, physical %d\n", name, p.files[name].size)
		}
	}
}

func (n *network) dump(b *strings.Builder) {
	fmt.Fprintf(b, "network %s %s, %s\n", n.name, activity(n.active), n.subnet)
	for _, l := range n.records(nil) {
		fmt.Fprintf(b, "  lease %s %s\n", l.MAC, l.IP)
	}
}

func (d *domain) dump(b *strings.Builder) {
	fmt.Fprintf(b, "domain %s %s, state %d reason %d", d.name, d.uuid, d.state.State, d.state.Reason)
	for _, trait := range []struct {
		name string
		has  bool
	}{
		{"persistent", d.persistent != nil},
		{"running", d.running != nil},
		{"nvram", d.nvram},
		{"managed save", d.managedSave},
		{"agent", d.running != nil && d.running.agent != nil},
	} {
		if trait.has {
			b.WriteString(", " + trait.name)
		}
	}
	b.WriteString("\n")
	c := d.current()
	for _, disk := range disks(&c.def) {
		fmt.Fprintf(b, "  disk %s %s\n", sourceFile(disk), diskFormat(disk))
	}
	for _, i := range interfaces(&c.def) {
		fmt.Fprintf(b, "  interface %s\n", i.MAC.Address)
	}
	for _, s := range slices.Sorted(slices.Values(d.snapshots)) {
		fmt.Fprintf(b, "  snapshot %s\n", s)
	}
	for line := range strings.Lines(c.metadata) {
		fmt.Fprintf(b, "  metadata %s\n", strings.TrimRight(line, "\n"))
	}
}
