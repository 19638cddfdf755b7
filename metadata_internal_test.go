package kvm2

import (
	"encoding/xml"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/golden"
)

// fullMetadata uses every field, with characters that XML gives a meaning to.
func fullMetadata() metadata {
	return metadata{
		Version: metadataVersion, Scope: "prod", OwnerUID: `ns/"a"&<b>'c'`, Name: "web-1", Phase: phaseStarted,
		Created: "2026-03-01T12:30:00Z", SpecHash: strings.Repeat("ab", 32), Pool: "default",
		Labels: sortedLabels(map[string]string{"b": "日本語", "a": `<&>"'`, "c": ""}),
		Interfaces: []metadataInterface{
			{MAC: "52:ab:cd:ef:00:01", Network: "default"}, {MAC: "52:ab:cd:ef:00:02"}, {MAC: "52:ab:cd:ef:00:03", Network: "default"},
		},
	}
}

func metadataForms() map[string]func(metadata) (string, error) {
	return map[string]func(metadata) (string, error){"element": metadata.element, "namespaced": metadata.namespaced}
}

func TestMetadata(t *testing.T) {
	for name, form := range metadataForms() {
		t.Run(name, func(t *testing.T) {
			m := fullMetadata()
			got, err := form(m)
			if err != nil {
				t.Fatal(err)
			}
			golden.Assert(t, name+".xml", []byte(got))

			parsed, err := parseMetadata(got)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, parsed, ignoreXMLName()); diff != "" {
				t.Errorf("read back it differs (-want +got):\n%s", diff)
			}
			if wantNS := map[string]string{"namespaced": MetadataNamespace}[name]; parsed.XMLName.Space != wantNS {
				t.Errorf("its namespace is %q, want %q", parsed.XMLName.Space, wantNS)
			}
		})
	}
}

// ignoreXMLName leaves the element's own name out, which only reading fills in.
func ignoreXMLName() cmp.Option {
	return cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "XMLName" }, cmp.Ignore())
}

func TestParseMetadata_PrefixedElement(t *testing.T) {
	got, err := parseMetadata(`<kvm2:machine xmlns:kvm2="` + MetadataNamespace + `" version="1" scope="prod" owner="o" phase="defined">
  <kvm2:label key="a" value="b"/>
</kvm2:machine>`)
	if err != nil || got.Scope != "prod" || got.OwnerUID != "o" || got.labels()["a"] != "b" {
		t.Errorf("parseMetadata = %+v, %v: want scope, owner and label read", got, err)
	}
}

func TestParseMetadata_WhatCannotBeReadIsForeign(t *testing.T) {
	tests := []struct{ name, text, why string }{
		{name: "nothing", text: ""},
		{name: "text", text: "hello"},
		{name: "another element", text: `<vm version="1" scope="prod" owner="o"/>`, why: "somebody else's, or a form that kvm2 does not know"},
		{name: "cut off", text: `<machine version="1" scope="prod"`},
		{name: "newer version", text: `<machine version="2" scope="prod" owner="o"/>`, why: "a newer kvm2 may have changed what a field means"},
		{name: "no version", text: `<machine scope="prod" owner="o"/>`},
		{name: "version is no number", text: `<machine version="one" scope="prod" owner="o"/>`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m, err := parseMetadata(tt.text)
			if ClassOf(err) != ClassPermanent || m.Scope != "" {
				t.Errorf("parseMetadata = %+v, %v; want a Permanent error and nothing read; %s", m, err, tt.why)
			}
			wantIs(t, err, ErrForeignOwner)
		})
	}
}

func FuzzParseMetadata(f *testing.F) {
	for _, form := range metadataForms() {
		text, err := form(fullMetadata())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add(`<machine version="1" scope="&#13;&#10;&#9;"><label key="a" value="b"/><label key="a" value="c"/></machine>`)
	f.Add(`<machine version="1"><interface mac="x" network=""/></machine>`)
	f.Add(`<machine version="99999999999999999999"/>`)
	f.Add(`<!DOCTYPE x [<!ENTITY e "ee">]><machine version="1" scope="&e;"/>`)
	f.Fuzz(func(t *testing.T, text string) {
		m, err := parseMetadata(text)
		if err != nil {
			if ClassOf(err) != ClassPermanent {
				t.Errorf("parseMetadata(%q): class %v, want Permanent", text, ClassOf(err))
			}
			return
		}
		_, _, _, _ = m.labels(), m.networks(), m.macs(), m.created()
		again, err := m.element()
		if err != nil {
			t.Fatalf("metadata of %q cannot be written: %v", text, err)
		}
		back, err := parseMetadata(again)
		if err != nil {
			t.Fatalf("metadata of %q, written as %q, cannot be read: %v", text, again, err)
		}
		if diff := cmp.Diff(m, back, ignoreXMLName()); diff != "" {
			t.Errorf("metadata of %q differ when they are written and read (-want +got):\n%s", text, diff)
		}
	})
}

// domainOf is a domain with these metadata and the UUID that belongs to them.
func domainOf(t testing.TB, name string, m metadata) Domain {
	t.Helper()
	text, err := xml.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return Domain{Name: name, UUID: MachineUUID(m.Scope, m.OwnerUID), Metadata: string(text)}
}

func TestGuard_OnlyOwnMachinesPass(t *testing.T) {
	p := testPlan(t)
	own := p.metadata(testCreated)
	newer := own
	newer.Version = metadataVersion + 1
	otherScope, otherOwner := own, own
	otherScope.Scope, otherOwner.OwnerUID = "dev", "owner-2"
	copied := domainOf(t, "copy", own)
	copied.UUID = MachineUUID("prod", "owner-9")

	tests := []struct {
		name           string
		domain         Domain
		guards, adopts bool
		foreignInScope bool
		why            string
	}{
		{name: "own", domain: domainOf(t, "prod-web-1", own), guards: true, adopts: true},
		{name: "another owner's", domain: domainOf(t, "prod-web-1", otherOwner), guards: true, why: "List reports it; Create must not take it"},
		{name: "another scope's", domain: domainOf(t, "dev-web-1", otherScope)},
		{name: "another scope's whose name begins as ours", domain: domainOf(t, "prod-web-1", otherScope), why: "scope prod-web may have a machine called 1"},
		{name: "no metadata", domain: Domain{Name: "prod-web-1", UUID: p.uuid}, why: "the name alone proves nothing"},
		{name: "copied metadata", domain: copied, why: "a clone made by hand keeps the metadata and gets a new UUID"},
		{name: "copied metadata under our name", domain: Domain{Name: "prod-web-9", UUID: copied.UUID, Metadata: copied.Metadata}, foreignInScope: true},
		{name: "newer version", domain: domainOf(t, "prod-web-1", newer), foreignInScope: true, why: "an older kvm2 must not take it for gone"},
		{name: "unreadable", domain: Domain{Name: "prod-web-1", UUID: p.uuid, Metadata: "<machine"}, foreignInScope: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, guardErr := guard("prod", tt.domain)
			wantForeign(t, guardErr, !tt.guards)
			_, adoptErr := p.adopt(tt.domain)
			wantForeign(t, adoptErr, !tt.adopts)
			if got := guardErr != nil && foreignInScope("prod", tt.domain, guardErr); got != tt.foreignInScope {
				t.Errorf("foreignInScope = %t, want %t; %s", got, tt.foreignInScope, tt.why)
			}
		})
	}
}

func wantForeign(t testing.TB, err error, foreign bool) {
	t.Helper()
	if !foreign {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if ClassOf(err) != ClassPermanent {
		t.Errorf("error is %v, want a Permanent one", err)
	}
	wantIs(t, err, ErrForeignOwner)
}

func TestAdopt_NameCannotBeChanged(t *testing.T) {
	p := testPlan(t)
	md := p.metadata(testCreated)
	md.Name = "web-0"
	_, err := p.adopt(domainOf(t, "prod-web-0", md))
	wantInvalidSpec(t, err, "name: ")
}

func TestMetadata_FieldsSomebodyEdited(t *testing.T) {
	m := fullMetadata()
	m.Created = "yesterday"
	if got := m.created(); !got.IsZero() {
		t.Errorf("created() = %v, want zero: the machine is no worse for it", got)
	}
	m.Created = "2026-03-01T13:30:00+01:00"
	if got := m.created(); !got.Equal(time.Date(2026, 3, 1, 12, 30, 0, 0, time.UTC)) {
		t.Errorf("created() = %v", got)
	}
	if diff := cmp.Diff([]string{"default"}, m.networks()); diff != "" {
		t.Errorf("networks differ (-want +got):\n%s", diff)
	}
	if got := (metadata{}).labels(); got != nil {
		t.Errorf("labels() of none = %v, want nil", got)
	}
}

func TestSpecHash_OnlyHardwareCounts(t *testing.T) {
	const pinned = "acb88039ca33a65cd7c06e851cc0e8a06cf399c19ee2db19569f1fac2efd1e26"
	if got := testPlan(t).hash; got != pinned {
		t.Errorf("the hash of an unchanged Spec is %s, was %s: every machine that exists would look drifted", got, pinned)
	}
	tests := []struct {
		name  string
		edit  func(*Config, *Spec)
		drift bool
		why   string
	}{
		{name: "name", edit: func(_ *Config, s *Spec) { s.Name = "web-2" }},
		{name: "owner", edit: func(_ *Config, s *Spec) { s.OwnerUID = "owner-2" }},
		{name: "labels", edit: func(_ *Config, s *Spec) { s.Labels = map[string]string{"a": "b"} }},
		{name: "user data", edit: func(_ *Config, s *Spec) { s.UserData = []byte("#cloud-config") }, why: "bootstrap tokens rotate"},
		{name: "vendor data", edit: func(_ *Config, s *Spec) { s.VendorData = []byte("#cloud-config") }},
		{name: "network config", edit: func(_ *Config, s *Spec) { s.NetworkConfig = []byte("version: 2") }},
		{name: "image mirror", edit: func(_ *Config, s *Spec) { s.Image.URL = "https://mirror.example/d.qcow2" }, why: "the checksum says what it is"},
		{name: "explicit default firmware", edit: func(_ *Config, s *Spec) { s.Firmware = FirmwareBIOS }},
		{name: "explicit default network", edit: func(_ *Config, s *Spec) { s.NICs = []NIC{{Network: "default"}} }},

		{name: "cpus", edit: func(_ *Config, s *Spec) { s.CPUs++ }, drift: true},
		{name: "memory", edit: func(_ *Config, s *Spec) { s.MemoryBytes += mib }, drift: true},
		{name: "root disk", edit: func(_ *Config, s *Spec) { s.RootDiskBytes += mib }, drift: true},
		{name: "disk", edit: func(_ *Config, s *Spec) { s.Disks = []Disk{{Name: "data", SizeBytes: mib}} }, drift: true},
		{name: "firmware", edit: func(_ *Config, s *Spec) { s.Firmware = FirmwareEFI }, drift: true},
		{name: "network", edit: func(_ *Config, s *Spec) { s.NICs = []NIC{{Network: "lan"}} }, drift: true},
		{name: "image", edit: func(_ *Config, s *Spec) { s.Image.Checksum = "sha256:" + strings.Repeat("0", 64) }, drift: true},
	}
	for _, tt := range tests {
		if got := testPlan(t, tt.edit).hash != pinned; got != tt.drift {
			t.Errorf("%s: drift is %t, want %t; %s", tt.name, got, tt.drift, tt.why)
		}
	}
}

func TestSpecHash_ImageWithoutAChecksum(t *testing.T) {
	hash := func(i Image) string { return testPlan(t, func(_ *Config, s *Spec) { s.Image = i }).hash }
	first := hash(Image{URL: "https://a.example/i?token=1", ChecksumURL: "https://u:p@a.example/SUMS?token=1"})
	if again := hash(Image{URL: "https://u:p@a.example/i?token=2", ChecksumURL: "https://a.example/SUMS"}); again != first {
		t.Error("tokens count, and they rotate")
	}
	for _, other := range []Image{
		{URL: "https://a.example/j", ChecksumURL: "https://a.example/SUMS"},
		{URL: "https://a.example/i", ChecksumURL: "https://a.example/13/SUMS"},
		{Volume: "a"},
		{Volume: "b"},
	} {
		if hash(other) == first {
			t.Errorf("%+v is no drift", other)
		}
	}
	if hash(Image{Volume: "a"}) == hash(Image{Volume: "b"}) {
		t.Error("another volume is no drift")
	}
}
