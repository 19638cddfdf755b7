package fake

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"

	"github.com/kvm2/kvm2"
)

// A network is a virtual network with a DHCP server.
type network struct {
	name   string
	subnet netip.Prefix
	active bool
	leases []lease
}

// A lease belongs to a MAC and a client ID. A guest made anew has the MAC of its predecessor and another client ID,
// so that it gets a lease of its own beside the old one.
type lease struct {
	mac    string
	client string
	ip     netip.Addr
	expiry time.Time
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
	for _, n := range h.networks {
		n.leases = slices.DeleteFunc(n.leases, func(l lease) bool { return !l.expiry.After(now) })
	}
	for _, d := range h.sortedDomains() {
		if d.running != nil && d.state.State == int(libvirt.DomainRunning) {
			d.running.renew(d.running.client(d), now, h.settings.boot)
		}
	}
}

// client is the guest's DHCP client ID. It comes from the root disk, and is as old as that.
func (g *guest) client(d *domain) string {
	if len(g.files) == 0 {
		return d.uuid.String()
	}
	return "inode " + strconv.FormatInt(g.files[0].inode, 10)
}

func (g *guest) renew(client string, now time.Time, boot time.Duration) {
	booted := g.since.Add(boot)
	if booted.After(now) {
		return
	}
	for _, nic := range g.nics {
		if !nic.network.active {
			continue
		}
		if nic.bound.IsZero() {
			nic.bound = booted
		}
		renewed := nic.bound.Add(now.Sub(nic.bound).Truncate(renewTime))
		nic.network.grant(nic.mac, client, renewed.Add(leaseTime))
	}
}

// grant gives or renews a lease.
func (n *network) grant(mac, client string, expiry time.Time) {
	for i, l := range n.leases {
		if l.mac == mac && l.client == client {
			n.leases[i].expiry = expiry
			return
		}
	}
	if ip, ok := n.freeAddress(mac); ok {
		n.leases = append(n.leases, lease{mac, client, ip, expiry})
	}
}

// freeAddress picks an address as dnsmasq does: by a hash of the MAC, and if that is taken the next one that is free.
// So the order in which guests start does not matter.
func (n *network) freeAddress(mac string) (netip.Addr, bool) {
	hosts := uint32(1)<<(32-n.subnet.Bits()) - 3 // without the network's own, its broadcast, and the host's address
	digest := fnv.New32a()
	_, _ = digest.Write([]byte(mac)) // a hash does not fail
	start := digest.Sum32() % hosts
	for i := range hosts {
		ip := nth(n.subnet, 2+(start+i)%hosts)
		if !slices.ContainsFunc(n.leases, func(l lease) bool { return l.ip == ip }) {
			return ip, true
		}
	}
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
			out = append(out, n.records()...)
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

func (n *network) records() []kvm2.AddressRecord {
	var out []kvm2.AddressRecord
	for _, l := range n.leases {
		// libvirt knows the expiry to the second.
		out = append(out, kvm2.AddressRecord{Source: kvm2.SourceLease, MAC: l.mac, IP: l.ip, Expiry: l.expiry.Truncate(time.Second)})
	}
	slices.SortFunc(out, func(a, b kvm2.AddressRecord) int {
		return cmp.Or(cmp.Compare(a.MAC, b.MAC), a.IP.Compare(b.IP))
	})
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
		for _, l := range nic.network.leases {
			if l.mac == nic.mac && l.client == client && nic.network.active {
				out = append(out, kvm2.AddressRecord{Source: kvm2.SourceARP, Domain: d.uuid, MAC: l.mac, IP: l.ip})
			}
		}
	}
	return out
}
