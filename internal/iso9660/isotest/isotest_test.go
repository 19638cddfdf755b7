package isotest_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/iso9660"
	"github.com/kvm2/kvm2/internal/iso9660/isotest"
)

const sector = 2048

// The sectors of the volume that sample returns.
const (
	primaryDescriptor = 16 * sector
	jolietDescriptor  = 17 * sector
	terminator        = 18 * sector
	pathTableL        = 19 * sector
	pathTableM        = 20 * sector
	primaryRoot       = 23 * sector
	continuation      = 24 * sector
	jolietRoot        = 25 * sector

	// Offsets of records in the directories. Records for self and parent come first.
	primarySelf   = primaryRoot
	primaryParent = primarySelf + 106
	primaryFile   = primaryParent + 70
	jolietSelf    = jolietRoot
	jolietFile    = jolietRoot + 2*34
)

func sample(t testing.TB) []byte {
	t.Helper()
	image, err := iso9660.Build("cidata", []iso9660.File{
		{Name: "a", Data: []byte("alpha")},
		{Name: "b", Data: []byte("beta")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func TestRead_ReturnsWhatWasWritten(t *testing.T) {
	files := map[string][]byte{"a": []byte("alpha"), "b": []byte("beta")}
	want := isotest.Volume{
		Label:       "cidata",
		JolietLabel: "cidata",
		ISO:         map[string][]byte{"A.;1": []byte("alpha"), "B.;1": []byte("beta")},
		RockRidge:   files,
		Modes:       map[string]uint32{"a": 0o100400, "b": 0o100400},
		Joliet:      files,
	}
	got, err := isotest.Read(sample(t))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("volume differs (-want +got):\n%s", diff)
	}
}

// edit changes bytes of a volume.
type edit func(image []byte) []byte

func set(offset int, content ...byte) edit {
	return func(image []byte) []byte {
		copy(image[offset:], content)
		return image
	}
}

func setBoth32(offset int, v uint32) edit {
	b := binary.BigEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, v), v)
	return set(offset, b...)
}

// replace replaces the first occurrence of old behind offset.
func replace(offset int, old, new string) edit {
	return func(image []byte) []byte {
		i := offset + bytes.Index(image[offset:], []byte(old))
		copy(image[i:], new)
		return image
	}
}

func TestRead_RefusesBrokenRules(t *testing.T) {
	tests := []struct {
		name string
		edit edit
		want string // a part of the error
	}{
		{name: "empty image", edit: func([]byte) []byte { return nil }, want: "image ends"},
		{name: "no descriptors", edit: func([]byte) []byte { return make([]byte, 17*sector) }, want: "not a volume descriptor"},
		{name: "no terminator", edit: func(image []byte) []byte { return image[:terminator] }, want: "image ends"},
		{name: "cut off", edit: func(image []byte) []byte { return image[:len(image)-1] }, want: "too few"},
		{name: "unknown descriptor", edit: set(jolietDescriptor, 9), want: "unexpected type 9"},
		{name: "second primary", edit: set(jolietDescriptor, 1), want: "unexpected type 1"},
		{name: "no primary", edit: set(primaryDescriptor, 255), want: "terminator"},
		{
			name: "Joliet alone",
			edit: func(image []byte) []byte {
				copy(image[primaryDescriptor:], image[jolietDescriptor:pathTableL])
				return image
			},
			want: "no primary",
		},
		{name: "terminator with content", edit: set(terminator+100, 1), want: "terminator"},
		{name: "unused byte in use", edit: set(primaryDescriptor+7, 1), want: "not zero"},
		{name: "escape in the primary", edit: set(primaryDescriptor+88, '%'), want: "not zero"},
		{name: "unknown escape", edit: set(jolietDescriptor+90, 'X'), want: `"%/X"`},
		{name: "primary label", edit: set(primaryDescriptor+40, 0), want: "label"},
		{name: "Joliet label", edit: set(jolietDescriptor+41, 0), want: "Joliet label"},
		{name: "size in one byte order", edit: set(primaryDescriptor+80, 200), want: "byte orders"},
		{name: "size in one descriptor", edit: setBoth32(jolietDescriptor+80, 20), want: "28 and 20 sectors"},
		{name: "size of the set", edit: set(primaryDescriptor+120, 2, 0, 0, 2), want: "volumes in the set: 2"},
		{name: "size of the set in one byte order", edit: set(primaryDescriptor+120, 2), want: "byte orders"},
		{name: "block size", edit: set(primaryDescriptor+128, 0, 2, 2, 0), want: "logical block: 512"},
		{name: "path table size in one byte order", edit: set(primaryDescriptor+132, 11), want: "byte orders"},
		{name: "path table size", edit: setBoth32(primaryDescriptor+132, 12), want: "path table of 12 bytes"},
		{name: "path table outside", edit: set(primaryDescriptor+140, 0xFF, 0xFF), want: "outside"},
		{name: "path table twice in one place", edit: set(primaryDescriptor+144, 19), want: "belongs to both"},
		{name: "optional path table", edit: set(primaryDescriptor+144, 24), want: "does not describe"},
		{name: "path table of no root", edit: set(pathTableL, 2), want: "does not describe"},
		{name: "path table points elsewhere", edit: set(pathTableM+5, 99), want: "in sector 99, not 23"},
		{name: "path table in the other byte order", edit: set(pathTableL+2, 0, 0, 0, 23), want: "not 23"},
		{name: "Joliet path table", edit: set(21*sector+2, 99), want: "Joliet path table L"},
		{name: "root is no directory", edit: set(primaryDescriptor+156+25, 0), want: "none of a root directory"},
		{name: "root in one byte order", edit: set(primaryDescriptor+156+2, 99), want: "byte orders"},
		{name: "time with letters", edit: set(primaryDescriptor+813, 'x'), want: "no digits"},
		{name: "time zone", edit: set(primaryDescriptor+829, 60), want: "time zone 60"},
		{name: "structure version", edit: set(primaryDescriptor+881, 2), want: "version 2"},
		{name: "self elsewhere", edit: setBoth32(primarySelf+2, 25), want: "record 0"},
		{name: "parent elsewhere", edit: setBoth32(primaryParent+2, 25), want: "record 1"},
		{name: "empty directory", edit: func(image []byte) []byte {
			clear(image[jolietRoot : jolietRoot+sector])
			return image
		}, want: "missing"},
		{name: "directory of odd size", edit: setBoth32(jolietDescriptor+156+10, 100), want: "100 bytes"},
		{name: "directory outside", edit: setBoth32(jolietDescriptor+156+10, 8*sector), want: "outside"},
		{name: "bytes behind the records", edit: set(jolietRoot+sector-1, 1), want: "not zero"},
		{name: "record too short", edit: set(jolietFile, 4), want: "record of 4 bytes"},
		{name: "record of odd length", edit: set(jolietFile, 37), want: "record of 37 bytes"},
		{name: "extended attributes", edit: set(jolietFile+1, 1), want: "extended attributes"},
		{name: "interleaved", edit: set(jolietFile+26, 1), want: "interleaving"},
		{name: "extent in one byte order", edit: set(jolietFile+2, 1), want: "byte orders"},
		{name: "size in one byte order of a file", edit: set(jolietFile+10, 1), want: "byte orders"},
		{name: "extent outside", edit: setBoth32(jolietFile+2, 0xFFFFFFFF), want: "outside"},
		{name: "extent too large", edit: setBoth32(jolietFile+10, 0xFFFFFFFF), want: "outside"},
		{name: "extent over a directory", edit: setBoth32(jolietFile+2, 23), want: "belongs to both"},
		{name: "extent of another size", edit: setBoth32(jolietFile+10, 4), want: "belongs to both"},
		{name: "month", edit: set(jolietFile+19, 13), want: "does not exist"},
		{name: "zone of a record", edit: set(jolietFile+24, 0x80), want: "time zone -128"},
		{name: "file flags", edit: set(jolietFile+25, 0x80), want: "file flags 0x80"},
		{name: "subdirectory", edit: set(jolietFile+25, 2), want: "is a directory"},
		{name: "volume number", edit: set(jolietFile+28, 2, 0, 0, 2), want: "volume number 2"},
		{name: "volume number in one byte order", edit: set(jolietFile+28, 2), want: "byte orders"},
		{name: "no identifier", edit: set(jolietFile+32, 0), want: "identifier of 0 bytes"},
		{name: "identifier too long", edit: set(jolietFile+32, 9), want: "identifier of 9 bytes"},
		{name: "padding of an identifier", edit: set(jolietFile+35, 1), want: "not zero"},
		{name: "Joliet name of odd length", edit: set(jolietFile+32, 1), want: "odd"},
		{name: "Joliet name with a control character", edit: set(jolietFile+34, 7), want: "not a character"},
		{name: "Joliet name of surrogates", edit: set(jolietFile+33, 0xD8), want: "not a character"},
		{name: "Joliet name with a slash", edit: set(jolietFile+34, '/'), want: "not a Joliet name"},
		{name: "Joliet order", edit: set(jolietFile+34, 'c'), want: "out of order"},
		{name: "Joliet name twice", edit: set(jolietFile+34, 'b'), want: "out of order"},
		{name: "plain name in lower case", edit: set(primaryFile+33, 'a'), want: "not a file identifier"},
		{name: "plain order", edit: set(primaryFile+33, 'C'), want: "out of order"},
		{name: "no SP", edit: replace(primarySelf, "SP", "XX"), want: "begin with SP"},
		{name: "SP without its magic", edit: replace(primarySelf, "\xbe\xef", "\xbe\xee"), want: "begin with SP"},
		{name: "SP skips too much", edit: set(primarySelf+34+6, 200), want: "200 are to be skipped"},
		{name: "no ER", edit: replace(continuation, "ER", "XX"), want: "no ER"},
		{name: "ER of another protocol", edit: replace(continuation, "RRIP", "RIPR"), want: "no ER"},
		{name: "lengths in ER", edit: set(continuation+4, 11), want: "add up"},
		{name: "no CE", edit: replace(primarySelf, "CE", "XX"), want: "no ER"},
		{name: "CE outside", edit: setBoth32(primarySelf+34+7+36+4, 99), want: "outside"},
		{name: "CE in one byte order", edit: set(primarySelf+34+7+36+4, 99), want: "byte orders"},
		{name: "offset of CE in one byte order", edit: set(primarySelf+34+7+36+12, 9), want: "byte orders"},
		{name: "length of CE in one byte order", edit: set(primarySelf+34+7+36+20, 9), want: "byte orders"},
		{name: "CE over a sector's end", edit: setBoth32(primarySelf+34+7+36+12, 2000), want: "does not fit"},
		{name: "CE of nothing", edit: setBoth32(primarySelf+34+7+36+20, 0), want: "does not fit"},
		{name: "CE over a directory", edit: setBoth32(primarySelf+34+7+36+4, 23), want: "belongs to both"},
		{
			name: "CE to itself",
			edit: func(image []byte) []byte {
				ce := image[primarySelf+34+7+36 : primarySelf+34+7+36+28]
				copy(image[continuation:], ce)
				clear(image[continuation+28 : continuation+237])
				return setBoth32(primarySelf+34+7+36+20, 28)(setBoth32(continuation+20, 28)(image))
			},
			want: "goes on 16 times",
		},
		{
			name: "two continuations",
			edit: func(image []byte) []byte {
				ce := image[primarySelf+34+7+36 : primarySelf+34+7+36+28]
				copy(image[continuation:], append(bytes.Clone(ce), ce...))
				clear(image[continuation+56 : continuation+237])
				return image
			},
			want: "two places",
		},
		{
			name: "bytes behind the last entry",
			edit: func(image []byte) []byte {
				return setBoth32(primarySelf+34+7+36+20, 238)(set(continuation+237, 1)(image))
			},
			want: "not zero",
		},
		{
			name: "CE of another length",
			edit: func(image []byte) []byte {
				return set(primarySelf+34+7+36+2, 27)(image)
			},
			want: "CE entry of 23 bytes",
		},
		{
			name: "PX of another length",
			edit: func(image []byte) []byte {
				return set(primaryFile+33+5+2, 36+6)(image) // the NM entry with it
			},
			want: "PX entry of 38 bytes",
		},
		{name: "plain extent outside", edit: setBoth32(primaryFile+2, 99), want: "outside"},
		{name: "entry too short", edit: set(primaryFile+33+5, 'P', 'X', 3), want: "length 3"},
		{name: "entry too long", edit: set(primaryFile+33+5, 'P', 'X', 200), want: "length 200"},
		{name: "entry version", edit: set(primaryFile+33+5, 'P', 'X', 36, 2), want: "version 2"},
		{name: "no PX in the directory", edit: replace(primaryParent, "PX", "XX"), want: "no PX"},
		{name: "no PX in a file", edit: replace(primaryFile, "PX", "XX"), want: "no PX"},
		{name: "mode in one byte order", edit: set(primaryFile+33+5+4, 1), want: "byte orders"},
		{name: "links in one byte order", edit: set(primaryFile+33+5+12, 9), want: "byte orders"},
		{name: "mode of a link", edit: setBoth32(primaryFile+33+5+4, 0o120777), want: "file type"},
		{name: "mode of a file in the directory", edit: setBoth32(primaryParent+34+4, 0o100400), want: "file type"},
		{name: "no NM", edit: replace(primaryFile, "NM", "XX"), want: "not a whole file name"},
		{name: "NM flags", edit: replace(primaryFile, "NM\x06\x01\x00", "NM\x06\x01\x02"), want: "names no file"},
		{name: "NM without an end", edit: replace(primaryFile, "NM\x06\x01\x00", "NM\x06\x01\x01"), want: "not a whole"},
		{name: "NM with a slash", edit: replace(primaryFile, "NM\x06\x01\x00a", "NM\x06\x01\x00/"), want: "not a whole"},
		{name: "Rock Ridge name twice", edit: replace(primaryFile, "NM\x06\x01\x00a", "NM\x06\x01\x00b"), want: "two files"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := isotest.Read(tt.edit(sample(t)))
			if err == nil {
				t.Fatal("Read accepted it")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q does not contain %q", err, tt.want)
			}
		})
	}
}

func TestRead_OptionalParts(t *testing.T) {
	tests := []struct {
		name  string
		edit  edit
		check func(v isotest.Volume) bool
	}{
		{
			name: "no Joliet",
			edit: func(image []byte) []byte {
				copy(image[jolietDescriptor:], image[terminator:terminator+sector])
				return image
			},
			check: func(v isotest.Volume) bool {
				return v.Joliet == nil && v.JolietLabel == "" && len(v.RockRidge) == 2
			},
		},
		{
			name: "no Rock Ridge",
			edit: func(image []byte) []byte {
				// Self and parent are as in the Joliet tree, and no files follow.
				clear(image[primaryRoot : primaryRoot+sector])
				copy(image[primaryRoot:], image[jolietRoot:jolietFile])
				image = setBoth32(primaryRoot+2, 23)(image)
				return setBoth32(primaryRoot+34+2, 23)(image)
			},
			check: func(v isotest.Volume) bool {
				return v.RockRidge == nil && v.Modes == nil && len(v.ISO) == 0 && len(v.Joliet) == 2
			},
		},
		{
			name: "second copies of the path tables",
			edit: func(image []byte) []byte {
				image = append(image, image[pathTableL:pathTableM+sector]...)
				image = set(primaryDescriptor+144, 28)(image)
				image = set(primaryDescriptor+155, 29)(image)
				image = setBoth32(primaryDescriptor+80, 30)(image)
				return setBoth32(jolietDescriptor+80, 30)(image)
			},
			check: func(v isotest.Volume) bool { return len(v.RockRidge) == 2 && len(v.Joliet) == 2 },
		},
		{
			name:  "time not specified",
			edit:  set(jolietFile+18, 0, 0, 0, 0, 0, 0, 0),
			check: func(v isotest.Volume) bool { return len(v.Joliet) == 2 },
		},
		{
			name: "entries end before their area does",
			edit: func(image []byte) []byte {
				image = set(continuation+237, 'S', 'T', 4, 1, 0xFF, 0xFF, 0xFF, 0xFF)(image)
				return setBoth32(primarySelf+34+7+36+20, 245)(image)
			},
			check: func(v isotest.Volume) bool { return len(v.RockRidge) == 2 },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v, err := isotest.Read(tt.edit(sample(t)))
			if err != nil {
				t.Fatal(err)
			}
			if !tt.check(v) {
				t.Errorf("volume is %+v", v)
			}
		})
	}
}

func TestRead_RefusesRecordsAcrossSectors(t *testing.T) {
	const length, fit = 40, 49 // of a record in the Joliet tree, and how many fit into the first sector
	var files []iso9660.File
	for i := range fit + 1 {
		files = append(files, iso9660.File{Name: fmt.Sprintf("a%02d", i)})
	}
	image, err := iso9660.Build("cidata", files)
	if err != nil {
		t.Fatal(err)
	}
	root := int(binary.LittleEndian.Uint32(image[jolietDescriptor+156+2:])) * sector
	last := root + 2*34 + (fit-1)*length
	if image[last] != length {
		t.Fatalf("no record of %d bytes at %d", length, last)
	}
	image[last] = 62
	if _, err := isotest.Read(image); err == nil || !strings.Contains(err.Error(), "crosses") {
		t.Errorf("error is %v, want one of a record that crosses its sector's end", err)
	}
}

// TestTools_VolumesOfOtherWriters keeps the reader from being right only about the writer beside it.
func TestTools_VolumesOfOtherWriters(t *testing.T) {
	files := map[string][]byte{
		"user-data":      bytes.Repeat([]byte("u"), 5000),
		"meta-data":      []byte("m"),
		"network-config": {},
	}
	tests := []struct {
		tool string
		args []string
	}{
		{tool: "genisoimage", args: []string{"-quiet", "-V", "cidata", "-r", "-J"}},
		{tool: "xorriso", args: []string{"-as", "mkisofs", "-quiet", "-V", "cidata", "-r", "-J"}},
	}
	for _, tt := range tests {
		t.Run(tt.tool, func(t *testing.T) {
			path, err := exec.LookPath(tt.tool)
			if err != nil {
				t.Skipf("%s is not installed", tt.tool)
			}
			dir, image := t.TempDir(), filepath.Join(t.TempDir(), "volume.iso")
			for name, content := range files {
				if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			args := append(tt.args, "-o", image, dir)
			if out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", tt.tool, err, out)
			}
			content, err := os.ReadFile(image)
			if err != nil {
				t.Fatal(err)
			}
			v, err := isotest.Read(content)
			if err != nil {
				t.Fatal(err)
			}
			if v.Label != "cidata" || v.JolietLabel != "cidata" {
				t.Errorf("labels %q and %q", v.Label, v.JolietLabel)
			}
			if diff := cmp.Diff(files, v.RockRidge); diff != "" {
				t.Errorf("Rock Ridge files differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(files, v.Joliet); diff != "" {
				t.Errorf("Joliet files differ (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzRead checks that no bytes make Read panic, and that a volume it accepts shows as many files in every tree. The
// fuzzer changes a few places of a good volume, since it would not find its way through the checks from nothing.
func FuzzRead(f *testing.F) {
	f.Add(uint32(0), []byte{}, uint32(0), []byte{})
	f.Add(uint32(primaryDescriptor+80), []byte{1, 2, 3}, uint32(jolietFile+10), []byte{0xFF, 0xFF})
	f.Add(uint32(continuation), []byte("CE\x1c\x01"), uint32(primaryFile+33), []byte("NM\x05\x01\x01"))
	f.Add(uint32(primarySelf), []byte{255}, uint32(27*sector), bytes.Repeat([]byte("x"), 100))
	good := sample(f)
	f.Fuzz(func(t *testing.T, offset1 uint32, edit1 []byte, offset2 uint32, edit2 []byte) {
		image := bytes.Clone(good)
		image = overwrite(image, offset1, edit1)
		image = overwrite(image, offset2, edit2)
		v, err := isotest.Read(image)
		if err != nil {
			return
		}
		if v.RockRidge != nil && len(v.RockRidge) != len(v.ISO) {
			t.Errorf("%d Rock Ridge names for %d files", len(v.RockRidge), len(v.ISO))
		}
		for name := range maps.Keys(v.RockRidge) {
			if _, ok := v.Modes[name]; !ok {
				t.Errorf("%q has no mode", name)
			}
		}
	})
}

// overwrite copies content to offset, or cuts the image off there when there is none.
func overwrite(image []byte, offset uint32, content []byte) []byte {
	at := int(offset % uint32(len(image)+1))
	if len(content) == 0 && at > 0 {
		return image[:at]
	}
	copy(image[at:], content)
	return image
}
