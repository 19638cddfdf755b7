package fake

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"

	"github.com/kvm2/kvm2"
)

// The methods in this file are what happens on a host without kvm2's doing. They panic when the object that they are
// about does not exist or is not in a fit state: a test that asks for that has a mistake.

func (h *Host) mustDomain(name string) *domain {
	d := h.domainNamed(name)
	if d == nil {
		panic(fmt.Sprintf("fake: there is no domain %q", name))
	}
	return d
}

func (h *Host) mustRun(name string) *domain {
	d := h.mustDomain(name)
	if d.running == nil {
		panic(fmt.Sprintf("fake: domain %q is not running", name))
	}
	return d
}

func (h *Host) mustPool(name string) *pool {
	p := h.pools[name]
	if p == nil {
		panic(fmt.Sprintf("fake: there is no pool %q", name))
	}
	return p
}

func (h *Host) mustNetwork(name string) *network {
	n := h.networks[name]
	if n == nil {
		panic(fmt.Sprintf("fake: there is no network %q", name))
	}
	return n
}

func (h *Host) mustFile(pool, name string) *file {
	f := h.mustPool(pool).files[name]
	if f == nil {
		panic(fmt.Sprintf("fake: there is no file %q in pool %q", name, pool))
	}
	return f
}

// must panics over an error of an action.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// act runs fn on the host as it is now.
func (h *Host) act(fn func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settle()
	fn()
}

// CrashGuest has a guest's kernel panic. What follows is what the domain's on_crash says; without that it is
// destroyed.
func (h *Host) CrashGuest(domain string) {
	h.act(func() {
		d := h.mustRun(domain)
		switch d.running.config.def.OnCrash {
		case "preserve", "coredump-preserve":
			d.state = state(libvirt.DomainCrashed, libvirt.DomainCrashedPanicked)
		case "restart", "coredump-restart":
			d.state = state(libvirt.DomainRunning, libvirt.DomainRunningCrashed)
			h.wake(d)
		default:
			h.stop(d, state(libvirt.DomainShutoff, libvirt.DomainShutoffCrashed))
		}
	})
}

// PowerOff has a guest switch itself off.
func (h *Host) PowerOff(domain string) {
	h.act(func() { h.stop(h.mustRun(domain), state(libvirt.DomainShutoff, libvirt.DomainShutoffShutdown)) })
}

// PauseIOError pauses a guest as qemu does when the pool has no space left.
func (h *Host) PauseIOError(domain string) {
	h.setState(domain, state(libvirt.DomainPaused, libvirt.DomainPausedIoerror))
}

// Pause pauses a guest as an administrator does.
func (h *Host) Pause(domain string) {
	h.setState(domain, state(libvirt.DomainPaused, libvirt.DomainPausedUser))
}

// ResumeGuest lets a paused guest go on.
func (h *Host) ResumeGuest(domain string) {
	h.setState(domain, state(libvirt.DomainRunning, libvirt.DomainRunningUnpaused))
}

func (h *Host) setState(domain string, s kvm2.LibvirtState) {
	h.act(func() {
		d := h.mustRun(domain)
		d.state = s
		h.wake(d)
	})
}

// ManagedSave saves a running domain's memory to disk and ends it; its next start restores it.
func (h *Host) ManagedSave(domain string) {
	h.act(func() {
		d := h.mustRun(domain)
		if d.persistent == nil {
			panic(fmt.Sprintf("fake: domain %q is transient: libvirt does not save such a domain", domain))
		}
		h.stop(d, state(libvirt.DomainShutoff, libvirt.DomainShutoffSaved))
		d.managedSave = true
	})
}

// AddSnapshot gives a domain a snapshot.
func (h *Host) AddSnapshot(domain, name string) {
	h.act(func() {
		d := h.mustDomain(domain)
		d.snapshots = append(d.snapshots, name)
	})
}

// DefineBehind defines a domain of any XML, without validation against the schema, as another client could.
func (h *Host) DefineBehind(xml string) {
	h.act(func() { must(h.define(xml, unvalidated)) })
}

// AddForeignDomain defines a domain that has nothing to do with kvm2, and returns its UUID.
func (h *Host) AddForeignDomain(name string) kvm2.UUID {
	var uuid kvm2.UUID
	h.act(func() {
		uuid = h.randomUUID()
		must(h.define(fmt.Sprintf("<domain type='%s'><name>%s</name><uuid>%s</uuid><memory unit='MiB'>64</memory>"+
			"<os><type>hvm</type></os></domain>", h.settings.domainTypes[0], name, uuid), unvalidated))
	})
	return uuid
}

// StartBehind starts a domain.
func (h *Host) StartBehind(domain string) {
	h.act(func() { must(h.start(h.mustDomain(domain))) })
}

// DestroyBehind destroys a running domain.
func (h *Host) DestroyBehind(domain string) {
	h.act(func() { must(h.destroy(h.mustDomain(domain))) })
}

// UndefineBehind undefines a domain. If it runs it goes on as a transient one.
func (h *Host) UndefineBehind(domain string) {
	h.act(func() { must(h.undefine(h.mustDomain(domain))) })
}

// SetMetadataBehind replaces a domain's kvm2 metadata; the empty text removes it.
func (h *Host) SetMetadataBehind(domain, xml string) {
	h.act(func() {
		d := h.mustDomain(domain)
		if xml != "" {
			must(d.setMetadata(xml))
			return
		}
		for _, c := range d.configs() {
			c.metadata = ""
		}
	})
}

// SetPoolCapacity changes the size of the file system that a pool is on. The pool shows it after its next refresh.
func (h *Host) SetPoolCapacity(pool string, bytes int64) {
	h.act(func() { h.mustPool(pool).capacity = bytes })
}

// FillPool has others take up all but so many bytes of a pool's file system. The pool shows it after its next
// refresh.
func (h *Host) FillPool(pool string, free int64) {
	h.act(func() {
		p := h.mustPool(pool)
		p.filler = 0
		p.filler = max(0, p.free()-free)
	})
}

// StopPool deactivates a pool.
func (h *Host) StopPool(pool string) { h.act(func() { h.mustPool(pool).active = false }) }

// StartPool activates a pool, which refreshes it.
func (h *Host) StartPool(pool string) {
	h.act(func() {
		p := h.mustPool(pool)
		p.active = true
		p.refresh()
	})
}

// RefreshPool has a pool look at its directory and file system again, as an administrator does after making changes
// there. libvirt does so by itself when a pool is started.
func (h *Host) RefreshPool(pool string) {
	h.act(func() {
		p, err := h.activePool(pool)
		must(err)
		p.refresh()
	})
}

// StopNetwork deactivates a network.
func (h *Host) StopNetwork(network string) { h.act(func() { h.mustNetwork(network).active = false }) }

// StartNetwork activates a network.
func (h *Host) StartNetwork(network string) {
	h.act(func() {
		h.mustNetwork(network).active = true
		h.wakeAll()
	})
}

// AddLease gives a network a DHCP lease of a client that no guest of the host is.
func (h *Host) AddLease(network, mac string, ip netip.Addr, expiry time.Time) {
	h.act(func() {
		n := h.mustNetwork(network)
		h.addLease(n, &lease{mac: mac, client: "added " + ip.String(), ip: ip, expiry: expiry})
	})
}

// ExpireLeases ends all leases of a network. Guests that run get theirs anew.
func (h *Host) ExpireLeases(network string) {
	h.act(func() {
		for _, l := range h.mustNetwork(network).leasesOf(nil) {
			h.dropLease(l)
		}
		h.wakeAll()
	})
}

// ConnectAgent connects a running guest's agent. It reports loopback addresses, and the given ones for the first
// interface.
func (h *Host) ConnectAgent(domain string, addresses ...netip.Addr) {
	h.act(func() { h.mustRun(domain).running.agent = &guestAgent{slices.Clone(addresses)} })
}

// DisconnectAgent disconnects a running guest's agent.
func (h *Host) DisconnectAgent(domain string) {
	h.act(func() { h.mustRun(domain).running.agent = nil })
}

// AddVolume makes a volume with content.
func (h *Host) AddVolume(pool, name string, content []byte) {
	h.act(func() {
		p := h.mustPool(pool)
		f := h.putFile(p, name, content)
		p.know(&volume{name: name, head: probe(f)})
		p.measure()
	})
}

// AddFile puts a file into a pool's directory. The pool does not know it until its next refresh.
func (h *Host) AddFile(pool, name string, content []byte) {
	h.act(func() { h.putFile(h.mustPool(pool), name, content) })
}

func (h *Host) putFile(p *pool, name string, content []byte) *file {
	p.unlink(name)
	f := h.newFile(p.pathOf(name))
	f.write(content, 0)
	p.link(name, f)
	return f
}

// CorruptVolume overwrites the start of a volume's file with zeros.
func (h *Host) CorruptVolume(pool, name string) {
	h.act(func() {
		f := h.mustFile(pool, name)
		f.write(make([]byte, min(blockBytes, f.size)), 0)
	})
}

// DeleteVolumeBehind deletes a volume.
func (h *Host) DeleteVolumeBehind(pool, name string) {
	h.act(func() {
		_, v, err := h.volumeNamed(pool, name)
		must(err)
		h.mustPool(pool).deleteVolume(v)
	})
}

// RemoveFile deletes a file in a pool's directory. The pool does not notice before its next refresh.
func (h *Host) RemoveFile(pool, name string) {
	h.act(func() {
		h.mustFile(pool, name)
		h.mustPool(pool).unlink(name)
	})
}

// RestartDaemon restarts libvirtd: all sessions are lost, guests run on, and why a domain is shut off is forgotten.
func (h *Host) RestartDaemon() {
	h.act(func() {
		for _, d := range h.domains {
			if d.running == nil {
				d.state = state(libvirt.DomainShutoff, libvirt.DomainShutoffUnknown)
			}
		}
	})
	h.dropSessions(errLost)
}

// DropSessions loses all sessions, as when the network fails.
func (h *Host) DropSessions() { h.dropSessions(errLost) }
