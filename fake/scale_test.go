package fake_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2/fake"
)

func TestLease_FullSubnetHasRoomAgainWhenALeaseEnds(t *testing.T) {
	for name, end := range map[string]func(*harness){
		"expired": func(*harness) { time.Sleep(10 * time.Minute) },
		"dropped": func(h *harness) { h.host.ExpireLeases("default") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, fake.WithNetwork("default", netip.MustParsePrefix("10.0.0.0/29")))
				for i := range 5 {
					ip := netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + i)})
					h.host.AddLease("default", fmt.Sprintf("52:54:00:ff:00:%02x", i), ip, time.Now().Add(time.Duration(10+i)*time.Minute))
				}
				h.started("d", defaultNIC)
				const waits = "52:54:00:00:00:01"
				if got := h.leases(); len(got) != 5 || got[0].MAC == waits {
					t.Fatalf("got %+v, want the five others", got)
				}
				end(h)
				if got := h.leases(); len(got) == 0 || got[0].MAC != waits {
					t.Errorf("got %+v, want a lease of the guest that waited", got)
				}
			})
		})
	}
}

func TestStartNetwork_GuestThatBootedMeanwhileGetsItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, fake.WithBootTime(20*time.Second))
		h.started("d", defaultNIC)
		h.host.StopNetwork("default")
		time.Sleep(20 * time.Second)
		if got := h.leases(); len(got) != 0 {
			t.Fatalf("got %+v of a network that is not active", got)
		}
		h.host.StartNetwork("default")
		if got := h.leases(); len(got) != 1 {
			t.Errorf("got %+v, want a lease", got)
		}
	})
}

func TestAddLease_AddressOfTwoHoldersStaysTakenUntilBothHaveGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, fake.WithNetwork("default", netip.MustParsePrefix("10.0.0.0/29")))
		for i := range 5 {
			ip := netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + i)})
			h.host.AddLease("default", fmt.Sprintf("52:54:00:ff:00:%02x", i), ip, time.Now().Add(2*time.Hour))
			h.host.AddLease("default", fmt.Sprintf("52:54:00:ff:01:%02x", i), ip, time.Now().Add(time.Minute))
		}
		time.Sleep(time.Minute)
		h.started("d", defaultNIC)
		if got := h.leases(); len(got) != 5 {
			t.Errorf("got %+v, want the five that last", got)
		}
	})
}

// What a file holds is kept in small pieces; whatever is written comes back.
func TestVolumeBytes_AreWhatWasWritten(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	h := newHarness(t, fake.WithPacketSize(700))
	h.rawVolume("v", 0)
	want := make([]byte, 20_000)
	for round := range 20 {
		content := make([]byte, random.IntN(len(want)))
		for range round { // more and more runs of bytes between zeros
			at := random.IntN(len(content) + 1)
			for i := range content[at:min(len(content), at+random.IntN(1500))] {
				content[at+i] = byte(random.Uint32())
			}
		}
		h.must(h.upload("v", content))
		copy(want, content)
		got := h.host.VolumeBytes("default", "v")
		if !bytes.Equal(got, want[:len(got)]) || len(got) < len(content) {
			t.Fatalf("round %d: %d bytes came back that are not those written", round, len(got))
		}
	}
}

// The pool keeps account of its space as files come, grow and go; a refresh must not find anything else.
func TestPool_AccountsAreThoseOfItsFiles(t *testing.T) {
	h := newHarness(t, fake.WithPool("default", 1<<30))
	available := func() int64 {
		h.must(h.conn.RefreshPool(t.Context(), "default"))
		return h.pool().AvailableBytes
	}
	want := func(what string, taken int64) {
		t.Helper()
		if got := available(); got != 1<<30-taken {
			t.Errorf("%s: got %d bytes taken, want %d", what, 1<<30-got, taken)
		}
	}
	h.rawVolume("v", 0)
	want("an empty volume", 0)
	h.must(h.upload("v", make([]byte, 5000)))
	want("after an upload", 8192)
	h.must(h.upload("v", make([]byte, 100)))
	want("after a shorter one", 8192)
	h.host.AddFile("default", "v", make([]byte, 4096))
	want("after it was replaced", 4096)
	h.started("d", diskXML(images+"v", "raw"))
	h.host.RemoveFile("default", "v")
	want("deleted but open", 4096)
	h.host.PowerOff("d")
	want("closed", 0)
}
