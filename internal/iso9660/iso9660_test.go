package iso9660_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/iso9660"
	"github.com/kvm2/kvm2/internal/iso9660/isotest"
)

// seedFiles are the files of a cloud-init NoCloud seed.
func seedFiles() []iso9660.File {
	return []iso9660.File{
		{Name: "user-data", Data: []byte("#cloud-config\nhostname: a\n")},
		{Name: "meta-data", Data: []byte("instance-id: i-1\n")},
		{Name: "network-config", Data: []byte("version: 2\n")},
		{Name: "vendor-data"},
	}
}

// build builds a volume and reads it back.
func build(t *testing.T, label string, files []iso9660.File) isotest.Volume {
	t.Helper()
	image, err := iso9660.Build(label, files)
	if err != nil {
		t.Fatalf("Build: %v", err)
	}
	v, err := isotest.Read(image)
	if err != nil {
		t.Fatalf("Read: %v", err)
	}
	return v
}

// contents are the files by name, as a volume that is read back has them.
func contents(files []iso9660.File) map[string][]byte {
	byName := make(map[string][]byte)
	for _, f := range files {
		byName[f.Name] = append([]byte{}, f.Data...)
	}
	return byName
}

func TestBuild_EveryReaderSeesLabelAndFiles(t *testing.T) {
	seed := contents(seedFiles())
	want := isotest.Volume{
		Label:       "cidata",
		JolietLabel: "cidata",
		RockRidge:   seed,
		Joliet:      seed,
		ISO: map[string][]byte{
			"USER_DAT.;1": seed["user-data"],
			"META_DAT.;1": seed["meta-data"],
			"NETWORK_.;1": seed["network-config"],
			"VENDOR_D.;1": seed["vendor-data"],
		},
		Modes: map[string]uint32{
			"user-data": 0o100400, "meta-data": 0o100400, "network-config": 0o100400, "vendor-data": 0o100400,
		},
	}
	if diff := cmp.Diff(want, build(t, "cidata", seedFiles())); diff != "" {
		t.Errorf("volume differs (-want +got):\n%s", diff)
	}
}

func TestBuild_SameInputSameBytes(t *testing.T) {
	// A change of this sum changes the seed of every machine that exists: it must be meant.
	const want = "b0cfbd966d53aba29f8bea99c243e89cafc65b8f1250364ed2ddd13e4689db13"
	files := seedFiles()
	for range len(files) {
		image, err := iso9660.Build("cidata", files)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(image)
		if got := hex.EncodeToString(sum[:]); got != want {
			t.Errorf("SHA-256 is %s, want %s", got, want)
		}
		files = append(files[1:], files[0]) // the order does not matter
	}
}

func TestBuild_InputIsNotChanged(t *testing.T) {
	files := seedFiles()
	if _, err := iso9660.Build("cidata", files); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(seedFiles(), files); diff != "" {
		t.Errorf("Build changed its input (-want +got):\n%s", diff)
	}
}

func TestBuild_ContentsOfEverySize(t *testing.T) {
	sizes := []int{0, 1, 2047, 2048, 2049, 4096, 100_000, 16 << 20}
	var files []iso9660.File
	for _, size := range sizes {
		data := bytes.Repeat([]byte{0xA5}, size)
		files = append(files, iso9660.File{Name: fmt.Sprintf("size-%d", size), Data: data})
	}
	v := build(t, "cidata", files)
	for _, f := range files {
		for tree, byName := range map[string]map[string][]byte{"Rock Ridge": v.RockRidge, "Joliet": v.Joliet} {
			if !bytes.Equal(byName[f.Name], f.Data) {
				t.Errorf("%s: %q has %d other bytes, want %d", tree, f.Name, len(byName[f.Name]), len(f.Data))
			}
		}
	}
}

func TestBuild_EmptyVolumes(t *testing.T) {
	tests := []struct {
		name  string
		files []iso9660.File
	}{
		{name: "no files"},
		{name: "one empty file", files: []iso9660.File{{Name: "a"}}},
		{name: "empty files last", files: []iso9660.File{{Name: "a", Data: []byte("x")}, {Name: "b"}, {Name: "c"}}},
		{name: "empty files first", files: []iso9660.File{{Name: "a"}, {Name: "b"}, {Name: "c", Data: []byte("x")}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := build(t, "cidata", tt.files)
			if diff := cmp.Diff(contents(tt.files), v.RockRidge); diff != "" {
				t.Errorf("files differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestBuild_DirectoriesOfManySectors(t *testing.T) {
	var files []iso9660.File
	for i := range iso9660.MaxFiles {
		name := fmt.Sprintf("%04d-%s", i, strings.Repeat("n", i%(iso9660.MaxName-4)))
		files = append(files, iso9660.File{Name: name, Data: []byte(name)})
	}
	v := build(t, "cidata", files)
	want := contents(files)
	if diff := cmp.Diff(want, v.RockRidge); diff != "" {
		t.Errorf("Rock Ridge files differ (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, v.Joliet); diff != "" {
		t.Errorf("Joliet files differ (-want +got):\n%s", diff)
	}
	if len(v.ISO) != len(files) {
		t.Errorf("%d plain names for %d files", len(v.ISO), len(files))
	}
}

func TestBuild_PlainNamesAreUniqueAndDerived(t *testing.T) {
	tests := []struct {
		name  string
		files []string
		want  []string
		why   string
	}{
		{name: "extension", files: []string{"a.txt"}, want: []string{"A.TXT;1"}},
		{name: "long extension", files: []string{"archive.tar.gzip"}, want: []string{"ARCHIVE_.GZI;1"}, why: "the last period separates"},
		{name: "only an extension", files: []string{".profile"}, want: []string{"_.PRO;1"}, why: "a base of no characters is unusual"},
		{name: "other characters", files: []string{"a b~c"}, want: []string{"A_B_C.;1"}},
		{name: "case", files: []string{"A", "a"}, want: []string{"A.;1", "A1.;1"}},
		{
			name: "alike at the front", files: []string{"user-data-a", "user-data-b", "user-data-c"},
			want: []string{"USER_DA1.;1", "USER_DA2.;1", "USER_DAT.;1"},
		},
		{
			name: "a number that is taken", files: []string{"user-da1", "user-data-a", "user-data-b"},
			want: []string{"USER_DA1.;1", "USER_DA2.;1", "USER_DAT.;1"},
		},
		{name: "same base, other extension", files: []string{"a.b", "a.c"}, want: []string{"A.B;1", "A.C;1"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var files []iso9660.File
			for _, name := range tt.files {
				files = append(files, iso9660.File{Name: name})
			}
			got := slices.Sorted(maps.Keys(build(t, "cidata", files).ISO))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("plain names differ (-want +got):\n%s%s", diff, tt.why)
			}
		})
	}
}

func TestBuild_OrderFollowsNameThenExtension(t *testing.T) {
	// The reader checks the order. A hyphen sorts before a period as a byte, but "a" before "a-b" as a name.
	names := []string{"a-b", "a.b", "a", "A", "a.b.c", "a.bb", "ab", "a1.b", "_"}
	var files []iso9660.File
	for _, name := range names {
		files = append(files, iso9660.File{Name: name, Data: []byte(name)})
	}
	v := build(t, "cidata", files)
	if diff := cmp.Diff(contents(files), v.Joliet); diff != "" {
		t.Errorf("files differ (-want +got):\n%s", diff)
	}
}

func TestBuild_Labels(t *testing.T) {
	for _, label := range []string{"cidata", "CIDATA", "config-2", "x", "a b", strings.Repeat("l", iso9660.MaxLabel)} {
		v := build(t, label, nil)
		if v.Label != label || v.JolietLabel != label {
			t.Errorf("labels %q and %q, want %q", v.Label, v.JolietLabel, label)
		}
	}
}

func TestBuild_RefusesWhatReadersWouldNotSee(t *testing.T) {
	one := func(name string) []iso9660.File { return []iso9660.File{{Name: name}} }
	tests := []struct {
		name  string
		label string
		files []iso9660.File
		want  string // a part of the error
		why   string
	}{
		{name: "no label", label: "", want: "label is empty"},
		{name: "long label", label: strings.Repeat("l", iso9660.MaxLabel+1), want: "17 bytes", why: "Joliet has 16 characters"},
		{name: "label outside ASCII", label: "dätä", want: `"dätä"`},
		{name: "label with a control character", label: "a\tb", want: `"a\tb"`},
		{name: "label ends in a space", label: "cidata ", want: `"cidata "`, why: "read as padding"},
		{name: "label begins with a space", label: " cidata", want: `" cidata"`},
		{name: "no name", files: one(""), want: "name is empty"},
		{name: "self", files: one("."), want: `"."`},
		{name: "parent", files: one(".."), want: `".."`},
		{name: "long name", files: one(strings.Repeat("n", iso9660.MaxName+1)), want: "65 bytes"},
		{name: "path", files: one("a/b"), want: `"a/b"`},
		{name: "version", files: one("a;1"), want: `"a;1"`, why: "Joliet readers cut the version off"},
		{name: "backslash", files: one(`a\b`), want: `"a\\b"`},
		{name: "colon", files: one("a:b"), want: `"a:b"`},
		{name: "last period", files: one("a."), want: `"a."`, why: "Linux cuts it off in Joliet names"},
		{name: "last space", files: one("a "), want: `"a "`, why: "Windows cuts it off"},
		{name: "zero byte", files: one("a\x00"), want: `"a\x00"`},
		{name: "name outside ASCII", files: one("ä"), want: `"ä"`},
		{name: "twice the same name", files: append(one("a"), one("a")...), want: `"a"`},
		{name: "too many files", files: make([]iso9660.File, iso9660.MaxFiles+1), want: "1025 files"},
		{
			name: "too much content", want: "more than 67108864 bytes",
			files: []iso9660.File{{Name: "a", Data: make([]byte, iso9660.MaxSize)}, {Name: "b", Data: []byte("x")}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			label := tt.label
			if label == "" && tt.files != nil {
				label = "cidata"
			}
			image, err := iso9660.Build(label, tt.files)
			if err == nil {
				t.Fatalf("Build accepted it; %s", tt.why)
			}
			if image != nil {
				t.Errorf("Build returned %d bytes with an error", len(image))
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q does not contain %q", err, tt.want)
			}
		})
	}
}

func TestBuild_ErrorsDoNotQuoteContent(t *testing.T) {
	secret := []iso9660.File{{Name: "a", Data: []byte("password")}, {Name: "a", Data: []byte("password")}}
	_, err := iso9660.Build("cidata", secret)
	if err == nil || strings.Contains(err.Error(), "password") {
		t.Errorf("error is %v, want one without content", err)
	}
}

// FuzzBuild checks that what Build accepts reads back equal, and that the order of the files does not matter.
func FuzzBuild(f *testing.F) {
	f.Add("cidata", "user-data", "meta-data", []byte("#cloud-config\n"), []byte("instance-id: i-1\n"))
	f.Add("cidata", "a", "A", []byte{}, make([]byte, 2048))
	f.Add("x", "a.b", "a-b", make([]byte, 2049), []byte{})
	f.Add("", "a", "a", []byte{}, []byte{})
	f.Add("a b", ".", "a;1", []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, label, name1, name2 string, data1, data2 []byte) {
		files := []iso9660.File{{Name: name1, Data: data1}, {Name: name2, Data: data2}}
		image, err := iso9660.Build(label, files)
		if err != nil {
			return
		}
		v, err := isotest.Read(image)
		if err != nil {
			t.Fatalf("Read: %v", err)
		}
		if v.Label != label || v.JolietLabel != label {
			t.Errorf("labels %q and %q, want %q", v.Label, v.JolietLabel, label)
		}
		want := contents(files)
		if diff := cmp.Diff(want, v.RockRidge); diff != "" {
			t.Errorf("Rock Ridge files differ (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(want, v.Joliet); diff != "" {
			t.Errorf("Joliet files differ (-want +got):\n%s", diff)
		}
		if len(v.ISO) != len(files) {
			t.Errorf("%d plain names for %d files", len(v.ISO), len(files))
		}
		slices.Reverse(files)
		again, err := iso9660.Build(label, files)
		if err != nil || !bytes.Equal(image, again) {
			t.Errorf("the other order gives another volume (error %v)", err)
		}
	})
}
