package fake_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// withHead is a domain without devices, of the parts that a row gives.
func withHead(kind, name, rest string) string {
	return fmt.Sprintf("<domain type='%s'><name>%s</name><uuid>%s</uuid>%s</domain>", kind, name, uuidOf("d"), rest)
}

const plain = "<memory unit='MiB'>64</memory><os><type>hvm</type></os>"

func TestDefineDomain_AnswersAsLibvirt(t *testing.T) {
	for _, c := range []struct {
		name string
		why  string
		xml  string
		code int
		text string
	}{
		{"malformed", "the parser comes first", "<domain><name>d", 35, "(domain_definition):1: "},
		{"two roots", "a document has one root", "<domain/><domain/>", 92, "failed to validate"},
		{"other root", "", "<network/>", 27, "XML error: expecting root element of 'domain', not 'network'"},
		{"no type", "the schema wants one", "<domain><name>d</name>" + plain + "</domain>", 92, "failed to validate against schema"},
		{"type unknown", "not in the schema", withHead("nonsense", "d", plain), 92, "failed to validate against schema"},
		{"type of others", "in the schema, not on the host", withHead("xen", "d", plain), 67, "Emulator '/usr/bin/qemu-system-x86_64' does not support virt type 'xen'"},
		{"no name", "the schema sees it before the parser", withHead("qemu", "", plain), 92, "failed to validate against schema"},
		{"slash", "the schema lets it pass", withHead("qemu", "a/b", plain), 27, "XML error: name a/b cannot contain '/'"},
		{"bad uuid", "", "<domain type='qemu'><name>d</name><uuid>zz</uuid>" + plain + "</domain>", 92, "Extra element uuid"},
		{"unknown element", "", withHead("qemu", "d", plain+"<nonsense/>"), 92, "Element domain has extra content: nonsense"},
		{"unknown device", "", withHead("qemu", "d", plain+"<devices><nonsense/></devices>"), 92, "Extra element devices in interleave"},
		{"no memory", "", withHead("qemu", "d", "<os><type>hvm</type></os>"), 27, "Memory size must be specified"},
		{"no os", "", withHead("qemu", "d", "<memory>65536</memory>"), 27, "an os <type> must be specified"},
		{"os unknown", "", withHead("qemu", "d", "<memory>65536</memory><os><type>nonsense</type></os>"), 92, "Extra element os"},
		{"arch", "no emulator for it", withHead("qemu", "d", "<memory>65536</memory><os><type arch='aarch64'>hvm</type></os>"), 67, "No emulator found for arch 'aarch64'"},
		{"no vcpu", "", withHead("qemu", "d", plain+"<vcpu>0</vcpu>"), 92, "Extra element vcpu"},
		{"many vcpus", "more than q35 takes", withHead("qemu", "d", plain+"<vcpu>289</vcpu>"), 67, "machine type limit 288"},
		{"efi without acpi", "", withHead("qemu", "d", "<memory>65536</memory><os firmware='efi'><type>hvm</type></os>"), 67, "UEFI requires ACPI"},
		{"bad mac", "the schema sees it first", withHead("qemu", "d", plain+"<devices><interface type='network'><mac address='zz'/></interface></devices>"), 92, "Extra element devices"},
		{"memory unit", "", withHead("qemu", "d", "<memory unit='nonsense'>1</memory><os><type>hvm</type></os>"), 8, "unknown suffix 'nonsense'"},
		{"memory overflow", "", withHead("qemu", "d", "<memory unit='EiB'>9</memory><os><type>hvm</type></os>"), 84, "value too large"},
		{"metadata", "elements do not match", withHead("qemu", "d", plain+"<metadata><a></b></metadata>"), 35, "(domain_definition):1"},
		{"too large", "more than a message holds", strings.Repeat(" ", 5<<20), 39, "Unable to decode message payload"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Log(c.why)
			h := newHarness(t)
			h.wantAnswer(h.conn.DefineDomain(t.Context(), c.xml), c.code, c.text)
			if got := h.host.Domains(); len(got) != 0 {
				t.Errorf("got domains %+v, want none", got)
			}
		})
	}
}

func TestDefineDomain_ConflictTexts(t *testing.T) {
	h := newHarness(t)
	h.define("vm1", "")
	other := strings.Replace(domainXML("vm1", ""), uuidOf("vm1").String(), uuidOf("vm2").String(), 1)
	h.wantAnswer(h.conn.DefineDomain(t.Context(), other), 9,
		fmt.Sprintf("operation failed: domain 'vm1' already exists with uuid %s", uuidOf("vm1")))
	renamed := strings.Replace(domainXML("vm1", ""), "<name>vm1<", "<name>vm2<", 1)
	h.wantAnswer(h.conn.DefineDomain(t.Context(), renamed), 9,
		fmt.Sprintf("operation failed: domain 'vm1' is already defined with uuid %s", uuidOf("vm1")))
}

func TestDefineDomain_NamespacedElementsAreHypervisorsOwn(t *testing.T) {
	h := newHarness(t)
	xml := "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>d</name>" + plain +
		"<qemu:commandline><qemu:arg value='-S'/></qemu:commandline></domain>"
	h.must(h.conn.DefineDomain(t.Context(), xml))
}

func TestDefineDomain_MissingUUIDAndMACAreMadeUp(t *testing.T) {
	h := newHarness(t)
	h.must(h.conn.DefineDomain(t.Context(), "<domain type='qemu'><name>d</name>"+plain+
		"<devices><interface type='network'><source network='default'/></interface></devices></domain>"))
	d, err := h.conn.DomainByName(t.Context(), "d")
	h.must(err)
	if d.UUID.IsZero() {
		t.Error("the UUID is zero")
	}
	h.must(h.conn.StartDomain(t.Context(), d.UUID))
	if got := h.leases(); len(got) != 1 || !strings.HasPrefix(got[0].MAC, "52:54:00:") {
		t.Errorf("got leases %+v, want one of a MAC of QEMU's", got)
	}
}

func TestMetadata_ComeBackAsLibvirtWritesThem(t *testing.T) {
	for _, c := range []struct {
		why, in, want string
	}{
		{
			"its own namespace is taken away, others stay", `<k:m xmlns:k="NS" xmlns:z="u:z" v="1"><k:a>t &amp; x</k:a><z:b q="1"/></k:m>`,
			"<m xmlns:z=\"u:z\" v=\"1\">\n  <a>t &amp; x</a>\n  <z:b q=\"1\"/>\n</m>",
		},
		{"a default namespace goes as well", `<m xmlns="NS"><a/></m>`, "<m>\n  <a/>\n</m>"},
		{"white space between elements is not kept", "<m xmlns=\"NS\">\n\n\t<a></a>\n</m>", "<m>\n  <a/>\n</m>"},
		{"an element with text is not indented", `<m xmlns="NS">x<a/></m>`, "<m>x<a/></m>"},
		{"quotes in attributes are escaped", `<m xmlns="NS" v='"&lt;&#10;'/>`, `<m v="&quot;&lt;&#10;"/>`},
		{"other elements are not kvm2's", `<o xmlns="u:o"/>`, ""},
	} {
		t.Run(c.why, func(t *testing.T) {
			h := newHarness(t)
			in := strings.ReplaceAll(c.in, "NS", kvm2.MetadataNamespace)
			h.must(h.conn.DefineDomain(t.Context(), withHead("qemu", "d", "<metadata>"+in+"</metadata>"+plain)))
			d, err := h.conn.DomainByName(t.Context(), "d")
			h.must(err)
			if d.Metadata != c.want {
				t.Errorf("got %q, want %q", d.Metadata, c.want)
			}
		})
	}
}

func TestSetDomainMetadata_WantsOneElement(t *testing.T) {
	h := newHarness(t)
	h.define("d", "")
	for _, xml := range []string{"", "<a", "<a>", "<a/><b/>", "</a>", "<a></b>"} {
		h.wantAnswer(h.conn.SetDomainMetadata(t.Context(), uuidOf("d"), xml), 35, "(metadata_xml):1")
	}
}

func TestStartDomain_AnswersAsLibvirt(t *testing.T) {
	const pool = "/var/lib/libvirt/images/"
	for _, c := range []struct {
		name    string
		why     string
		opts    []fake.Option
		prepare func(*harness)
		xml     string
		code    int
		text    string
	}{
		{
			"no file", "", nil, nil, domainXML("d", diskXML("/srv/none.img", "qcow2")), 38,
			"Cannot access storage file '/srv/none.img': No such file or directory",
		},
		{
			"no backing file", "it was deleted under its overlay", nil, func(h *harness) {
				h.qcow2Volume("base", 1<<20, "")
				h.qcow2Volume("v", 1<<20, pool+"base")
				h.host.DeleteVolumeBehind("default", "base")
			}, domainXML("d", diskXML(pool+"v", "qcow2")), 38,
			"Cannot access backing file '" + pool + "base' of storage file '" + pool + "v' (as uid:65534, gid:65534): No such file or directory",
		},
		{"not qcow2", "", nil, func(h *harness) { h.rawVolume("v", 1<<20) }, domainXML("d", diskXML(pool+"v", "qcow2")), 1, "Image is not in qcow2 format"},
		{"base not qcow2", "the overlay says that it is", nil, func(h *harness) {
			h.qcow2Volume("base", 1<<20, "")
			h.qcow2Volume("v", 1<<20, pool+"base")
			h.host.CorruptVolume("default", "base")
		}, domainXML("d", diskXML(pool+"v", "qcow2")), 1, "Image is not in qcow2 format"},
		{
			"no network", "looked at before the disks", nil, nil,
			domainXML("d", diskXML("/srv/none.img", "qcow2")+strings.ReplaceAll(defaultNIC, "default", "nonet")), 43,
			"Network not found: no network with matching name 'nonet'",
		},
		{
			"inactive network", "", nil, func(h *harness) { h.host.StopNetwork("default") }, domainXML("d", defaultNIC), 55,
			"Requested operation is not valid: network 'default' is not active",
		},
		{
			"memory", "",
			[]fake.Option{fake.WithMemory(32 << 20)},
			nil, domainXML("d", ""), 1,
			"cannot set up guest memory 'pc.ram': Cannot allocate memory",
		},
		{
			"no firmware", "",
			[]fake.Option{fake.WithoutEFI()},
			nil, strings.Replace(domainXML("d", ""), "<os>", "<os firmware='efi'>", 1), 9,
			"operation failed: Unable to find any firmware to satisfy 'efi'",
		},
		{
			"no volume", "a disk by pool and volume", nil, nil,
			domainXML("d", "<disk type='volume'><source pool='default' volume='none'/><target dev='vda'/></disk>"), 50,
			"Storage volume not found: no storage vol with matching name 'none'",
		},
		{
			"no pool", "", nil, nil, domainXML("d", "<disk type='volume'><source pool='nopool' volume='none'/><target dev='vda'/></disk>"), 49,
			"Storage pool not found: no storage pool with matching name 'nopool'",
		},
		{
			"inactive pool", "", nil, func(h *harness) { h.host.StopPool("default") },
			domainXML("d", "<disk type='volume'><source pool='default' volume='none'/><target dev='vda'/></disk>"), 67,
			"storage pool 'default' containing volume 'none' is not active",
		},
		{"second writer", "qemu locks the file", nil, func(h *harness) {
			h.qcow2Volume("v", 1<<20, "")
			h.started("other", diskXML(pool+"v", "qcow2"))
		}, domainXML("d", diskXML(pool+"v", "qcow2")), 1, `Failed to get "write" lock`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Log(c.why)
			h := newHarness(t, c.opts...)
			if c.prepare != nil {
				c.prepare(h)
			}
			h.must(h.conn.DefineDomain(t.Context(), c.xml))
			h.wantAnswer(h.conn.StartDomain(t.Context(), uuidOf("d")), c.code, c.text)
			h.wantState("d", 5, 6)
		})
	}
}

func TestStartDomain_ReadOnlyDisksAreShared(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("seed", 1<<20)
	disk := strings.Replace(diskXML("/var/lib/libvirt/images/seed", "raw"), "</disk>", "<readonly/></disk>", 1)
	for _, name := range []string{"a", "b"} {
		h.started(name, disk)
		h.wantState(name, 1, 1)
	}
}

func TestStartDomain_VolumeDiskRuns(t *testing.T) {
	h := newHarness(t)
	h.qcow2Volume("v", 1<<20, "")
	h.started("d", "<disk type='volume'><driver name='qemu' type='qcow2'/><source pool='default' volume='v'/><target dev='vda'/></disk>")
	h.wantState("d", 1, 1)
}

func TestStartDomain_UnsupportedDiskIsLoud(t *testing.T) {
	h := newHarness(t)
	h.define("d", "<disk type='block'><source dev='/dev/sda'/><target dev='vda'/></disk>")
	err := h.conn.StartDomain(t.Context(), uuidOf("d"))
	if err == nil || !strings.HasPrefix(err.Error(), "fake: unsupported") {
		t.Fatalf("got %v", err)
	}
}

func TestDomain_UndefineRemovesAllThatBelongsToIt(t *testing.T) {
	h := newHarness(t)
	h.must(h.conn.DefineDomain(t.Context(), strings.Replace(domainXML("d", ""), "<os>", "<os firmware='efi'>", 1)))
	h.start("d")
	h.host.AddSnapshot("d", "s1")
	h.host.ManagedSave("d")
	for _, want := range []string{"nvram", "managed save", "snapshot s1"} {
		if dump := h.host.Dump(); !strings.Contains(dump, want) {
			t.Errorf("no %q in\n%s", want, dump)
		}
	}
	h.must(h.conn.UndefineDomain(t.Context(), uuidOf("d")))
	h.define("d", "")
	for _, gone := range []string{"nvram", "managed save", "snapshot"} {
		if dump := h.host.Dump(); strings.Contains(dump, gone) {
			t.Errorf("still %q in\n%s", gone, dump)
		}
	}
}
