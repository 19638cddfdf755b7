package fake

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"

	"github.com/kvm2/kvm2"
)

// A network is a virtual network with a DHCP server.
type network struct {
	name    string
	subnet  netip.Prefix
	active  bool
	leases  map[string][]*lease // by MAC in lower case, in the order in which they were given
	holders map[netip.Addr]int  // how many leases an address has; AddLease may give it more than one
	full    bool                // no address was free, and no lease has ended since
}

func newNetwork(s networkSetting) *network {
	return &network{name: s.name, subnet: s.subnet, active: true, leases: map[string][]*lease{}, holders: map[netip.Addr]int{}}
}

// A lease belongs to a MAC and a client ID. A guest made anew has the MAC of its predecessor and another client ID,
// so that it gets a lease of its own beside the old one.
type lease struct {
	mac     string
	client  string
	ip      netip.Addr
	expiry  time.Time
	network *network
	event   event
}

// The times of the DHCP server that libvirt runs.
const (
	leaseTime = time.Hour
	renewTime = leaseTime / 2
)

// A nic is an interface of a running guest on a network.
type nic struct {
	mac     string
	network *network
	bound   time.Time // when it first got its lease; zero before
}

// A guestAgent is a connected QEMU guest agent.
type guestAgent struct{ addresses []netip.Addr }

func (h *Host) networkNamed(name string) (*network, error) {
	n := h.networks[name]
	if n == nil {
		return nil, answer(codeNoNetwork, "Network not found: no network with matching name '%s'", name)
	}
	return n, nil
}

// settle brings the host up to the present: guests that have booted meanwhile ask for leases, old leases expire.
func (h *Host) settle() {
	now := time.Now()
	var asking []*domain
	for e := h.agenda.next(now); e != nil; e = h.agenda.next(now) {
		if e.lease != nil {
			h.expire(e.lease, now)
		} else {
			asking = append(asking, e.domain)
		}
	}
	// Two guests may want one address: by name, so that it is the same one each time who gets it.
	slices.SortFunc(asking, func(a, b *domain) int { return cmp.Compare(a.name, b.name) })
	for _, d := range slices.Compact(asking) {
		h.renew(d, now)
	}
}

// wake has a guest ask for its leases at the next settling: after its start, or when something that it waited for may
// have come.
func (h *Host) wake(d *domain) {
	if d.running != nil {
		h.agenda.put(&d.running.event, time.Time{})
	}
}

func (h *Host) wakeAll() {
	for _, d := range h.domains {
		h.wake(d)
	}
}

// expire ends a lease that was not renewed.
func (h *Host) expire(l *lease, now time.Time) {
	if l.expiry.After(now) {
		h.agenda.put(&l.event, l.expiry)
		return
	}
	h.dropLease(l)
}

// dropLease takes a lease away. Guests that found the subnet full ask again.
func (h *Host) dropLease(l *lease) {
	n, mac := l.network, strings.ToLower(l.mac)
	h.agenda.cancel(&l.event)
	n.leases[mac] = slices.DeleteFunc(n.leases[mac], func(other *lease) bool { return other == l })
	if len(n.leases[mac]) == 0 {
		delete(n.leases, mac)
	}
	if n.holders[l.ip]--; n.holders[l.ip] == 0 {
		delete(n.holders, l.ip)
	}
	if n.full {
		n.full = false
		h.wakeAll()
	}
}

// addLease gives a network a lease.
func (h *Host) addLease(n *network, l *lease) {
	mac := strings.ToLower(l.mac)
	l.network, l.event = n, event{lease: l}
	n.leases[mac] = append(n.leases[mac], l)
	n.holders[l.ip]++
	h.agenda.put(&l.event, l.expiry)
}

// client is the guest's DHCP client ID. It comes from the root disk, and is as old as that.
func (g *guest) client(d *domain) string {
	if len(g.files) == 0 {
		return d.uuid.String()
	}
	return "inode " + strconv.FormatInt(g.files[0].inode, 10)
}

// renew has a guest ask for its leases if it runs and has booted, and decides when it does so again.
func (h *Host) renew(d *domain, now time.Time) {
	g := d.running
	if g == nil || d.state.State != int(libvirt.DomainRunning) {
		return // it is woken when it goes on
	}
	booted := g.since.Add(h.settings.boot)
	if booted.After(now) {
		h.agenda.put(&g.event, booted)
		return
	}
	next := now.Add(renewTime)
	for _, nic := range g.nics {
		if !nic.network.active {
			continue
		}
		if nic.bound.IsZero() {
			nic.bound = booted
		}
		renewed := nic.bound.Add(now.Sub(nic.bound).Truncate(renewTime))
		h.grant(nic.network, nic.mac, g.client(d), renewed.Add(leaseTime))
		if again := renewed.Add(renewTime); again.Before(next) {
			next = again
		}
	}
	h.agenda.put(&g.event, next)
}

// grant gives or renews a lease.
func (h *Host) grant(n *network, mac, client string, expiry time.Time) {
	if l := n.leaseOf(mac, client); l != nil {
		l.expiry = expiry // its event comes too early now, and is planned anew then
		return
	}
	if ip, ok := n.freeAddress(mac); ok {
		h.addLease(n, &lease{mac: mac, client: client, ip: ip, expiry: expiry})
	}
}

// leaseOf finds a client's lease.
func (n *network) leaseOf(mac, client string) *lease {
	for _, l := range n.leases[mac] {
		if l.client == client {
			return l
		}
	}
	return nil
}

// freeAddress picks an address as dnsmasq does: by a hash of the MAC, and if that is taken the next one that is free.
// So the order in which guests start does not matter.
func (n *network) freeAddress(mac string) (netip.Addr, bool) {
	if n.full {
		return netip.Addr{}, false
	}
	hosts := uint32(1)<<(32-n.subnet.Bits()) - 3 // without the network's own, its broadcast, and the host's address
	digest := fnv.New32a()
	_, _ = digest.Write([]byte(mac)) // a hash does not fail
	start := digest.Sum32() % hosts
	for i := range hosts {
		ip := nth(n.subnet, 2+(start+i)%hosts)
		if n.holders[ip] == 0 {
			return ip, true
		}
	}
	n.full = true
	return netip.Addr{}, false
}

// nth is the address with the given number in a subnet.
func nth(subnet netip.Prefix, number uint32) netip.Addr {
	first := subnet.Addr().As4()
	var ip [4]byte
	binary.BigEndian.PutUint32(ip[:], binary.BigEndian.Uint32(first[:])+number)
	return netip.AddrFrom4(ip)
}

func (h *Host) addresses(query kvm2.AddressQuery) []kvm2.AddressRecord {
	var out []kvm2.AddressRecord
	for _, name := range query.Networks {
		if n := h.networks[name]; n != nil && n.active {
			out = append(out, n.records(query.MACs)...)
		}
	}
	for _, uuid := range query.Domains {
		if d := h.domains[uuid]; d != nil && d.running != nil {
			out = append(out, d.agentRecords()...)
			out = append(out, d.arpRecords()...)
		}
	}
	return out
}

// records are the leases of some MACs, all of them if there are none, by MAC and address.
func (n *network) records(macs []string) []kvm2.AddressRecord {
	var out []kvm2.AddressRecord
	for _, l := range n.leasesOf(macs) {
		// libvirt knows the expiry to the second.
		out = append(out, kvm2.AddressRecord{Source: kvm2.SourceLease, MAC: l.mac, IP: l.ip, Expiry: l.expiry.Truncate(time.Second)})
	}
	slices.SortStableFunc(out, func(a, b kvm2.AddressRecord) int {
		return cmp.Or(cmp.Compare(a.MAC, b.MAC), a.IP.Compare(b.IP))
	})
	return out
}

func (n *network) leasesOf(macs []string) []*lease {
	if len(macs) == 0 {
		return slices.Concat(slices.Collect(maps.Values(n.leases))...)
	}
	var wanted []string
	for _, mac := range macs {
		wanted = append(wanted, strings.ToLower(mac))
	}
	slices.Sort(wanted)
	var out []*lease
	for _, mac := range slices.Compact(wanted) {
		out = append(out, n.leases[mac]...)
	}
	return out
}

// agentRecords are what the guest agent tells: all of the guest's addresses, loopback included.
func (d *domain) agentRecords() []kvm2.AddressRecord {
	if d.running.agent == nil {
		return nil
	}
	record := func(mac string, ip netip.Addr) kvm2.AddressRecord {
		return kvm2.AddressRecord{Source: kvm2.SourceAgent, Domain: d.uuid, MAC: mac, IP: ip}
	}
	const noMAC = "00:00:00:00:00:00"
	out := []kvm2.AddressRecord{
		record(noMAC, netip.MustParseAddr("127.0.0.1")),
		record(noMAC, netip.IPv6Loopback()),
	}
	mac := noMAC
	if nics := interfaces(&d.running.config.def); len(nics) > 0 {
		mac = nics[0].MAC.Address
	}
	for _, ip := range d.running.agent.addresses {
		out = append(out, record(mac, ip))
	}
	return out
}

// arpRecords are what the host's own kernel knows: the addresses that the guest uses.
func (d *domain) arpRecords() []kvm2.AddressRecord {
	client := d.running.client(d)
	var out []kvm2.AddressRecord
	for _, nic := range d.running.nics {
		if l := nic.network.leaseOf(nic.mac, client); l != nil && nic.network.active {
			out = append(out, kvm2.AddressRecord{Source: kvm2.SourceARP, Domain: d.uuid, MAC: l.mac, IP: l.ip})
		}
	}
	return out
}
