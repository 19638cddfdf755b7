package kvm2test

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/kvm2/kvm2"
)

// rawXML describes a raw volume that takes up no space yet.
func rawXML(name string, capacity int64) string {
	return fmt.Sprintf("<volume><name>%s</name><capacity unit='bytes'>%d</capacity><allocation unit='bytes'>0</allocation>"+
		"<target><format type='raw'/></target></volume>", escaped(name), capacity)
}

// qcow2XML describes a qcow2 volume, with a backing store if one is given.
func qcow2XML(name string, capacity int64, backingPath string) string {
	backing := ""
	if backingPath != "" {
		backing = fmt.Sprintf("<backingStore><path>%s</path><format type='qcow2'/></backingStore>", escaped(backingPath))
	}
	return fmt.Sprintf("<volume><name>%s</name><capacity unit='bytes'>%d</capacity><target><format type='qcow2'/><compat>1.1</compat></target>%s</volume>",
		escaped(name), capacity, backing)
}

func (s *seam) rawVolume(part string, capacity int64) {
	s.Helper()
	s.must(s.conn.CreateVolume(s.ctx, s.caps.Pool, rawXML(s.name(part), capacity)))
}

func (s *seam) qcow2Volume(part string, capacity int64) {
	s.Helper()
	s.must(s.conn.CreateVolume(s.ctx, s.caps.Pool, qcow2XML(s.name(part), capacity, "")))
}

// overlay makes a volume on the volume "base".
func (s *seam) overlay(part string, capacity int64) {
	s.Helper()
	s.must(s.conn.CreateVolume(s.ctx, s.caps.Pool, qcow2XML(s.name(part), capacity, s.volume("base").Path)))
}

func (s *seam) volume(part string) kvm2.Volume {
	s.Helper()
	return get[kvm2.Volume](s, "Volume")(s.conn.Volume(s.ctx, s.caps.Pool, s.name(part)))
}

func volumeCases() []seamCase {
	return []seamCase{
		{"VolumeNames/Sorted", "VolumeNames lists all volumes, sorted.", "", func(s *seam) {
			for _, part := range []string{"b", "c", "a"} {
				s.rawVolume(part, 0)
			}
			names := get[[]string](s, "VolumeNames")(s.conn.VolumeNames(s.ctx, s.caps.Pool))
			if !slices.IsSorted(names) {
				s.Errorf("got %q, want them sorted", names)
			}
			for _, part := range []string{"a", "b", "c"} {
				if !slices.Contains(names, s.name(part)) {
					s.Errorf("got %q, want %q among them", names, s.name(part))
				}
			}
		}},
		{"VolumeNames/NoPool", "The volumes of a pool that does not exist are code 49.", "", func(s *seam) {
			_, err := s.conn.VolumeNames(s.ctx, s.name("none"))
			s.wantCode(err, 49)
		}},
		{"Volumes/AsVolume", "Volumes returns every volume, sorted by name, with all that Volume says of it.", "", func(s *seam) {
			s.qcow2Volume("base", 1<<20)
			s.overlay("top", 2<<20)
			s.rawVolume("a", 4096)
			volumes := get[[]kvm2.Volume](s, "Volumes")(s.conn.Volumes(s.ctx, s.caps.Pool))
			if !slices.IsSortedFunc(volumes, func(a, b kvm2.Volume) int { return strings.Compare(a.Name, b.Name) }) {
				s.Errorf("got %+v, want them sorted", volumes)
			}
			for _, part := range []string{"base", "top", "a"} {
				if want := s.volume(part); !slices.Contains(volumes, want) {
					s.Errorf("got %+v, want %+v among them", volumes, want)
				}
			}
		}},
		{"Volumes/NoPool", "The volumes of a pool that does not exist are code 49.", "", func(s *seam) {
			_, err := s.conn.Volumes(s.ctx, s.name("none"))
			s.wantCode(err, 49)
		}},
		{"Volume/Missing", "A volume that does not exist is code 50.", "", func(s *seam) {
			_, err := s.conn.Volume(s.ctx, s.caps.Pool, s.name("none"))
			s.wantCode(err, 50)
		}},
		{"Volume/NoPool", "A volume of a pool that does not exist is code 49.", "", func(s *seam) {
			_, err := s.conn.Volume(s.ctx, s.name("none"), s.name("v"))
			s.wantCode(err, 49)
		}},
		{"Volume/Path", "A volume's path lies in the pool's directory and ends in its name.", "", func(s *seam) {
			s.rawVolume("v", 0)
			if got, want := s.volume("v").Path, path.Join(s.pool().TargetPath, s.name("v")); got != want {
				s.Errorf("got path %q, want %q", got, want)
			}
		}},
		{"DeleteVolume/Gone", "A deleted volume is gone, and deleting it again is code 50.", "", func(s *seam) {
			s.rawVolume("v", 0)
			s.must(s.conn.DeleteVolume(s.ctx, s.caps.Pool, s.name("v")))
			_, err := s.conn.Volume(s.ctx, s.caps.Pool, s.name("v"))
			s.wantCode(err, 50)
			s.wantCode(s.conn.DeleteVolume(s.ctx, s.caps.Pool, s.name("v")), 50)
		}},
		{"DeleteVolume/NoPool", "Deleting a volume of a pool that does not exist is code 49.", "", func(s *seam) {
			s.wantCode(s.conn.DeleteVolume(s.ctx, s.name("none"), s.name("v")), 49)
		}},
		{"DeleteVolume/UnderOverlay", "A volume that another one stands on can be deleted.", "", func(s *seam) {
			s.qcow2Volume("base", 1<<20)
			s.overlay("top", 1<<20)
			base := s.volume("base").Path
			s.must(s.conn.DeleteVolume(s.ctx, s.caps.Pool, s.name("base")))
			if got := s.volume("top").BackingPath; got != base {
				s.Errorf("got backing path %q, want %q", got, base)
			}
		}},
	}
}

func createVolumeCases() []seamCase {
	cases := []seamCase{
		{"CreateVolume/Raw", "A raw volume has the size of its capacity and takes up no space.", "", func(s *seam) {
			s.rawVolume("v", 4<<20)
			v := s.volume("v")
			if v.Name != s.name("v") || v.Format != "raw" || v.CapacityBytes != 4<<20 || v.PhysicalBytes != 4<<20 || v.AllocatedBytes != 0 {
				s.Errorf("got %+v, want 4 MiB raw with nothing allocated", v)
			}
		}},
		{"CreateVolume/RawEmpty", "A raw volume may have no capacity at all.", "", func(s *seam) {
			s.rawVolume("v", 0)
			if v := s.volume("v"); v.CapacityBytes != 0 || v.PhysicalBytes != 0 {
				s.Errorf("got %+v, want sizes of 0", v)
			}
		}},
		{"CreateVolume/RawAllocatesByDefault", "A raw volume whose XML says nothing of allocation takes up its capacity.", "", func(s *seam) {
			xml := fmt.Sprintf("<volume><name>%s</name><capacity unit='KiB'>64</capacity></volume>", s.name("v"))
			s.must(s.conn.CreateVolume(s.ctx, s.caps.Pool, xml))
			if v := s.volume("v"); v.Format != "raw" || v.AllocatedBytes != 64<<10 {
				s.Errorf("got %+v, want raw with 64 KiB allocated", v)
			}
		}},
		{"CreateVolume/Qcow2", "A qcow2 volume has its capacity inside, and is small outside.", "", func(s *seam) {
			s.qcow2Volume("v", 10<<30)
			v := s.volume("v")
			if v.Format != "qcow2" || v.CapacityBytes != 10<<30 || v.PhysicalBytes <= 0 || v.PhysicalBytes > 1<<20 || v.BackingPath != "" {
				s.Errorf("got %+v, want 10 GiB of qcow2 in less than 1 MiB, standing on nothing", v)
			}
		}},
		{"CreateVolume/Overlay", "An overlay names what it stands on, and has a size of its own.", "", func(s *seam) {
			s.qcow2Volume("base", 1<<20)
			s.overlay("v", 8<<20)
			v := s.volume("v")
			if v.Format != "qcow2" || v.CapacityBytes != 8<<20 || v.BackingPath != s.volume("base").Path || v.BackingFormat != "qcow2" {
				s.Errorf("got %+v, want 8 MiB of qcow2 on %q", v, s.volume("base").Path)
			}
		}},
		{"CreateVolume/OverlayTooSmall", "An overlay smaller than what it stands on is accepted.", "", func(s *seam) {
			s.qcow2Volume("base", 8<<20)
			s.overlay("v", 1<<20)
			if v := s.volume("v"); v.CapacityBytes != 1<<20 {
				s.Errorf("got %+v, want a capacity of 1 MiB", v)
			}
		}},
		{"CreateVolume/Exclusive", "A volume's name is taken: code 90. The volume that has it stays as it is.", "", func(s *seam) {
			s.qcow2Volume("v", 1<<20)
			s.wantCode(s.conn.CreateVolume(s.ctx, s.caps.Pool, rawXML(s.name("v"), 0)), 90)
			if v := s.volume("v"); v.Format != "qcow2" {
				s.Errorf("got %+v, want qcow2 still", v)
			}
		}},
		{"CreateVolume/Race", "Of many that create one volume, one wins and the others get code 90.", "", func(s *seam) {
			errs := s.race(6, func(_ int, conn kvm2.Conn) error {
				return conn.CreateVolume(s.ctx, s.caps.Pool, qcow2XML(s.name("v"), 1<<20, ""))
			})
			s.wantOneWinner(errs, 90)
		}},
		{"CreateVolume/NoPool", "A volume in a pool that does not exist is code 49.", "", func(s *seam) {
			s.wantCode(s.conn.CreateVolume(s.ctx, s.name("none"), rawXML(s.name("v"), 0)), 49)
		}},
	}
	for _, r := range []struct {
		name, rule string
		code       int
		xml        func(*seam) string
	}{
		{"Malformed", "XML that is not well-formed is code 35.", 35, func(s *seam) string { return "<volume><name>" + s.name("v") }},
		{"WrongRoot", "XML of something else is code 27.", 27, func(*seam) string { return "<domain/>" }},
		{"NoName", "A volume without a name is code 27.", 27, func(*seam) string { return rawXML("", 0) }},
		{"NoCapacity", "A volume without a capacity is code 27.", 27, func(s *seam) string {
			return fmt.Sprintf("<volume><name>%s</name></volume>", s.name("v"))
		}},
		{"SlashInName", "A name with a slash is code 55.", 55, func(s *seam) string { return rawXML(s.name("a/b"), 0) }},
		{"UnknownFormat", "A format that libvirt does not know is code 67.", 67, func(s *seam) string {
			return fmt.Sprintf("<volume><name>%s</name><capacity>0</capacity><target><format type='nonsense'/></target></volume>", s.name("v"))
		}},
		{"RawOverlay", "A raw volume with a backing store is code 3.", 3, func(s *seam) string {
			s.qcow2Volume("base", 1<<20)
			return fmt.Sprintf("<volume><name>%s</name><capacity>0</capacity><backingStore><path>%s</path></backingStore></volume>",
				s.name("v"), escaped(s.volume("base").Path))
		}},
		{"NoBackingFile", "An overlay on a file that does not exist is code 38.", 38, func(s *seam) string {
			return qcow2XML(s.name("v"), 1<<20, path.Join(s.pool().TargetPath, s.name("none")))
		}},
	} {
		cases = append(cases, seamCase{"CreateVolume/" + r.name, r.rule, "", func(s *seam) {
			s.wantCode(s.conn.CreateVolume(s.ctx, s.caps.Pool, r.xml(s)), r.code)
			s.wantUsable(s.conn)
			_, err := s.conn.Volume(s.ctx, s.caps.Pool, s.name("v"))
			s.wantCode(err, 50)
		}})
	}
	return cases
}
