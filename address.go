package kvm2

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
)

// chooseAddresses picks a machine's addresses out of what the host reported. A source that is believed more hides
// the others of the same interface; of leases only the one with the latest expiry counts in each address family,
// since a lease of an earlier machine with the same MAC lives on until it expires.
func chooseAddresses(records []AddressRecord, uuid UUID, macs []string) []Address {
	out := []Address{}
	for _, mac := range macs {
		for _, source := range []AddressSource{SourceAgent, SourceLease, SourceARP} {
			found := addressesOf(records, uuid, mac, source)
			if len(found) > 0 {
				out = append(out, found...)
				break
			}
		}
	}
	return out
}

// byMAC sorts records by interface, so that a list of many machines need not look at all records for each of them.
func byMAC(records []AddressRecord) map[string][]AddressRecord {
	out := map[string][]AddressRecord{}
	for _, r := range records {
		mac := normalMAC(r.MAC)
		out[mac] = append(out[mac], r)
	}
	return out
}

func recordsOf(sorted map[string][]AddressRecord, macs []string) []AddressRecord {
	var out []AddressRecord
	for _, mac := range macs {
		out = append(out, sorted[mac]...)
	}
	return out
}

// addressesOf returns what one source says of one interface, sorted.
func addressesOf(records []AddressRecord, uuid UUID, mac string, source AddressSource) []Address {
	var of []AddressRecord
	for _, r := range records {
		own := source == SourceLease || r.Domain == uuid
		if r.Source == source && own && normalMAC(r.MAC) == mac && usable(r.IP) {
			of = append(of, r)
		}
	}
	if source == SourceLease {
		of = newestLeases(of)
	}
	var out []Address
	for _, r := range of {
		out = append(out, Address{IP: r.IP.Unmap(), MAC: mac, Source: source})
	}
	slices.SortFunc(out, func(a, b Address) int { return a.IP.Compare(b.IP) })
	return slices.Compact(out)
}

// newestLeases keeps one lease of each address family.
func newestLeases(leases []AddressRecord) []AddressRecord {
	newest := map[bool]AddressRecord{}
	for _, l := range leases {
		v4 := l.IP.Unmap().Is4()
		if old, ok := newest[v4]; !ok || cmp.Or(l.Expiry.Compare(old.Expiry), l.IP.Compare(old.IP)) > 0 {
			newest[v4] = l
		}
	}
	var out []AddressRecord
	for _, l := range newest {
		out = append(out, l)
	}
	return out
}

func usable(ip netip.Addr) bool {
	ip = ip.Unmap()
	return ip.IsValid() && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && !ip.IsUnspecified() && !ip.IsMulticast()
}

// normalMAC writes a MAC in lower case with colons; what is none stays as it is.
func normalMAC(s string) string {
	mac, err := net.ParseMAC(s)
	if err != nil {
		return s
	}
	return mac.String()
}

func (m metadata) macs() []string {
	var macs []string
	for _, i := range m.Interfaces {
		macs = append(macs, normalMAC(i.MAC))
	}
	return macs
}
