package fake_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

var byValue = cmpopts.EquateComparable(netip.Addr{})

func TestLease_AppearsWhenTheGuestHasBooted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, fake.WithBootTime(20*time.Second))
		h.started("d", defaultNIC)
		time.Sleep(20*time.Second - time.Nanosecond)
		if got := h.leases(); len(got) != 0 {
			t.Errorf("got %+v too early", got)
		}
		time.Sleep(time.Nanosecond)
		got := h.leases()
		if len(got) != 1 || got[0].MAC != "52:54:00:00:00:01" || !netip.MustParsePrefix("192.168.122.0/24").Contains(got[0].IP) {
			t.Fatalf("got %+v, want a lease", got)
		}
		if want := time.Now().Add(time.Hour); !got[0].Expiry.Equal(want) {
			t.Errorf("it expires at %v, want %v", got[0].Expiry, want)
		}
	})
}

func TestLease_IsRenewedWhileTheGuestRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.started("d", defaultNIC)
		time.Sleep(24*time.Hour + 10*time.Minute)
		got := h.leases()
		if want := time.Now().Add(50 * time.Minute); len(got) != 1 || !got[0].Expiry.Equal(want) {
			t.Errorf("got %+v, want an expiry at %v", got, want)
		}
	})
}

func TestLease_OutlivesItsGuestUntilItExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.started("d", defaultNIC)
		h.host.PowerOff("d")
		time.Sleep(time.Hour - time.Nanosecond)
		if got := h.leases(); len(got) != 1 {
			t.Errorf("got %+v before the hour is over", got)
		}
		time.Sleep(time.Nanosecond)
		if got := h.leases(); len(got) != 0 {
			t.Errorf("got %+v after it", got)
		}
	})
}

// A machine that is made anew with the same MAC has another DHCP client ID: its root disk is another one.
func TestLease_NewDiskGetsANewLeaseBesideTheOldOne(t *testing.T) {
	h := newHarness(t)
	devices := diskXML(images+"v", "qcow2") + defaultNIC
	h.qcow2Volume("v", 1<<20, "")
	h.started("d", devices)
	first := h.leases()
	h.host.DestroyBehind("d")
	h.start("d")
	if diff := cmp.Diff(addressesOf(first), addressesOf(h.leases()), byValue); diff != "" {
		t.Errorf("the same disk got another lease (-first +second):\n%s", diff)
	}
	h.host.DestroyBehind("d")
	h.host.UndefineBehind("d")
	h.host.DeleteVolumeBehind("default", "v")
	h.qcow2Volume("v", 1<<20, "")
	h.started("d", devices)
	if got := h.leases(); len(got) != 2 || got[0].MAC != got[1].MAC || got[0].IP == got[1].IP {
		t.Errorf("got %+v, want two leases of one MAC", got)
	}
}

func addressesOf(records []kvm2.AddressRecord) []netip.Addr {
	var out []netip.Addr
	for _, r := range records {
		out = append(out, r.IP)
	}
	return out
}

func TestLease_AddressDoesNotDependOnTheOrderOfStarts(t *testing.T) {
	leases := func(order ...string) []netip.Addr {
		h := newHarness(t)
		for _, name := range order {
			h.started(name, strings.ReplaceAll(defaultNIC, "00:01", "00:0"+name))
		}
		return addressesOf(h.leases())
	}
	if diff := cmp.Diff(leases("1", "2", "3"), leases("3", "1", "2"), byValue); diff != "" {
		t.Errorf("(-one order +the other):\n%s", diff)
	}
}

func TestLease_SubnetRunsOut(t *testing.T) {
	h := newHarness(t, fake.WithNetwork("default", netip.MustParsePrefix("10.0.0.0/29")))
	for i := range 7 {
		h.started(fmt.Sprint(i), strings.ReplaceAll(defaultNIC, "00:01", fmt.Sprintf("00:%02x", i)))
	}
	got := h.leases()
	if len(got) != 5 {
		t.Errorf("got %d leases of a /29, want 5", len(got))
	}
	for _, r := range got {
		if last := r.IP.As4()[3]; last < 2 || last > 6 {
			t.Errorf("got address %v, want 10.0.0.2 to 10.0.0.6", r.IP)
		}
	}
}

func TestAddresses_InactiveNetworkHasNone(t *testing.T) {
	h := newHarness(t)
	h.started("d", defaultNIC)
	h.host.StopNetwork("default")
	if got := h.leases(); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
	n, err := h.conn.Network(t.Context(), "default")
	h.must(err)
	if n.Active {
		t.Error("it is active")
	}
	h.host.StartNetwork("default")
	if got := h.leases(); len(got) != 1 {
		t.Errorf("got %+v", got)
	}
}

func TestAddLease_StaysBesideTheGuests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.started("d", defaultNIC)
		old := netip.MustParseAddr("192.168.122.7")
		h.host.AddLease("default", "52:54:00:00:00:01", old, time.Now().Add(time.Minute))
		if got := h.leases(); len(got) != 2 {
			t.Errorf("got %+v, want two", got)
		}
		time.Sleep(time.Minute)
		if got := h.leases(); len(got) != 1 || got[0].IP == old {
			t.Errorf("got %+v, want the guest's own", got)
		}
		h.host.AddLease("default", "52:54:00:00:00:09", old, time.Now().Add(time.Minute))
		h.host.ExpireLeases("default")
		if got := h.leases(); len(got) != 1 || got[0].MAC != "52:54:00:00:00:01" {
			t.Errorf("got %+v, want the guest's, anew", got)
		}
	})
}

func TestAddresses_EverySource(t *testing.T) {
	h := newHarness(t)
	h.started("d", defaultNIC)
	query := kvm2.AddressQuery{Domains: []kvm2.UUID{uuidOf("d")}}
	lease := h.leases()[0]
	arp := kvm2.AddressRecord{Source: kvm2.SourceARP, Domain: uuidOf("d"), MAC: lease.MAC, IP: lease.IP}
	if diff := cmp.Diff([]kvm2.AddressRecord{arp}, h.addresses(query), byValue); diff != "" {
		t.Errorf("without the agent (-want +got):\n%s", diff)
	}
	h.host.ConnectAgent("d", netip.MustParseAddr("10.1.2.3"))
	record := func(mac, ip string) kvm2.AddressRecord {
		return kvm2.AddressRecord{Source: kvm2.SourceAgent, Domain: uuidOf("d"), MAC: mac, IP: netip.MustParseAddr(ip)}
	}
	want := []kvm2.AddressRecord{
		record("00:00:00:00:00:00", "127.0.0.1"), record("00:00:00:00:00:00", "::1"), record(lease.MAC, "10.1.2.3"), arp,
	}
	if diff := cmp.Diff(want, h.addresses(query), byValue); diff != "" {
		t.Errorf("with the agent (-want +got):\n%s", diff)
	}
	h.host.DisconnectAgent("d")
	if got := h.addresses(query); len(got) != 1 {
		t.Errorf("got %+v, want ARP alone", got)
	}
	h.host.PowerOff("d")
	if got := h.addresses(query); len(got) != 0 {
		t.Errorf("got %+v of a stopped guest", got)
	}
}

func TestLease_PausedGuestDoesNotAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, fake.WithBootTime(time.Minute))
		h.started("d", defaultNIC)
		h.host.PauseIOError("d")
		time.Sleep(time.Hour)
		if got := h.leases(); len(got) != 0 {
			t.Errorf("got %+v", got)
		}
		h.host.ResumeGuest("d")
		if got := h.leases(); len(got) != 1 {
			t.Errorf("got %+v after it was resumed", got)
		}
	})
}
