package qcow2_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvm2/kvm2/internal/qcow2"
)

// The tests in this file need qemu-img and skip where it is not installed.

// qemuImg runs qemu-img and returns what it printed.
func qemuImg(t *testing.T, args ...string) string {
	t.Helper()
	path, err := exec.LookPath("qemu-img")
	if err != nil {
		t.Skip("qemu-img is not installed")
	}
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("qemu-img %q: %v\n%s", args, err, out)
	}
	return string(out)
}

func readHead(t *testing.T, path string) []byte {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	head, err := io.ReadAll(io.LimitReader(file, 64<<10))
	if err != nil {
		t.Fatal(err)
	}
	return head
}

func TestTools_QemuImgAcceptsTheMinimalImage(t *testing.T) {
	for _, size := range []int64{512, 512<<20 + 512, 10 * gib, qcow2.MaxVirtualSize} {
		image, err := qcow2.MinimalImage(size)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		path := filepath.Join(dir, "base.qcow2")
		if err := os.WriteFile(path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		if out := qemuImg(t, "check", "-f", "qcow2", path); !strings.Contains(out, "No errors were found") {
			t.Errorf("size %d: qemu-img check says:\n%s", size, out)
		}
		overlay := filepath.Join(dir, "overlay.qcow2")
		qemuImg(t, "create", "-q", "-f", "qcow2", "-b", path, "-F", "qcow2", overlay)
		h, err := qcow2.ParseHeader(readHead(t, overlay))
		if err != nil || h.VirtualSize != size || !h.BackingFile {
			t.Errorf("size %d: header of an overlay %+v, error %v", size, h, err)
		}
	}
}

func TestTools_HeadersThatQemuImgWrites(t *testing.T) {
	tests := []struct {
		name    string
		args    []string // of qemu-img create
		options string
		compat  string
		refused string // the feature, or "" for an image that stands on its own
	}{
		{name: "defaults", options: "compat=1.1", compat: "1.1"},
		{name: "old", options: "compat=0.10", compat: "0.10"},
		{name: "small clusters", options: "cluster_size=512", compat: "1.1"},
		{name: "large clusters", options: "cluster_size=2M", compat: "1.1"},
		{name: "extended L2 entries", options: "extended_l2=on,cluster_size=128k", compat: "1.1"},
		{name: "zstd", options: "compression_type=zstd", compat: "1.1"},
		{name: "lazy", options: "lazy_refcounts=on,refcount_bits=1", compat: "1.1"},
		{name: "preallocated", options: "preallocation=metadata", compat: "1.1"},
		{name: "backing file", args: []string{"-b", "base", "-F", "raw"}, options: "compat=1.1", refused: "backing file"},
		{name: "old backing file", args: []string{"-b", "base", "-F", "raw"}, options: "compat=0.10", refused: "backing file"},
		{name: "data file", options: "data_file=data", refused: "external data file"},
		{name: "raw data file", options: "data_file=data,data_file_raw=on", refused: "external data file"},
		{
			name: "LUKS", args: []string{"--object", "secret,id=key,data=not-a-secret"},
			options: "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10", refused: "encryption",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			qemuImg(t, "create", "-q", "-f", "raw", "base", "1G")
			args := append([]string{"create", "-q", "-f", "qcow2"}, tt.args...)
			qemuImg(t, append(args, "-o", tt.options, "image", "1G")...)
			h, err := qcow2.ParseHeader(readHead(t, "image"))
			if err != nil {
				t.Fatalf("ParseHeader: %v", err)
			}
			if h.VirtualSize != gib {
				t.Errorf("virtual size %d", h.VirtualSize)
			}
			err = h.CheckStandalone()
			if tt.refused != "" {
				wantRefused(t, err, tt.refused)
				return
			}
			if err != nil {
				t.Errorf("refused: %v", err)
			}
			if h.Compat() != tt.compat {
				t.Errorf("compat %q, want %q", h.Compat(), tt.compat)
			}
		})
	}
}
