package fake_test

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

func TestCalls_TellAllButContent(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("seed", 0)
	const secret = "#cloud-config\npassword: hunter2\n"
	h.must(h.upload("seed", []byte(secret)))
	h.define("d", diskXML(images+"seed", "raw")+defaultNIC)
	_ = h.conn.SetDomainMetadata(t.Context(), uuidOf("d"), "<m/>")
	_ = h.conn.DestroyDomain(t.Context(), uuidOf("d"), kvm2.DestroyGraceful)
	_, _ = h.conn.DomainByUUID(t.Context(), uuidOf("none"))
	_ = h.conn.DefineDomain(t.Context(), "<domain")
	digest := sha256.Sum256([]byte(secret))
	want := []string{
		"#1 session 1 dial",
		"#2 session 1 volume.create default/seed (format raw, capacity 0 )",
		"#3 session 1 volume.upload default/seed 32 bytes sha256:" + hex.EncodeToString(digest[:]),
		`#4 session 1 domain.define d (type "qemu", uuid "` + uuidOf("d").String() + `", 1 disks, 1 interfaces)`,
		"#5 session 1 domain.set-metadata d (4 bytes)",
		"#6 session 1 domain.destroy d (graceful): libvirt error 55: Requested operation is not valid: domain is not running",
		"#7 session 1 domain.lookup " + uuidOf("none").String() + ": libvirt error 42: Domain not found: no domain with matching uuid '" + uuidOf("none").String() + "'",
		"#8 session 1 domain.define (7 bytes of malformed XML): libvirt error 35: (domain_definition):1: XML syntax error on line 1: unexpected EOF",
	}
	var got []string
	for _, c := range h.host.Calls() {
		got = append(got, c.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Calls (-want +got):\n%s", diff)
	}
	if all := strings.Join(got, "\n") + h.host.Dump(); strings.Contains(all, "hunter2") {
		t.Errorf("the log or the dump holds content:\n%s", all)
	}
}

func TestStats_Count(t *testing.T) {
	h := newHarness(t)
	h.host.AddFault(fake.Fault{Op: kvm2.OpDial, Effect: fake.Drop()})
	_, _ = h.host.Dial(t.Context())
	other := h.dial()
	h.rawVolume("v", 0)
	h.must(h.upload("v", make([]byte, 1000)))
	h.must(other.Close())
	want := fake.Stats{Dials: 2, Sessions: 3, OpenSessions: 1, Calls: 5, UploadedBytes: 1000}
	if got := h.host.Stats(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestDump_SameStateSameText(t *testing.T) {
	dump := func(names ...string) string {
		h := newHarness(t)
		for _, name := range names {
			h.qcow2Volume(name, 1<<20, "")
			h.define(name, diskXML(images+name, "qcow2")+strings.ReplaceAll(defaultNIC, "00:01", "00:0"+name))
			h.must(h.conn.SetDomainMetadata(t.Context(), uuidOf(name), "<m><a/></m>"))
			h.start(name)
		}
		h.host.AddFile("default", "unknown", []byte("x"))
		return h.host.Dump()
	}
	got := dump("1", "2")
	if diff := cmp.Diff(got, dump("2", "1")); diff != "" {
		t.Errorf("the order shows (-one +other):\n%s", diff)
	}
	const want = `pool default active, 1099511222272 of 1099511627776 bytes free
  volume 1 qcow2, capacity 1048576, physical 196616, allocated 200704
  volume 2 qcow2, capacity 1048576, physical 196616, allocated 200704
  unknown file unknown, physical 1
network default active, 192.168.122.0/24
  lease 52:54:00:00:00:01 IP1
  lease 52:54:00:00:00:02 IP2
domain 1 UUID1, state 1 reason 1, persistent, running
  disk /var/lib/libvirt/images/1 qcow2
  interface 52:54:00:00:00:01
  metadata <m>
  metadata   <a/>
  metadata </m>
domain 2 UUID2, state 1 reason 1, persistent, running
  disk /var/lib/libvirt/images/2 qcow2
  interface 52:54:00:00:00:02
  metadata <m>
  metadata   <a/>
  metadata </m>
`
	h := newHarness(t)
	h.started("1", defaultNIC)
	h.started("2", strings.ReplaceAll(defaultNIC, "00:01", "00:02"))
	leases := h.leases()
	replaced := strings.NewReplacer("IP1", leases[0].IP.String(), "IP2", leases[1].IP.String(),
		"UUID1", uuidOf("1").String(), "UUID2", uuidOf("2").String()).Replace(want)
	if diff := cmp.Diff(replaced, got); diff != "" {
		t.Errorf("Dump (-want +got):\n%s", diff)
	}
}

func TestDomains_ShowBothConfigurations(t *testing.T) {
	h := newHarness(t)
	h.started("b", "")
	h.host.UndefineBehind("b")
	h.define("a", "")
	got := h.host.Domains()
	if len(got) != 2 || got[0].Name != "a" || !got[0].Persistent || got[0].Running || got[1].Persistent || !got[1].Running {
		t.Errorf("got %+v, want a persistent and b running", got)
	}
	if got[1].XML != domainXML("b", "") {
		t.Errorf("got XML %q", got[1].XML)
	}
}
