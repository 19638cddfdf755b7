package kvm2

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2/internal/golden"
)

const testChecksum = "sha256:aa4b5b2d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f70819"

var (
	testCreated = time.Date(2026, 3, 1, 12, 30, 0, 0, time.UTC)
	testPool    = Pool{Name: "default", Active: true, TargetPath: "/var/lib/libvirt/images"}
)

// testSpec is a small valid Spec.
func testSpec() Spec {
	return Spec{
		Name: "web-1", OwnerUID: "owner-1",
		Image: Image{URL: "https://images.example/debian.qcow2", Checksum: testChecksum},
		CPUs:  2, MemoryBytes: 2 * gib, RootDiskBytes: 20 * gib,
	}
}

// testPlan is the plan of testSpec on a system daemon, after the edits.
func testPlan(t testing.TB, edits ...func(*Config, *Spec)) plan {
	t.Helper()
	c, s := Config{URI: "qemu:///system", Scope: "prod"}, testSpec()
	for _, edit := range edits {
		edit(&c, &s)
	}
	h := hostIdentity{name: "kvm-1", systemDaemon: c.URI == "qemu:///system"}
	p, err := newPlan(h, c.withDefaults(), s)
	if err != nil {
		t.Fatalf("newPlan: %v", err)
	}
	return p
}

// domainCase is a domain that a golden file shows.
type domainCase struct {
	name   string
	edit   func(*Config, *Spec)
	mutate func(*libvirtxml.Domain)
	why    string
}

func (c domainCase) build(t testing.TB) string {
	t.Helper()
	p := testPlan(t)
	if c.edit != nil {
		p = testPlan(t, c.edit)
	}
	xml, err := domainXML(domainInput{plan: p, pool: testPool, created: testCreated, mutate: c.mutate})
	if err != nil {
		t.Fatalf("domainXML: %v", err)
	}
	return xml
}

func domainCases() []domainCase {
	return []domainCase{
		{name: "default", why: "x86_64 with KVM, BIOS, one disk, one NIC"},
		{name: "emulation", edit: func(c *Config, _ *Spec) { c.DomainType = "qemu" }, why: "no host CPU to pass through"},
		{name: "aarch64", edit: func(c *Config, _ *Spec) { c.Arch = archARM }, why: "machine virt, EFI, no APIC"},
		{name: "efi", edit: func(_ *Config, s *Spec) { s.Firmware = FirmwareEFI }},
		{name: "disks", edit: func(_ *Config, s *Spec) {
			s.Disks = []Disk{{Name: "data", SizeBytes: gib}, {Name: "a-log", SizeBytes: 2 * gib}}
		}, why: "in the Spec's order, not sorted; the seed stays last"},
		{name: "most-disks", edit: func(_ *Config, s *Spec) {
			for i := range maxDisks {
				s.Disks = append(s.Disks, Disk{Name: "d" + string(rune('a'+i)), SizeBytes: mib})
			}
		}, why: "target names and ports suffice for the most that is allowed"},
		{name: "nics", edit: func(c *Config, s *Spec) {
			c.Network = "lan"
			s.NICs = []NIC{{}, {Network: "storage"}, {}}
		}, why: "an unnamed network is the Config's"},
		{name: "labels", edit: func(_ *Config, s *Spec) {
			s.Labels = map[string]string{
				"z": "", "a<b>": `"quoted" & 'single' <tag/>`, "größe": "日本語", "]]>": "<!-- no comment -->", "&amp;": "&#10;",
			}
		}, why: "sorted, and nothing that XML gives a meaning to breaks out"},
		{name: "session", edit: func(c *Config, _ *Spec) { c.URI = "qemu:///session" }, why: "a session daemon may not write beside qemu's logs"},
		{name: "mutator-identity", mutate: mutateIdentity, why: "name, UUID, metadata and files are put back; the rest of the edits stay"},
		{name: "mutator-disks", mutate: mutateDisks, why: "a disk may change its bus, order and driver, and others may join it"},
		{name: "mutator-empty", mutate: func(d *libvirtxml.Domain) { d.Devices = nil }, why: "disks that were taken away are put back"},
		{name: "mutator-interfaces", mutate: mutateInterfaces, why: "the metadata tell which MACs the domain really has"},
	}
}

func mutateIdentity(d *libvirtxml.Domain) {
	d.Name, d.UUID = "other", "11111111-1111-1111-1111-111111111111"
	d.Title = "edited"
	d.Metadata = &libvirtxml.DomainMetadata{XML: `<app:note xmlns:app="https://app.example/note">kept</app:note>`}
	d.Devices.Disks[0].Source = &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: "/etc/shadow"}}
	d.Devices.Disks[1].Source = nil
	d.Devices.Disks[1].ReadOnly = nil
	d.CPU = &libvirtxml.DomainCPU{Mode: "host-model"}
}

func mutateDisks(d *libvirtxml.Domain) {
	root, seed := d.Devices.Disks[0], d.Devices.Disks[1]
	root.Target = &libvirtxml.DomainDiskTarget{Dev: "sda", Bus: "scsi"}
	root.Driver.Cache = "none"
	extra := libvirtxml.DomainDisk{
		Device: "disk",
		Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: "raw"},
		Source: &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: "/srv/shared.raw"}},
		Target: &libvirtxml.DomainDiskTarget{Dev: "vda", Bus: "virtio"},
	}
	d.Devices.Disks = []libvirtxml.DomainDisk{extra, seed, root}
}

func mutateInterfaces(d *libvirtxml.Domain) {
	d.Devices.Interfaces = []libvirtxml.DomainInterface{
		{
			MAC:    &libvirtxml.DomainInterfaceMAC{Address: "52:AB:CD:EF:00:01"},
			Source: &libvirtxml.DomainInterfaceSource{Network: &libvirtxml.DomainInterfaceSourceNetwork{Network: "lan"}},
		},
		{
			MAC:    &libvirtxml.DomainInterfaceMAC{Address: "52:ab:cd:ef:00:02"},
			Source: &libvirtxml.DomainInterfaceSource{Bridge: &libvirtxml.DomainInterfaceSourceBridge{Bridge: "br0"}},
		},
		{Source: &libvirtxml.DomainInterfaceSource{Network: &libvirtxml.DomainInterfaceSourceNetwork{Network: "nomac"}}},
	}
}

func TestDomainXML(t *testing.T) {
	for _, tt := range domainCases() {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.build(t)
			golden.Assert(t, tt.name+".xml", []byte(got))

			var d libvirtxml.Domain
			if err := d.Unmarshal(got); err != nil {
				t.Fatalf("libvirtxml cannot read it: %v", err)
			}
			again, err := d.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, again); diff != "" {
				t.Errorf("read and written again it differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDomainXML_SameInputSameBytes(t *testing.T) {
	for _, tt := range domainCases() {
		first := tt.build(t)
		for range 5 {
			if again := tt.build(t); again != first {
				t.Fatalf("%s: built again it differs (-first +again):\n%s", tt.name, cmp.Diff(first, again))
			}
		}
	}
}

// embeddedMetadata is the kvm2 element of a domain's XML, as a host would return it.
func embeddedMetadata(t testing.TB, domain string) string {
	t.Helper()
	element := regexp.MustCompile(`(?s)<machine .*</machine>|<machine [^>]*/>`).FindString(domain)
	if element == "" {
		t.Fatalf("no kvm2 metadata in:\n%s", domain)
	}
	return element
}

func TestDomainXML_GuardAdoptsWhatWasBuilt(t *testing.T) {
	for _, tt := range domainCases() {
		t.Run(tt.name, func(t *testing.T) {
			xml := tt.build(t)
			var d libvirtxml.Domain
			if err := d.Unmarshal(xml); err != nil {
				t.Fatal(err)
			}
			p := testPlan(t)
			if tt.edit != nil {
				p = testPlan(t, tt.edit)
			}
			if d.Name != p.domain || d.UUID != p.uuid.String() {
				t.Errorf("the domain is %q %q, want %q %q; %s", d.Name, d.UUID, p.domain, p.uuid, tt.why)
			}
			md, err := p.adopt(Domain{Name: d.Name, UUID: p.uuid, Metadata: embeddedMetadata(t, xml)})
			if err != nil {
				t.Fatalf("adopt: %v", err)
			}
			if md.SpecHash != p.hash || md.Phase != phaseDefined || !md.created().Equal(testCreated) || md.Pool != p.config.Pool {
				t.Errorf("metadata are %+v", md)
			}
			if diff := cmp.Diff(p.spec.Labels, md.labels()); diff != "" {
				t.Errorf("labels differ (-want +got):\n%s", diff)
			}
		})
	}
}

// ownDisks finds the disks that show the machine's own volumes, by file.
func ownDisks(t testing.TB, xml string) map[string][]libvirtxml.DomainDisk {
	t.Helper()
	var d libvirtxml.Domain
	if err := d.Unmarshal(xml); err != nil {
		t.Fatal(err)
	}
	found := map[string][]libvirtxml.DomainDisk{}
	for _, disk := range d.Devices.Disks {
		if disk.Source != nil && disk.Source.File != nil {
			found[disk.Source.File.File] = append(found[disk.Source.File.File], disk)
		}
	}
	return found
}

func TestDomainXML_MutatorKeepsEachOwnDiskOnce(t *testing.T) {
	p := testPlan(t)
	root, seed := testPool.volumePath(p.volume(volumeRoot)), testPool.volumePath(p.volume(volumeSeed))
	for _, tt := range domainCases() {
		if tt.mutate == nil {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			disks := ownDisks(t, tt.build(t))
			if len(disks[root]) != 1 || len(disks[seed]) != 1 {
				t.Fatalf("root disk %d times, seed %d times, want each once", len(disks[root]), len(disks[seed]))
			}
			if disks[seed][0].ReadOnly == nil {
				t.Error("the seed is writable")
			}
			if disks[root][0].ReadOnly != nil {
				t.Error("the root disk is read-only")
			}
		})
	}
}

func TestDomainXML_MutatorMayMoveDisksToOtherTargets(t *testing.T) {
	tt := domainCase{mutate: func(d *libvirtxml.Domain) {
		d.Devices.Disks[0].Target.Dev = "vdb"
		d.Devices.Disks[1].Target.Dev = "vda"
	}}
	p := testPlan(t)
	disks := ownDisks(t, tt.build(t))
	if root := disks[testPool.volumePath(p.volume(volumeRoot))]; len(root) != 1 || root[0].Target.Dev != "vdb" || root[0].Driver.Type != "qcow2" {
		t.Errorf("root disks are %+v, want one qcow2 disk at vdb", root)
	}
	if seed := disks[testPool.volumePath(p.volume(volumeSeed))]; len(seed) != 1 || seed[0].Target.Dev != "vda" || seed[0].Driver.Type != "raw" {
		t.Errorf("seeds are %+v, want one raw disk at vda", seed)
	}
}

func TestDomainXML_MutatorCannotForgeMetadata(t *testing.T) {
	// libvirt keeps the first element of each namespace.
	forged := `<machine xmlns="` + MetadataNamespace + `" version="1" scope="other" owner="someone"></machine>`
	tt := domainCase{mutate: func(d *libvirtxml.Domain) { d.Metadata = &libvirtxml.DomainMetadata{XML: forged} }}
	xml := tt.build(t)
	own, other := strings.Index(xml, `scope="prod"`), strings.Index(xml, `scope="other"`)
	if own < 0 || (other >= 0 && other < own) {
		t.Errorf("the mutator's element stands before kvm2's own:\n%s", xml)
	}
}

func TestDomainXML_PortsCoverDevicesAndSpares(t *testing.T) {
	for _, tt := range domainCases() {
		if tt.mutate != nil {
			continue // what a mutator adds, it finds a place for
		}
		var d libvirtxml.Domain
		if err := d.Unmarshal(tt.build(t)); err != nil {
			t.Fatal(err)
		}
		ports := 0
		for _, c := range d.Devices.Controllers {
			if c.Model == "pcie-root-port" {
				ports++
			}
		}
		// The virtio devices: disks, NICs, balloon, random number generator, and the bus of the agent's channel.
		if used := len(d.Devices.Disks) + len(d.Devices.Interfaces) + 3; ports != used+sparePorts {
			t.Errorf("%s: %d root ports for %d devices, want %d to spare", tt.name, ports, used, sparePorts)
		}
	}
}

func TestDomainXML_TargetsAreDistinct(t *testing.T) {
	for _, tt := range domainCases() {
		var d libvirtxml.Domain
		if err := d.Unmarshal(tt.build(t)); err != nil {
			t.Fatal(err)
		}
		var targets []string
		for _, disk := range d.Devices.Disks {
			targets = append(targets, disk.Target.Dev)
		}
		slices.Sort(targets)
		if len(slices.Compact(slices.Clone(targets))) != len(targets) {
			t.Errorf("%s: a target stands twice: %q", tt.name, targets)
		}
		if tt.mutate == nil && targets[len(targets)-1] > "vdz" {
			t.Errorf("%s: target %q is behind vdz", tt.name, targets[len(targets)-1])
		}
	}
}

func TestMACAddress(t *testing.T) {
	uuid := MachineUUID("prod", "owner-1")
	if got, want := macAddress(uuid, 0), "52:70:30:fb:25:4c"; got != want {
		t.Errorf("macAddress(%s, 0) = %q, want %q; another value gives every machine a new address", uuid, got, want)
	}
	seen := map[string]bool{}
	for owner := range 200 {
		for nic := range maxNICs {
			mac := macAddress(MachineUUID("prod", string(rune('A'+owner))), nic)
			if seen[mac] {
				t.Fatalf("%q is given twice", mac)
			}
			seen[mac] = true
			if normalMAC(mac) != mac || !strings.HasPrefix(mac, "52:") {
				t.Fatalf("%q is not lower case with colons, or not locally administered", mac)
			}
		}
	}
}

func TestNewPlan_ArchitectureWithoutBIOS(t *testing.T) {
	s := testSpec()
	s.Firmware = FirmwareBIOS
	_, err := newPlan(hostIdentity{name: "kvm-1"}, Config{Scope: "prod", Arch: archARM}.withDefaults(), s)
	wantInvalidSpec(t, err, "firmware")
}

func TestNewPlan_CallersSpecIsNotChanged(t *testing.T) {
	s := testSpec()
	s.NICs = []NIC{{}, {Network: "lan"}}
	before := []NIC{{}, {Network: "lan"}}
	if _, err := newPlan(hostIdentity{name: "kvm-1"}, Config{Scope: "prod"}.withDefaults(), s); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, s.NICs); diff != "" {
		t.Errorf("the caller's NICs were changed (-want +got):\n%s", diff)
	}
	if s.Firmware != FirmwareDefault {
		t.Errorf("the caller's firmware was changed to %q", s.Firmware)
	}
}

func TestPlan_VolumesAreNamedByScopeAndUUID(t *testing.T) {
	p := testPlan(t, func(_ *Config, s *Spec) { s.Disks = []Disk{{Name: "data", SizeBytes: gib}} })
	prefix := "prod-" + p.uuid.String() + "-"
	want := []string{prefix + "root", prefix + "seed", prefix + "disk-data"}
	if diff := cmp.Diff(want, p.volumes()); diff != "" {
		t.Errorf("volumes differ (-want +got):\n%s", diff)
	}
}

// wantInvalidSpec fails unless err is a Permanent ErrInvalidSpec that names the field.
func wantInvalidSpec(t testing.TB, err error, field string) {
	t.Helper()
	if err == nil || ClassOf(err) != ClassPermanent || !strings.Contains(err.Error(), field) {
		t.Errorf("error is %v (class %v), want a Permanent one that names %q", err, ClassOf(err), field)
	}
	wantIs(t, err, ErrInvalidSpec)
}
