//go:build integration

package kvm2_test

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

// randomImage writes a raw disk of random bytes, with a boot sector that idles.
func randomImage(t *testing.T, size int64) (path string, image kvm2.Image) {
	t.Helper()
	content := make([]byte, size)
	_, _ = rand.Read(content) // never fails
	copy(content, idleSector)
	content[510], content[511] = 0x55, 0xaa
	path = filepath.Join(t.TempDir(), "disk.raw")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	return path, kvm2.Image{URL: "file://" + path, Checksum: "sha256:" + hex.EncodeToString(sum[:])}
}

// pollUntilErrorOfClass polls Create until it fails, and checks how.
func pollUntilErrorOfClass(t *testing.T, p *kvm2.Provider, spec kvm2.Spec, class kvm2.Class) (err error) {
	t.Helper()
	poll(t, 2*time.Minute, func() bool {
		var m kvm2.Machine
		if m, err = p.Create(t.Context(), spec); err == nil && m.State == kvm2.StateRunning {
			t.Fatal("the machine runs")
		}
		return err != nil
	})
	if kvm2.ClassOf(err) != class {
		t.Fatalf("Create() = %v (%v), want class %v", err, kvm2.ClassOf(err), class)
	}
	return err
}

// pollPast polls Create until the machine runs, past errors of that class and Transient ones.
func pollPast(t *testing.T, p *kvm2.Provider, spec kvm2.Spec, class kvm2.Class) kvm2.Machine {
	t.Helper()
	var m kvm2.Machine
	poll(t, 3*time.Minute, func() bool {
		var err error
		m, err = p.Create(t.Context(), spec)
		if err != nil && kvm2.ClassOf(err) != kvm2.ClassTransient && kvm2.ClassOf(err) != class {
			t.Fatalf("Create() = %v", err)
		}
		return err == nil && m.State == kvm2.StateRunning
	})
	return m
}

// wantImageOnHost checks that the scope has one image in the pool, and that it is the one that was asked for.
func wantImageOnHost(t *testing.T, h testhost.Host, scope string, image kvm2.Image) {
	t.Helper()
	_, digest, _ := strings.Cut(image.Checksum, ":")
	pointer := scope + "-image-" + digest
	volumes := volumesOf(t, h.Pool, scope+"-image")
	if len(volumes) != 2 || volumes[0] != pointer || !strings.HasPrefix(volumes[1], pointer+"-") {
		t.Fatalf("image volumes %q, want a pointer and what it points to", volumes)
	}
	copied := filepath.Join(t.TempDir(), "copy")
	virsh(t, "vol-download", volumes[1], copied, "--pool", h.Pool)
	f, err := os.Open(copied)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != digest {
		t.Errorf("the image on the host has the digest %s, want %s", got, digest)
	}
}

// withSmallPool puts the scope on a file system of its own of that many MiB.
func withSmallPool(t *testing.T, h testhost.Host, scope string, mebibytes int) testhost.Host {
	t.Helper()
	h.Pool, h.PoolPath = smallPool(t, h, scope+"-pool", strconv.Itoa(mebibytes)+"m")
	t.Cleanup(func() { removeLogs(t, scope) })
	return h
}

// spaceNumbers is how an error tells how much is missing.
var spaceNumbers = regexp.MustCompile(`needed (\d+) bytes, available (\d+), reserved by other creations (\d+), capacity (\d+)`)

func TestRealHost_FullPool(t *testing.T) {
	const filler = "filler" // what somebody else has in the pool
	for _, tt := range []struct {
		name       string
		filler     int // MiB, of 64
		image      int64
		disk       int64
		overcommit int
		length     bool // the server tells it
		why        string
	}{
		{name: "data disk", filler: 50, image: 2 * mib, disk: 32 * mib, length: true, why: "image and root disk fit, the data disk does not"},
		{name: "image", filler: 48, image: 12 * mib, disk: mib, overcommit: 150, length: true, why: "the machine fits into what is promised, the image beside it does not"},
		{name: "image of unknown length", filler: 54, image: 12 * mib, disk: mib, overcommit: 400, why: "only the transfer shows it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scope := "kvm2-it-full-" + strings.ReplaceAll(tt.name, " ", "-")
			h := withSmallPool(t, testhost.Require(t), scope, 64)
			virsh(t, "vol-create-as", h.Pool, filler, strconv.Itoa(tt.filler)+"MiB", "--allocation", strconv.Itoa(tt.filler)+"MiB")
			path, image := randomImage(t, tt.image)
			server := serveBytes(t, path, tt.length)
			image.URL = server.URL
			spec := tinySpec(image, "web-1")
			spec.RootDiskBytes, spec.Disks[0].SizeBytes = tt.image, tt.disk
			p := realProviderWith(t, h, scope, func(c *kvm2.Config) { c.URI, c.OvercommitPercent = h.UnixURI, tt.overcommit })

			err := pollUntilErrorOfClass(t, p, spec, kvm2.ClassQuota)
			if !errors.Is(err, kvm2.ErrQuotaExceeded) {
				t.Errorf("Create() = %v, want ErrQuotaExceeded", err)
			}
			if tt.length && !spaceNumbers.MatchString(err.Error()) {
				t.Errorf("Create() = %v, want what is needed, available, reserved and there in all", err)
			}
			t.Logf("%v", err)
			if left := volumesOf(t, h.Pool, scope); len(left) != 0 {
				t.Errorf("volumes left: %q", left)
			}
			if left := domainsOf(t, scope); len(left) != 0 {
				t.Errorf("domains left: %q", left)
			}
			virsh(t, "vol-delete", filler, h.Pool)
			m := pollPast(t, p, spec, kvm2.ClassQuota)
			wantImageOnHost(t, h, scope, image)
			pollUntilDeleted(t, p, m.ID)
			if t.Failed() {
				t.Log(tt.why)
			}
		})
	}
}

// realProviderWith is realProvider with more to say.
func realProviderWith(t *testing.T, h testhost.Host, scope string, edit func(*kvm2.Config)) *kvm2.Provider {
	t.Helper()
	cfg := kvm2.Config{Scope: scope, Pool: h.Pool, Network: h.Network, DomainType: "qemu"}
	edit(&cfg)
	p, err := kvm2.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
		removeScope(t, h.Pool, scope)
	})
	return p
}

// serveBytes serves a file, with its length or without.
func serveBytes(t *testing.T, path string, length bool) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if length {
			http.ServeFile(w, r, path)
			return
		}
		f, err := os.Open(path)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer f.Close()
		_ = http.NewResponseController(w).Flush() // so that no length is sent
		_, _ = io.Copy(w, f)
	}))
	t.Cleanup(s.Close)
	return s
}

const creatorVariable = "KVM2_TEST_CREATOR"

// TestCreatorProcess is a controller in a process of its own, when another test starts it as one; else it has nothing to
// do. It polls until it is killed.
func TestCreatorProcess(t *testing.T) {
	task := strings.Split(os.Getenv(creatorVariable), "\n")
	if len(task) != 6 {
		return
	}
	p, err := kvm2.New(kvm2.Config{URI: task[0], Scope: task[1], Pool: task[2], Network: task[5], DomainType: "qemu"})
	if err != nil {
		t.Fatal(err)
	}
	spec := tinySpec(kvm2.Image{URL: task[3], Checksum: task[4]}, "web-1")
	spec.RootDiskBytes = heldBytes
	t.Fatal(createUntilRunning(t.Context(), p, spec))
}

const heldBytes = 32 * mib

func TestRealHost_KilledProcessInMidUpload(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { killedCreator(t, h, uri, "kvm2-it-killed-"+name) })
	}
}

func killedCreator(t *testing.T, h testhost.Host, uri, scope string) {
	h = withOwnPool(t, h, scope)
	path, image := randomImage(t, heldBytes)
	images := serveImage(t, path)
	images.hold = make(chan struct{})
	image.URL = images.URL
	spec := tinySpec(image, "web-1")
	spec.RootDiskBytes = heldBytes
	p := realProvider(t, h, uri, scope)

	cmd := exec.Command(os.Args[0], "-test.run=^TestCreatorProcess$")
	cmd.Stdout, cmd.Stderr = testWriter{t}, testWriter{t}
	cmd.Env = append(os.Environ(), creatorVariable+"="+strings.Join([]string{uri, scope, h.Pool, image.URL, image.Checksum, h.Network}, "\n"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitForBytes(t, h, scope)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // which says that it was killed
	close(images.hold)
	half := volumesOf(t, h.Pool, scope)
	if len(half) != 1 {
		t.Fatalf("volumes %q, want what the dead process has left of the image", half)
	}

	m := pollPast(t, p, spec, kvm2.ClassTransient)
	wantImageOnHost(t, h, scope, image)
	if left := volumesOf(t, h.Pool, half[0]); len(left) != 0 {
		t.Errorf("%q of the dead process is left", left)
	}
	pollUntilDeleted(t, p, m.ID)
}

// waitForBytes waits until a part of an image is in the pool.
func waitForBytes(t *testing.T, h testhost.Host, scope string) {
	t.Helper()
	poll(t, time.Minute, func() bool {
		files, err := filepath.Glob(filepath.Join(h.PoolPath, scope+"-image-*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(files) == 1 && fileSize(t, files[0]) >= heldBytes/2
	})
}

func TestRealHost_DaemonKilledInMidUpload(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { killedDaemon(t, h, uri, "kvm2-it-daemon-"+name) })
	}
}

func killedDaemon(t *testing.T, h testhost.Host, uri, scope string) {
	h = withOwnPool(t, h, scope)
	path, image := randomImage(t, heldBytes)
	images := serveImage(t, path)
	images.hold = make(chan struct{})
	image.URL = images.URL
	spec := tinySpec(image, "web-1")
	spec.RootDiskBytes = heldBytes
	p := realProvider(t, h, uri, scope)

	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	waitForBytes(t, h, scope)
	killDaemon(t, h)
	_, err := p.Create(t.Context(), spec)
	if kvm2.ClassOf(err) != kvm2.ClassTransient && err != nil {
		t.Errorf("Create() without a daemon = %v, want it Transient", err)
	}
	command(t, "internal/testhost/testhost.sh", "up")
	virsh(t, "pool-list") // it answers
	close(images.hold)

	m := pollPast(t, p, spec, kvm2.ClassTransient)
	wantImageOnHost(t, h, scope, image)
	pollUntilDeleted(t, p, m.ID)
}

// killDaemon ends libvirtd as a crash does.
func killDaemon(t *testing.T, h testhost.Host) {
	t.Helper()
	text, err := os.ReadFile(cmp.Or(h.LibvirtdPIDFile, "/run/libvirtd.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil || strings.TrimSpace(string(name)) != "libvirtd" {
		t.Fatalf("process %d is %q, %v; not libvirtd", pid, name, err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}
