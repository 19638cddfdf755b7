package fake

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2"
)

// A domain is one domain: persistent, running, or both.
type domain struct {
	name string
	uuid kvm2.UUID

	persistent *config // nil: transient
	running    *guest  // nil: not running
	state      kvm2.LibvirtState

	nvram       bool
	managedSave bool
	snapshots   []string
}

// A guest is the life of a domain from its start to its end.
type guest struct {
	config *config
	since  time.Time
	files  []*file     // what qemu holds open
	writes []*file     // those of them that it holds locked for writing
	nics   []*nic      // those on libvirt networks
	agent  *guestAgent // nil: not connected
	event  event       // it asks for its leases
}

// state pairs libvirt's numbers.
func state[R ~int32](s libvirt.DomainState, reason R) kvm2.LibvirtState {
	return kvm2.LibvirtState{State: int(s), Reason: int(reason)}
}

func (h *Host) domainNamed(name string) *domain { return h.byName[name] }

func (h *Host) addDomain(d *domain) { h.domains[d.uuid], h.byName[d.name] = d, d }

func (h *Host) removeDomain(d *domain) {
	delete(h.domains, d.uuid)
	delete(h.byName, d.name)
}

// sortedDomains returns the domains by name.
func (h *Host) sortedDomains() []*domain {
	return slices.SortedFunc(maps.Values(h.domains), func(a, b *domain) int { return cmp.Compare(a.name, b.name) })
}

func (h *Host) listDomains() []kvm2.Domain {
	var out []kvm2.Domain
	for _, d := range h.sortedDomains() {
		out = append(out, d.seen())
	}
	return out
}

// current is the configuration that a question without flags is about: the running one if there is one.
func (d *domain) current() *config {
	if d.running != nil {
		return d.running.config
	}
	return d.persistent
}

func (d *domain) seen() kvm2.Domain {
	return kvm2.Domain{Name: d.name, UUID: d.uuid, State: d.state, Metadata: d.current().metadata}
}

// define makes or replaces a persistent configuration. Only a domain that is quite new is shut off by it.
func (h *Host) define(source string, v validation) error {
	c, err := h.parseDomain(source, v)
	if err != nil {
		return err
	}
	uuid, err := kvm2.ParseUUID(c.def.UUID)
	if err != nil {
		return err
	}
	d := h.domains[uuid]
	if d != nil && d.name != c.def.Name {
		return answer(codeOperationFailed, "operation failed: domain '%s' is already defined with uuid %s", d.name, uuid)
	}
	if other := h.domainNamed(c.def.Name); other != nil && other != d {
		return answer(codeOperationFailed, "operation failed: domain '%s' already exists with uuid %s", other.name, other.uuid)
	}
	if d == nil {
		d = &domain{name: c.def.Name, uuid: uuid, state: state(libvirt.DomainShutoff, libvirt.DomainShutoffUnknown)}
		h.addDomain(d)
	}
	d.persistent = c
	return nil
}

func (h *Host) start(d *domain) error {
	if d.running != nil {
		return invalidOperation("domain is already running")
	}
	g, err := h.boot(d.persistent.clone())
	if err != nil {
		d.state = state(libvirt.DomainShutoff, libvirt.DomainShutoffFailed)
		return err
	}
	d.running = g
	d.state = state(libvirt.DomainRunning, libvirt.DomainRunningBooted)
	if d.managedSave {
		d.managedSave = false
		d.state = state(libvirt.DomainRunning, libvirt.DomainRunningRestored)
	}
	d.nvram = d.nvram || wantsEFI(&g.config.def)
	g.event.domain = d
	h.wake(d)
	h.settle()
	return nil
}

// boot does what has to succeed before a guest runs, in libvirt's order.
func (h *Host) boot(c *config) (*guest, error) {
	if wantsEFI(&c.def) && !h.settings.efi {
		return nil, answer(codeOperationFailed, "operation failed: Unable to find any firmware to satisfy 'efi'")
	}
	g := &guest{config: c, since: time.Now()}
	for _, prepare := range []func(*guest) error{h.plugNetworks, h.openDisks, h.allocateMemory} {
		if err := prepare(g); err != nil {
			return nil, err
		}
	}
	for _, f := range g.files {
		f.opened++
	}
	for _, f := range g.writes {
		f.locked = true
	}
	return g, nil
}

func (h *Host) plugNetworks(g *guest) error {
	for _, i := range interfaces(&g.config.def) {
		if i.Source == nil || i.Source.Network == nil {
			continue
		}
		n, err := h.networkNamed(i.Source.Network.Network)
		if err != nil {
			return err
		}
		if !n.active {
			return invalidOperation("network '%s' is not active", n.name)
		}
		g.nics = append(g.nics, &nic{mac: strings.ToLower(i.MAC.Address), network: n})
	}
	return nil
}

func (h *Host) allocateMemory(g *guest) error {
	need, err := memoryBytes(&g.config.def)
	if err != nil {
		return err
	}
	if need > h.settings.memory {
		return answer(codeInternal, "internal error: qemu unexpectedly closed the monitor: %s qemu-system-%s: "+
			"cannot set up guest memory 'pc.ram': Cannot allocate memory", qemuTime(), h.settings.arch)
	}
	return nil
}

// qemuTime is the time stamp that qemu puts before its messages.
func qemuTime() string { return time.Now().UTC().Format("2006-01-02T15:04:05.000000Z") }

func (h *Host) openDisks(g *guest) error {
	for _, disk := range disks(&g.config.def) {
		path, err := h.diskPath(disk)
		if err != nil {
			return err
		}
		if path == "" {
			continue
		}
		chain, err := h.openChain(path, diskFormat(disk))
		if err != nil {
			return err
		}
		if err := h.lockImage(g, disk, chain[0]); err != nil {
			return err
		}
		g.files = append(g.files, chain...)
	}
	return nil
}

// lockImage takes qemu's image lock: no two guests may write to one file.
func (h *Host) lockImage(g *guest, disk libvirtxml.DomainDisk, f *file) error {
	if disk.ReadOnly != nil || disk.Shareable != nil || disk.Device == "cdrom" {
		return nil
	}
	if f.locked {
		return answer(codeInternal, "internal error: process exited while connecting to monitor: %s qemu-system-%s: "+
			"Failed to get \"write\" lock\nIs another process using the image [%s]?", qemuTime(), h.settings.arch, f.path)
	}
	g.writes = append(g.writes, f)
	return nil
}

func diskFormat(d libvirtxml.DomainDisk) string {
	if d.Driver == nil || d.Driver.Type == "" {
		return "raw"
	}
	return d.Driver.Type
}

// diskPath returns the file of a disk; empty for a drive without a medium.
func (h *Host) diskPath(d libvirtxml.DomainDisk) (string, error) {
	switch {
	case d.Source == nil:
		return "", nil
	case d.Source.File != nil:
		return d.Source.File.File, nil
	case d.Source.Volume != nil:
		return h.volumeDiskPath(d.Source.Volume)
	}
	return "", unsupported("a disk that is neither a file nor a volume")
}

func (h *Host) volumeDiskPath(source *libvirtxml.DomainDiskSourceVolume) (string, error) {
	p, err := h.poolNamed(source.Pool)
	if err != nil {
		return "", err
	}
	if !p.active {
		return "", answer(codeUnsupported, "unsupported configuration: storage pool '%s' containing volume '%s' is not active",
			source.Pool, source.Volume)
	}
	_, v, err := h.volumeNamed(source.Pool, source.Volume)
	if err != nil {
		return "", err
	}
	return p.pathOf(v.name), nil
}

// openChain opens a disk's file and what it stands on.
func (h *Host) openChain(path, format string) ([]*file, error) {
	f := h.fileAt(path)
	if f == nil {
		return nil, missingFile("Cannot access storage file '%s'", path)
	}
	chain := []*file{f}
	for format == "qcow2" {
		head := probe(f)
		if head.format != "qcow2" {
			return nil, answer(codeInternal, "internal error: qemu unexpectedly closed the monitor: %s qemu-system-%s: "+
				"-blockdev {\"node-name\":\"libvirt-1-format\",\"read-only\":false,\"driver\":\"qcow2\",\"file\":\"libvirt-1-storage\","+
				"\"backing\":null}: Image is not in qcow2 format", qemuTime(), h.settings.arch)
		}
		if head.backingPath == "" {
			break
		}
		below := h.fileAt(relativeTo(f.path, head.backingPath))
		if below == nil {
			return nil, missingFile("Cannot access backing file '%s' of storage file '%s' (as uid:65534, gid:65534)",
				head.backingPath, f.path)
		}
		if slices.Contains(chain, below) {
			return nil, answer(codeInternal, "internal error: backing store for %s is self-referential", f.path)
		}
		chain = append(chain, below)
		f, format = below, head.backingFormat
	}
	return chain, nil
}

// stop ends a running guest. A transient domain goes with it.
func (h *Host) stop(d *domain, s kvm2.LibvirtState) {
	h.settle()
	for _, f := range d.running.writes {
		f.locked = false
	}
	for _, f := range d.running.files {
		f.close()
	}
	h.agenda.cancel(&d.running.event)
	d.running = nil
	d.state = s
	if d.persistent == nil {
		h.removeDomain(d)
	}
}

func (h *Host) destroy(d *domain) error {
	if d.running == nil {
		return invalidOperation("domain is not running")
	}
	h.stop(d, state(libvirt.DomainShutoff, libvirt.DomainShutoffDestroyed))
	return nil
}

func (h *Host) undefine(d *domain) error {
	if d.persistent == nil {
		return invalidOperation("cannot undefine transient domain")
	}
	d.persistent = nil
	d.nvram, d.managedSave, d.snapshots = false, false, nil
	if d.running == nil {
		h.removeDomain(d)
	}
	return nil
}

// setMetadata replaces kvm2's element in both configurations.
func (d *domain) setMetadata(source string) error {
	if err := checkMessage(source); err != nil {
		return err
	}
	nodes, err := parseNodes(source)
	if err != nil || len(nodes) != 1 {
		return answer(codeXMLDetail, "(metadata_xml):1: the metadata are not one well-formed element")
	}
	element := nodes[0].print()
	for _, c := range d.configs() {
		c.metadata = element
	}
	return nil
}

// configs are the configurations that the domain has.
func (d *domain) configs() []*config {
	var out []*config
	if d.persistent != nil {
		out = append(out, d.persistent)
	}
	if d.running != nil {
		out = append(out, d.running.config)
	}
	return out
}
