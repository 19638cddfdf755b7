package kvm2

import (
	"strings"
	"testing"
	"time"
)

func TestImageOfVolume(t *testing.T) {
	sum256, sum512, attempt := strings.Repeat("0a", 32), strings.Repeat("0b", 64), "-0123456789abcdef"
	for _, tt := range []struct{ scope, volume, checksum string }{
		{"a", "a-image-" + sum256, "sha256:" + sum256},
		{"a", "a-image-" + sum256 + attempt, "sha256:" + sum256},
		{"a", "a-image-" + sum512 + attempt, "sha512:" + sum512},
		{"a-image", "a-image-image-" + sum256, "sha256:" + sum256},
		{"a", "a-image-image-" + sum256, ""},
		{"a-image", "a-image-" + sum256, ""},
		{"a", "a-image-" + sum256 + "-backup", ""},
		{"a", "a-image-" + sum256 + attempt + "-root", ""},
		{"a", "a-image-" + MachineUUID("a", "b").String() + "-root", ""},
		{"a", "a-image-" + sum256 + attempt + "\n", ""},
		{"a", "b-image-" + sum256, ""},
	} {
		name, ok := imageOfVolume(tt.scope, tt.volume)
		if ok != (tt.checksum != "") || name.checksum != tt.checksum {
			t.Errorf("imageOfVolume(%q, %q) = %+v, %v; want %q", tt.scope, tt.volume, name, ok, tt.checksum)
		}
		if ok && tt.volume != name.pointer && !name.isAttempt(tt.volume) {
			t.Errorf("%q is neither the pointer nor an attempt of %+v", tt.volume, name)
		}
	}
}

// A root disk that is just being made does not show yet on which image it will stand: all stay.
func TestPrune_KeepsAllWhileARootDiskIsBeingMade(t *testing.T) {
	name := newImageName("a", "sha256:"+strings.Repeat("0a", 32))
	data := name.pointer + "-0123456789abcdef"
	image := []Volume{
		{Name: name.pointer, Format: "qcow2", CapacityBytes: 1 << 30, PhysicalBytes: 196_616, BackingPath: "/pool/" + data},
		{Name: data, Path: "/pool/" + data, Format: "qcow2", CapacityBytes: 1 << 30, PhysicalBytes: 1 << 20},
	}
	machine := "a-" + MachineUUID("a", "b").String()
	for _, tt := range []struct {
		why    string
		volume Volume
		kept   KeepReason
	}{
		{"being made", Volume{Name: machine + "-root", Format: "qcow2"}, KeepInUse},
		{"being made, the first bytes written", Volume{Name: machine + "-root", Format: "qcow2", CapacityBytes: 512, PhysicalBytes: 512}, KeepInUse},
		{"left by a host that died", Volume{Name: machine + "-root", Format: "raw"}, ""},
		{"a data disk stands on nothing", Volume{Name: machine + "-disk-root2", Format: "qcow2"}, ""},
		{"another scope's", Volume{Name: "b" + machine[1:] + "-root", Format: "qcow2"}, ""},
	} {
		volumes := append([]Volume{tt.volume}, image...)
		r := &pruning{Provider: &Provider{space: &reservations{}}, known: newAttempts(time.Minute)}
		i := storedImages("a", volumes)[0]
		r.judge(i, usesOf("a", volumes))
		if i.result.Kept != tt.kept || i.goes != (tt.kept == "") || len(i.doomed) != map[bool]int{true: 1}[i.goes] {
			t.Errorf("%s: %+v, want it kept for %q", tt.why, i, tt.kept)
		}
	}
}
