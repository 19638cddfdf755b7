package kvm2

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	macA = "52:ab:cd:ef:00:0a"
	macB = "52:ab:cd:ef:00:0b"
)

var (
	guestUUID = MachineUUID("prod", "owner-1")
	otherUUID = MachineUUID("prod", "owner-2")
)

func lease(mac, ip string, minutes int) AddressRecord {
	return AddressRecord{Source: SourceLease, MAC: mac, IP: netip.MustParseAddr(ip), Expiry: testCreated.Add(time.Duration(minutes) * time.Minute)}
}

func agent(mac, ip string) AddressRecord {
	return AddressRecord{Source: SourceAgent, Domain: guestUUID, MAC: mac, IP: netip.MustParseAddr(ip)}
}

func arp(mac, ip string) AddressRecord {
	return AddressRecord{Source: SourceARP, Domain: guestUUID, MAC: mac, IP: netip.MustParseAddr(ip)}
}

func address(source AddressSource, mac, ip string) Address {
	return Address{IP: netip.MustParseAddr(ip), MAC: mac, Source: source}
}

func TestChooseAddresses(t *testing.T) {
	others := agent(macA, "192.0.2.66")
	others.Domain = otherUUID
	othersARP := arp(macA, "192.0.2.66")
	othersARP.Domain = otherUUID
	forever := lease(macA, "192.0.2.9", 0)
	forever.Expiry = time.Time{}

	tests := []struct {
		name    string
		records []AddressRecord
		macs    []string
		want    []Address
		why     string
	}{
		{name: "nothing known", macs: []string{macA}, want: []Address{}, why: "an empty list, not nil: it is no error"},
		{name: "no interface", records: []AddressRecord{lease(macA, "192.0.2.1", 1)}, want: []Address{}},
		{name: "a lease", records: []AddressRecord{lease(macA, "192.0.2.1", 1)}, macs: []string{macA}, want: []Address{address(SourceLease, macA, "192.0.2.1")}},
		{
			name:    "the later lease of two",
			records: []AddressRecord{lease(macA, "192.0.2.200", 10), lease(macA, "192.0.2.1", 60)}, macs: []string{macA},
			want: []Address{address(SourceLease, macA, "192.0.2.1")}, why: "an earlier machine with the same MAC left its lease",
		},
		{
			name:    "one lease of each family",
			records: []AddressRecord{lease(macA, "2001:db8::1", 10), lease(macA, "192.0.2.1", 60), lease(macA, "2001:db8::2", 20), lease(macA, "192.0.2.2", 5)},
			macs:    []string{macA},
			want:    []Address{address(SourceLease, macA, "192.0.2.1"), address(SourceLease, macA, "2001:db8::2")},
		},
		{
			name:    "leases that end together",
			records: []AddressRecord{lease(macA, "192.0.2.2", 10), lease(macA, "192.0.2.1", 10)}, macs: []string{macA},
			want: []Address{address(SourceLease, macA, "192.0.2.2")}, why: "the same one whatever the order of the records",
		},
		{
			name:    "a lease without end",
			records: []AddressRecord{forever, lease(macA, "192.0.2.1", 10)}, macs: []string{macA},
			want: []Address{address(SourceLease, macA, "192.0.2.1")}, why: "an earlier machine's would win for ever, while one with an end was given not long ago",
		},
		{
			name:    "the agent before the lease",
			records: []AddressRecord{lease(macA, "192.0.2.1", 60), agent(macA, "192.0.2.5"), arp(macA, "192.0.2.7")}, macs: []string{macA},
			want: []Address{address(SourceAgent, macA, "192.0.2.5")}, why: "the guest knows",
		},
		{
			name:    "the lease before ARP",
			records: []AddressRecord{arp(macA, "192.0.2.7"), lease(macA, "192.0.2.1", 60)}, macs: []string{macA},
			want: []Address{address(SourceLease, macA, "192.0.2.1")}, why: "an ARP entry may be as old as the earlier machine",
		},
		{name: "ARP alone", records: []AddressRecord{arp(macA, "192.0.2.7")}, macs: []string{macA}, want: []Address{address(SourceARP, macA, "192.0.2.7")}, why: "a static address"},
		{
			name:    "each interface by itself",
			records: []AddressRecord{agent(macB, "198.51.100.1"), lease(macA, "192.0.2.1", 60), lease(macB, "198.51.100.2", 60)}, macs: []string{macA, macB},
			want: []Address{address(SourceLease, macA, "192.0.2.1"), address(SourceAgent, macB, "198.51.100.1")},
		},
		{
			name:    "the order of the interfaces",
			records: []AddressRecord{lease(macA, "192.0.2.1", 60), lease(macB, "10.0.0.1", 60)}, macs: []string{macB, macA},
			want: []Address{address(SourceLease, macB, "10.0.0.1"), address(SourceLease, macA, "192.0.2.1")}, why: "the first interface's addresses stand first",
		},
		{
			name:    "several of one source",
			records: []AddressRecord{agent(macA, "2001:db8::2"), agent(macA, "192.0.2.9"), agent(macA, "2001:db8::1"), agent(macA, "192.0.2.10"), agent(macA, "192.0.2.9")},
			macs:    []string{macA},
			want: []Address{
				address(SourceAgent, macA, "192.0.2.9"), address(SourceAgent, macA, "192.0.2.10"),
				address(SourceAgent, macA, "2001:db8::1"), address(SourceAgent, macA, "2001:db8::2"),
			},
			why: "sorted by value, IPv4 first, each once",
		},
		{
			name: "addresses that reach nobody",
			records: []AddressRecord{
				agent(macA, "127.0.0.1"), agent(macA, "::1"), agent(macA, "169.254.1.1"), agent(macA, "fe80::1"), agent(macA, "fe80::1%eth0"),
				agent(macA, "0.0.0.0"), agent(macA, "::"), agent(macA, "224.0.0.1"), agent(macA, "ff02::1"),
				agent(macA, "::ffff:127.0.0.1"), agent(macA, "::ffff:169.254.1.1"), agent(macA, "::ffff:0.0.0.0"),
			},
			macs: []string{macA}, want: []Address{},
		},
		{
			name:    "an agent that knows link-local addresses only",
			records: []AddressRecord{agent(macA, "fe80::1"), lease(macA, "192.0.2.1", 60)}, macs: []string{macA},
			want: []Address{address(SourceLease, macA, "192.0.2.1")}, why: "it hides nothing",
		},
		{name: "no address in the record", records: []AddressRecord{{Source: SourceAgent, Domain: guestUUID, MAC: macA}}, macs: []string{macA}, want: []Address{}},
		{name: "another's MAC", records: []AddressRecord{lease(macB, "192.0.2.1", 1), agent(macB, "192.0.2.1")}, macs: []string{macA}, want: []Address{}},
		{name: "another domain's agent and ARP", records: []AddressRecord{others, othersARP}, macs: []string{macA}, want: []Address{}, why: "MACs of other machines are theirs to choose"},
		{
			name:    "MAC in another form",
			records: []AddressRecord{lease("52-AB-CD-EF-00-0A", "192.0.2.1", 1), lease("52:AB:CD:EF:00:0B", "192.0.2.2", 1)}, macs: []string{macA, macB},
			want: []Address{address(SourceLease, macA, "192.0.2.1"), address(SourceLease, macB, "192.0.2.2")},
		},
		{
			name:    "IPv4 written as IPv6",
			records: []AddressRecord{agent(macA, "::ffff:192.0.2.1"), agent(macA, "192.0.2.1")}, macs: []string{macA},
			want: []Address{address(SourceAgent, macA, "192.0.2.1")},
		},
		{name: "unknown source", records: []AddressRecord{{Source: "dns", MAC: macA, IP: netip.MustParseAddr("192.0.2.1")}}, macs: []string{macA}, want: []Address{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			for range 8 {
				got := chooseAddresses(tt.records, guestUUID, tt.macs)
				if diff := cmp.Diff(tt.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
					t.Fatalf("addresses differ (-want +got):\n%s%s\nrecords: %v", diff, tt.why, tt.records)
				}
				r.Shuffle(len(tt.records), func(i, j int) { tt.records[i], tt.records[j] = tt.records[j], tt.records[i] })
			}
		})
	}
}

func TestNormalMAC(t *testing.T) {
	for given, want := range map[string]string{
		"52:AB:CD:EF:00:0A": macA, "52-ab-cd-ef-00-0a": macA, "52ab.cdef.000a": macA, "zz": "zz", "": "",
	} {
		if got := normalMAC(given); got != want {
			t.Errorf("normalMAC(%q) = %q, want %q", given, got, want)
		}
	}
}
