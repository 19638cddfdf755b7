package kvm2test

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/kvm2/kvm2"
)

// disk is a disk on a volume of this case, which the domain is told to be qcow2.
func (s *seam) disk(part string) string { return diskAt(s.volume(part).Path) }

func diskAt(path string) string {
	return fmt.Sprintf("<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='%s'/>"+
		"<target dev='vda' bus='virtio'/></disk>", escaped(path))
}

// started defines and starts a domain.
func (s *seam) started(part, devices string) {
	s.Helper()
	d := s.spec(part)
	d.metadata, d.devices = mark("a"), devices
	s.define(d)
	s.must(s.conn.StartDomain(s.ctx, s.uuid(part)))
}

func (s *seam) wantState(part string, want kvm2.LibvirtState) {
	s.Helper()
	if got := s.domain(part).State; got != want {
		s.Errorf("got state %+v, want %+v", got, want)
	}
}

func (s *seam) destroy(part string) {
	s.Helper()
	s.must(s.conn.DestroyDomain(s.ctx, s.uuid(part), kvm2.DestroyForced))
}

func guestCases() []seamCase {
	return append(failedStartCases(), []seamCase{
		{"StartDomain/Runs", "A started domain runs, for the reason that it was booted.", needStart, func(s *seam) {
			s.started("d", "")
			s.wantState("d", runningBooted)
			if own := s.own(get[[]kvm2.Domain](s, "Domains")(s.conn.Domains(s.ctx))); len(own) != 1 || own[0] != s.domain("d") {
				s.Errorf("got %+v, want the list to show what the look-up shows", own)
			}
		}},
		{"StartDomain/Twice", "Starting a running domain is code 55, and it goes on.", needStart, func(s *seam) {
			s.started("d", "")
			s.wantCode(s.conn.StartDomain(s.ctx, s.uuid("d")), 55)
			s.wantState("d", runningBooted)
		}},
		{"StartDomain/Again", "A destroyed domain can be started again.", needStart, func(s *seam) {
			s.started("d", "")
			s.destroy("d")
			s.must(s.conn.StartDomain(s.ctx, s.uuid("d")))
			s.wantState("d", runningBooted)
		}},
		{"StartDomain/OneWriter", "A disk that one guest writes to cannot be started by another as long as that runs.", needStart, func(s *seam) {
			s.qcow2Volume("v", 1<<20)
			s.started("a", s.disk("v"))
			b := s.spec("b")
			b.devices = s.disk("v")
			s.define(b)
			s.wantCode(s.conn.StartDomain(s.ctx, s.uuid("b")), 1)
			s.wantState("a", runningBooted)
			s.destroy("a")
			s.must(s.conn.StartDomain(s.ctx, s.uuid("b")))
		}},
		{"DestroyDomain/Forced", "A domain that is destroyed by force is shut off, for the reason that it was destroyed.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.DestroyDomain(s.ctx, s.uuid("d"), kvm2.DestroyForced))
			s.wantState("d", shutOffDestroyed)
		}},
		{"DestroyDomain/Graceful", "A domain that is destroyed with grace is shut off, for the reason that it was destroyed.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.DestroyDomain(s.ctx, s.uuid("d"), kvm2.DestroyGraceful))
			s.wantState("d", shutOffDestroyed)
		}},
		{"DefineDomain/WhileRunning", "Redefining a running domain succeeds; what is reported stays that of the running one until it ends.", needStart, func(s *seam) {
			s.started("d", "")
			s.wantMark(s.define(s.spec("d")), "a")
			s.wantState("d", runningBooted)
			s.destroy("d")
			s.wantMark(s.domain("d"), "")
		}},
		{"SetDomainMetadata/WhileRunning", "Metadata that are set on a running domain show at once, and when it has ended.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.SetDomainMetadata(s.ctx, s.uuid("d"), bareMark("b")))
			s.wantMark(s.domain("d"), "b")
			s.destroy("d")
			s.wantMark(s.domain("d"), "b")
		}},
		{"SetDomainMetadata/Transient", "Metadata can be set on a running domain that has no persistent configuration.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.UndefineDomain(s.ctx, s.uuid("d")))
			s.must(s.conn.SetDomainMetadata(s.ctx, s.uuid("d"), bareMark("b")))
			s.wantMark(s.domain("d"), "b")
		}},
		{"UndefineDomain/WhileRunning", "An undefined domain that runs goes on, and is gone when it ends.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.UndefineDomain(s.ctx, s.uuid("d")))
			s.wantState("d", runningBooted)
			s.destroy("d")
			_, err := s.conn.DomainByUUID(s.ctx, s.uuid("d"))
			s.wantCode(err, 42)
		}},
		{"UndefineDomain/Transient", "Undefining a domain that has no persistent configuration is code 55.", needStart, func(s *seam) {
			s.started("d", "")
			s.must(s.conn.UndefineDomain(s.ctx, s.uuid("d")))
			s.wantCode(s.conn.UndefineDomain(s.ctx, s.uuid("d")), 55)
		}},
		{"DeleteVolume/InUse", "A running domain's disk can be deleted. The domain goes on, and does not start again.", needStart, func(s *seam) {
			s.qcow2Volume("v", 1<<20)
			s.started("d", s.disk("v"))
			s.must(s.conn.DeleteVolume(s.ctx, s.caps.Pool, s.name("v")))
			s.wantState("d", runningBooted)
			s.destroy("d")
			s.wantCode(s.conn.StartDomain(s.ctx, s.uuid("d")), 38)
		}},
	}...)
}

func failedStartCases() []seamCase {
	var cases []seamCase
	for _, r := range []struct {
		name, rule string
		code       int
		devices    func(*seam) string
	}{
		{"NoDisk", "A disk without its file is code 38.", 38, func(s *seam) string {
			return diskAt(s.pool().TargetPath + "/" + s.name("none"))
		}},
		{"NoBackingFile", "A disk whose backing file is gone is code 38.", 38, func(s *seam) string {
			s.qcow2Volume("base", 1<<20)
			s.overlay("v", 1<<20)
			devices := s.disk("v")
			s.must(s.conn.DeleteVolume(s.ctx, s.caps.Pool, s.name("base")))
			return devices
		}},
		{"NotQcow2", "A disk that is not in the format that its domain declares is code 1.", 1, func(s *seam) string {
			s.rawVolume("v", 1<<20)
			return s.disk("v")
		}},
		{"NoNetwork", "An interface on a network that does not exist is code 43.", 43, func(s *seam) string {
			return fmt.Sprintf("<interface type='network'><source network='%s'/><model type='virtio'/></interface>", s.name("none"))
		}},
	} {
		cases = append(cases, seamCase{"StartDomain/" + r.name, r.rule + " It leaves the domain shut off, for the reason that it failed.", needStart, func(s *seam) {
			d := s.spec("d")
			d.devices = r.devices(s)
			s.define(d)
			s.wantCode(s.conn.StartDomain(s.ctx, s.uuid("d")), r.code)
			s.wantState("d", shutOffFailed)
		}})
	}
	return cases
}

func addressCases() []seamCase {
	ask := func(s *seam, q kvm2.AddressQuery) []kvm2.AddressRecord {
		s.Helper()
		return get[[]kvm2.AddressRecord](s, "Addresses")(s.conn.Addresses(s.ctx, q))
	}
	return []seamCase{
		{"Addresses/MACs", "Asked for some interfaces, a network gives their leases, all of them and no others.", needStart, func(s *seam) {
			s.started("a", s.networkBoot("a"))
			s.started("b", s.networkBoot("b"))
			s.leasesOfMACs(ask)
		}},
		{"Addresses/EmptyQuery", "Addresses of nothing are none.", "", func(s *seam) {
			if got := ask(s, kvm2.AddressQuery{}); len(got) != 0 {
				s.Errorf("got %+v, want none", got)
			}
		}},
		{"Addresses/Missing", "A network or a domain that does not exist gives no records, and is no error.", "", func(s *seam) {
			got := ask(s, kvm2.AddressQuery{Networks: []string{s.name("none")}, Domains: []kvm2.UUID{s.uuid("none")}})
			if len(got) != 0 {
				s.Errorf("got %+v, want none", got)
			}
			s.wantUsable(s.conn)
		}},
		{"Addresses/NotRunning", "A domain that does not run gives no records.", "", func(s *seam) {
			s.define(s.spec("d"))
			if got := ask(s, kvm2.AddressQuery{Domains: []kvm2.UUID{s.uuid("d")}}); len(got) != 0 {
				s.Errorf("got %+v, want none", got)
			}
		}},
		{"Addresses/NoAgent", "A guest whose agent is not connected gives no records of it, and is no error.", needStart, func(s *seam) {
			s.started("d", "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>")
			for _, r := range ask(s, kvm2.AddressQuery{Domains: []kvm2.UUID{s.uuid("d")}}) {
				if r.Source == kvm2.SourceAgent {
					s.Errorf("got %+v, want none of the agent", r)
				}
			}
			s.wantUsable(s.conn)
		}},
		{"Addresses/Leases", "The leases of a network name MAC, address and expiry, and no domain.", "", func(s *seam) {
			for _, r := range ask(s, kvm2.AddressQuery{Networks: []string{s.caps.Network}}) {
				if r.Source != kvm2.SourceLease || !r.Domain.IsZero() || r.MAC == "" || !r.IP.IsValid() || r.Expiry.IsZero() {
					s.Errorf("got %+v, want a lease", r)
				}
			}
		}},
	}
}

// networkBoot is an interface that a guest boots from, so that it soon asks for a lease.
func (s *seam) networkBoot(part string) string {
	return fmt.Sprintf("<interface type='network'><mac address='%s'/><source network='%s'/><model type='virtio'/><boot order='1'/></interface>",
		s.mac(part), escaped(s.caps.Network))
}

// mac is an address out of the range that QEMU has for guests.
func (s *seam) mac(part string) string {
	id := s.uuid(part)
	return net.HardwareAddr{0x52, 0x54, 0, id[0], id[1], id[2]}.String()
}

// leasesOfMACs asks for the leases of each interface that has any, and for those of one that has none.
func (s *seam) leasesOfMACs(ask func(*seam, kvm2.AddressQuery) []kvm2.AddressRecord) {
	s.Helper()
	of := func(macs ...string) []string {
		s.Helper()
		return leaseNames(ask(s, kvm2.AddressQuery{Networks: []string{s.caps.Network}, MACs: macs}))
	}
	byMAC := map[string][]string{}
	var macs, all []string
	for _, l := range of() {
		mac, _, _ := strings.Cut(l, " ")
		if byMAC[mac] == nil {
			macs = append(macs, mac)
		}
		byMAC[mac], all = append(byMAC[mac], l), append(all, l)
	}
	for mac, want := range byMAC {
		if got := of(strings.ToUpper(mac)); !slices.Equal(got, want) {
			s.Errorf("got %q for the interface %s, want %q", got, mac, want)
		}
	}
	none := s.mac("none")
	if got := of(none); len(got) != 0 {
		s.Errorf("got %q for an interface without leases", got)
	}
	if got := of(append(macs, none)...); !slices.Equal(got, all) {
		s.Errorf("got %q for all interfaces, want %q", got, all)
	}
	s.Logf("%d leases of %d interfaces", len(all), len(macs))
}

// leaseNames are MAC and address of leases, sorted: a lease that is renewed meanwhile stays the same one.
func leaseNames(records []kvm2.AddressRecord) []string {
	var out []string
	for _, r := range records {
		out = append(out, strings.ToLower(r.MAC)+" "+r.IP.String())
	}
	slices.Sort(out)
	return out
}
