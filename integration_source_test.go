//go:build integration

package kvm2_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

func TestRealHost_VolumeIsUsedInPlace(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) {
			const golden = "kvm2-it-golden.raw"
			disk := randomDisk(16 * mib) // more than the connection holds when the head has been read
			path := filepath.Join(t.TempDir(), golden)
			if err := os.WriteFile(path, disk, 0o600); err != nil {
				t.Fatal(err)
			}
			virsh(t, "vol-create-as", h.Pool, golden, "16MiB")
			t.Cleanup(func() { virsh(t, "vol-delete", "--pool", h.Pool, golden) })
			virsh(t, "vol-upload", "--pool", h.Pool, golden, path)

			p := realProvider(t, h, uri, "kvm2-it-inplace-"+name)
			spec := tinySpec(kvm2.Image{Volume: golden}, "web-1")
			spec.RootDiskBytes = 16 * mib
			m := pollUntilRunning(t, p, spec)
			pollUntilDeleted(t, p, m.ID)
			back := filepath.Join(t.TempDir(), golden)
			virsh(t, "vol-download", "--pool", h.Pool, golden, back)
			if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, disk) {
				t.Errorf("the volume has %d bytes, %v; want it unchanged", len(got), err)
			}
		})
	}
}

// TestRealHost_CompressedImageThatBreaksOff has everything at once: a file of checksums, a compressed image, a
// connection that is lost in the middle, and libvirt at the other end.
func TestRealHost_CompressedImageThatBreaksOff(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) {
			scope := "kvm2-it-packed-" + name
			disk := randomDisk(4 * mib)
			file := gzipped(disk)
			sum := sha256.Sum256(file)
			sums := filepath.Join(t.TempDir(), "SHA256SUMS")
			if err := os.WriteFile(sums, []byte(hex.EncodeToString(sum[:])+" *disk.raw.gz\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			server, ranges := cutOnce(t, file)

			p := realProvider(t, h, uri, scope)
			spec := tinySpec(kvm2.Image{URL: server + "/disk.raw.gz", ChecksumURL: "file://" + sums}, "web-1")
			spec.RootDiskBytes = 4 * mib
			m := pollUntilRunning(t, p, spec)
			if ranges.Load() != 1 {
				t.Errorf("the transfer went on %d times, want once", ranges.Load())
			}
			images := withPrefix(virsh(t, "vol-list", h.Pool), scope+"-image-")
			if len(images) != 2 {
				t.Fatalf("image volumes: %q", images)
			}
			back := filepath.Join(t.TempDir(), "image")
			virsh(t, "vol-download", "--pool", h.Pool, images[1], back)
			if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, disk) {
				t.Errorf("the published image has %d bytes, %v; want what was packed", len(got), err)
			}
			pollUntilDeleted(t, p, m.ID)
		})
	}
}

// cutOnce gives out a file, but cuts the first connection off in the middle.
func cutOnce(t *testing.T, file []byte) (url string, ranges *atomic.Int64) {
	t.Helper()
	var requests atomic.Int64
	ranges = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"v1"`)
		if r.Header.Get("Range") != "" {
			ranges.Add(1)
		}
		if requests.Add(1) > 1 {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(file))
			return
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(file)))
		_, _ = w.Write(file[:len(file)/2])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	return server.URL, ranges
}
