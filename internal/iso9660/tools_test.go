package iso9660_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/iso9660"
)

// The tests in this file let tools of a Linux host read a volume. Each skips where its tool is not installed.

// lookTool returns the path of an installed tool.
func lookTool(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	t.Skipf("%s is not installed", name)
	return ""
}

// output runs a tool and returns its standard output.
func output(t *testing.T, path string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), path, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", path, args, err, stderr.String())
	}
	return string(out)
}

// toolFiles are a seed whose directories and contents span sectors.
func toolFiles() []iso9660.File {
	files := seedFiles()
	files = append(files, iso9660.File{Name: "big", Data: bytes.Repeat([]byte("0123456789abcdef"), 1<<12)})
	for i := range 60 {
		files = append(files, iso9660.File{Name: strings.Repeat("n", i+1) + ".txt", Data: []byte{byte(i)}})
	}
	return files
}

func writeVolume(t *testing.T, files []iso9660.File) string {
	t.Helper()
	image, err := iso9660.Build("cidata", files)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "seed.iso")
	if err := os.WriteFile(path, image, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTools_BlkidFindsTheLabel(t *testing.T) {
	blkid := lookTool(t, "blkid")
	out := output(t, blkid, "-p", "-o", "export", writeVolume(t, seedFiles()))
	for _, want := range []string{"LABEL=cidata\n", "TYPE=iso9660\n", "VERSION=Joliet Extension\n"} {
		if !strings.Contains(strings.ReplaceAll(out, `\ `, " "), want) {
			t.Errorf("blkid does not say %q:\n%s", want, out)
		}
	}
}

func TestTools_IsoinfoSeesTheNames(t *testing.T) {
	isoinfo := lookTool(t, "isoinfo")
	files := toolFiles()
	path := writeVolume(t, files)
	var want []string
	for _, f := range files {
		want = append(want, "/"+f.Name)
	}
	slices.Sort(want)
	for _, extension := range []string{"-R", "-J"} {
		got := strings.Fields(output(t, isoinfo, extension, "-f", "-i", path))
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("isoinfo %s: names differ (-want +got):\n%s", extension, diff)
		}
		for _, f := range files {
			if got := output(t, isoinfo, extension, "-i", path, "-x", "/"+f.Name); got != string(f.Data) {
				t.Errorf("isoinfo %s: %q has %d other bytes, want %d", extension, f.Name, len(got), len(f.Data))
			}
		}
	}
	summary := output(t, isoinfo, "-d", "-i", path)
	for _, want := range []string{"Volume id: cidata\n", "Joliet with UCS level 3 found", "Rock Ridge signatures version 1 found"} {
		if !strings.Contains(summary, want) {
			t.Errorf("isoinfo -d does not say %q:\n%s", want, summary)
		}
	}
}

func TestTools_XorrisoExtractsTheFiles(t *testing.T) {
	xorriso := lookTool(t, "xorriso")
	files := toolFiles()
	dir := filepath.Join(t.TempDir(), "extracted")
	// Trouble of any severity above a note is an error: xorriso reports what it finds odd as WARNING or SORRY.
	output(t, xorriso, "-abort_on", "WARNING", "-return_with", "WARNING", "32", "-osirrox", "on",
		"-indev", "stdio:"+writeVolume(t, files), "-extract", "/", dir)
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	got := make(map[string][]byte)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		got[entry.Name()] = content
	}
	if diff := cmp.Diff(contents(files), got); diff != "" {
		t.Errorf("files differ (-want +got):\n%s", diff)
	}
}

func TestTools_BsdtarReadsForward(t *testing.T) {
	// Its library refuses a volume whose parts lie behind what refers to them.
	bsdtar := lookTool(t, "bsdtar")
	files := toolFiles()
	path := writeVolume(t, files)
	got := strings.Fields(output(t, bsdtar, "-tf", path))
	want := []string{"."}
	for _, f := range files {
		want = append(want, f.Name)
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names differ (-want +got):\n%s", diff)
	}
	for _, f := range files {
		if got := output(t, bsdtar, "-xOf", path, f.Name); got != string(f.Data) {
			t.Errorf("%q has %d other bytes, want %d", f.Name, len(got), len(f.Data))
		}
	}
}
