package kvm2

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2/internal/golden"
)

// volumeCase is a volume that a golden file shows.
type volumeCase struct {
	name  string
	build func() (string, error)
	why   string
}

func volumeCases(p plan) []volumeCase {
	const data = "/var/lib/libvirt/images/prod-image-aa4b-0123456789abcdef"
	return []volumeCase{
		{"root", func() (string, error) { return overlayXML(p.volume(volumeRoot), 20*gib, data, "qcow2") }, "compat 1.1, and the backing format is named"},
		{"root-raw", func() (string, error) { return overlayXML(p.volume(volumeRoot), 20*gib, data, "raw") }, "a raw image is not probed: its content could claim to be qcow2"},
		{"pointer", func() (string, error) {
			return overlayXML(newImageName(p.config.Scope, p.spec.Image.Checksum).pointer, 2*gib, data, "qcow2")
		}, "as large as the image"},
		{"data", func() (string, error) { return emptyDiskXML(p.dataVolume("data"), 64*tib) }, ""},
		{"upload", func() (string, error) { return uploadXML(p.volume(volumeSeed)) }, "no capacity: its size afterwards is what arrived"},
	}
}

func TestVolumeXML(t *testing.T) {
	for _, tt := range volumeCases(testPlan(t)) {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.build()
			if err != nil {
				t.Fatal(err)
			}
			golden.Assert(t, tt.name+".xml", []byte(got))

			var v libvirtxml.StorageVolume
			if err := v.Unmarshal(got); err != nil {
				t.Fatalf("libvirtxml cannot read it: %v", err)
			}
			again, err := v.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, again); diff != "" {
				t.Errorf("read and written again it differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReadVolume_ReadsWhatBuildersWrite(t *testing.T) {
	xml, err := overlayXML("v", 20*gib, "/pool/base", "qcow2")
	if err != nil {
		t.Fatal(err)
	}
	got, err := readVolume(xml)
	if err != nil {
		t.Fatal(err)
	}
	want := Volume{Name: "v", Format: "qcow2", CapacityBytes: 20 * gib, BackingPath: "/pool/base", BackingFormat: "qcow2"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("volume differs (-want +got):\n%s", diff)
	}
}

func TestReadVolume_FullDescription(t *testing.T) {
	got, err := readVolume(`<volume type='file'>
  <name>prod-x-root</name>
  <key>/pool/prod-x-root</key>
  <capacity unit='bytes'>21474836480</capacity>
  <allocation unit='bytes'>200704</allocation>
  <physical unit='bytes'>196624</physical>
  <target>
    <path>/pool/prod-x-root</path>
    <format type='qcow2'/>
    <permissions><mode>0600</mode><owner>0</owner><group>0</group></permissions>
    <compat>1.1</compat>
  </target>
  <backingStore>
    <path>/pool/base</path>
    <format type='raw'/>
  </backingStore>
</volume>`)
	want := Volume{
		Name: "prod-x-root", Path: "/pool/prod-x-root", Format: "qcow2", CapacityBytes: 20 * gib, PhysicalBytes: 196624,
		AllocatedBytes: 200704, BackingPath: "/pool/base", BackingFormat: "raw",
	}
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("volume differs (-want +got):\n%s", diff)
	}
}

func FuzzReadVolume(f *testing.F) {
	f.Add(`<volume><name>v</name><capacity unit='bytes'>18446744073709551615</capacity></volume>`)
	f.Add(`<volume><target><format/></target><backingStore><format/></backingStore></volume>`)
	f.Add(`<volume><capacity>-1</capacity></volume>`)
	f.Add(`<volume`)
	f.Fuzz(func(t *testing.T, xml string) {
		v, err := readVolume(xml)
		if err != nil {
			if v != (Volume{}) {
				t.Errorf("readVolume(%q) = %+v with error %v", xml, v, err)
			}
			return
		}
		if v.CapacityBytes < 0 || v.PhysicalBytes < 0 || v.AllocatedBytes < 0 {
			t.Errorf("readVolume(%q) has a negative size: %+v", xml, v)
		}
	})
}

func TestMachineOfVolume(t *testing.T) {
	uuid := MachineUUID("prod", "owner-1")
	other := MachineUUID("prod-"+uuid.String()[:8], "owner-1")
	tests := []struct {
		scope, name string
		ok          bool
		why         string
	}{
		{scope: "prod", name: volumePrefix("prod", uuid) + volumeRoot, ok: true},
		{scope: "prod", name: volumePrefix("prod", uuid) + volumeSeed, ok: true},
		{scope: "prod", name: volumePrefix("prod", uuid) + volumeData + "data", ok: true},
		{scope: "prod", name: volumePrefix("prod", uuid) + volumeRoot + ".snap1", ok: true, why: "an external snapshot"},
		{scope: "prod", name: volumePrefix("prod", uuid) + "rooted", why: "no part of a machine"},
		{scope: "prod", name: volumePrefix("prod", uuid), why: "no part"},
		{scope: "prod", name: "prod-" + uuid.String(), why: "no part"},
		{scope: "prod", name: "prod-" + uuid.String() + "_root", why: "no dash behind the UUID"},
		{scope: "prod", name: "prod-" + strings.ToUpper(uuid.String()) + "-root", why: "kvm2 writes lower case"},
		{scope: "prod", name: newImageName("prod", testChecksum).pointer, why: "an image"},
		{scope: "prod", name: newImageName("prod", testChecksum).attempt(), why: "an image's data"},
		{scope: "prod", name: volumePrefix("produce", uuid) + volumeRoot, why: "another scope with the same beginning"},
		{scope: "prod", name: volumePrefix("prod-eu", uuid) + volumeRoot, why: "another scope with the same beginning and a dash"},
		{scope: "prod", name: uuid.String() + "-root"},
		{scope: "prod", name: ""},
		{scope: "dev", name: volumePrefix("dev-"+uuid.String(), other) + volumeRoot, why: "another scope, which ends in a UUID"},
		{scope: "dev", name: volumePrefix("dev-"+uuid.String(), other) + volumeData + "data", why: "likewise"},
		{scope: "dev", name: newImageName("dev-"+uuid.String(), testChecksum).pointer, why: "its image"},
	}
	for _, tt := range tests {
		got, ok := machineOfVolume(tt.scope, tt.name)
		if ok != tt.ok || (ok && got != uuid) {
			t.Errorf("machineOfVolume(%q, %q) = %s, %t; want %t; %s", tt.scope, tt.name, got, ok, tt.ok, tt.why)
		}
	}
}

func TestImageName_AttemptsAreDistinctAndTellTheirImage(t *testing.T) {
	n := newImageName("prod", testChecksum)
	a, b := n.attempt(), n.attempt()
	if a == b || !n.isAttempt(a) || n.isAttempt(n.pointer) {
		t.Errorf("attempts %q and %q of %q", a, b, n.pointer)
	}
	longer := newImageName("prod", "sha512:"+strings.Repeat(testChecksum[len("sha256:"):], 2))
	if n.isAttempt(longer.pointer) || n.isAttempt(longer.attempt()) {
		t.Errorf("%q is taken for an attempt of %q", longer.attempt(), n.pointer)
	}
}

// volumesConn has a pool of volumes.
type volumesConn struct {
	Conn
	names   []string
	deleted []string
}

func (c *volumesConn) VolumeNames(context.Context, string) ([]string, error) {
	return slices.Clone(c.names), nil
}

func (c *volumesConn) DeleteVolume(_ context.Context, _, name string) error {
	c.deleted = append(c.deleted, name)
	return nil
}

func TestRemoveVolumes_OnlyThoseOfTheMachineAndRootLast(t *testing.T) {
	uuid, other := MachineUUID("dev", "owner-1"), MachineUUID("dev", "owner-2")
	own := volumePrefix("dev", uuid)
	scopeWithUUID := "dev-" + uuid.String()
	c := &volumesConn{names: []string{
		newImageName("dev", testChecksum).pointer,
		own + "disk-b", own + "disk-root", own + volumeRoot, own + volumeSeed,
		volumePrefix("dev", other) + volumeRoot,
		volumePrefix(scopeWithUUID, other) + volumeRoot, newImageName(scopeWithUUID, testChecksum).pointer,
	}}
	p := &Provider{cfg: Config{Scope: "dev"}}
	if err := p.removeVolumes(t.Context(), c, uuid, "default"); err != nil {
		t.Fatal(err)
	}
	want := []string{own + volumeSeed, own + "disk-b", own + "disk-root", own + volumeRoot}
	if diff := cmp.Diff(want, c.deleted); diff != "" {
		t.Errorf("deleted volumes differ (-want +got):\n%s", diff)
	}
}

func TestVolume_UnfinishedUntilItHasAHeader(t *testing.T) {
	tests := []struct {
		volume Volume
		want   bool
		why    string
	}{
		{volume: Volume{Format: "qcow2"}, want: true, why: "the file has just been made"},
		{volume: Volume{Format: "qcow2", CapacityBytes: 196_616, PhysicalBytes: 196_616, BackingPath: "/srv/base"}, want: true, why: "seen while qemu-img wrote"},
		{volume: Volume{Format: "qcow2", CapacityBytes: 1 << 20, PhysicalBytes: 196_616}},
		{volume: Volume{Format: "raw", CapacityBytes: 4096, PhysicalBytes: 4096}, why: "a raw file is as large as its disk"},
	}
	for _, tt := range tests {
		if got := tt.volume.unfinished(); got != tt.want {
			t.Errorf("%+v: unfinished() = %t, want %t; %s", tt.volume, got, tt.want, tt.why)
		}
	}
}
