//go:build integration

package kvm2_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

const (
	bootLimit = 10 * time.Minute // plain emulation on a busy machine
	pollEvery = time.Second
)

// hostURIs are the ways to the test host.
func hostURIs(h testhost.Host) map[string]string {
	return map[string]string{"unix": h.UnixURI, "ssh": h.SSHURI}
}

func TestRealHost_MachineLife(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { machineLife(t, h, uri, "kvm2-it-"+name) })
	}
}

func machineLife(t *testing.T, h testhost.Host, uri, scope string) {
	images := serveImage(t, h.Image)
	p := realProvider(t, h, uri, scope)
	guest := newGuest(t)
	spec := realSpec(h, images.URL, "web-1", "owner-1")
	spec.UserData = guest.userData(t)

	m := pollUntilRunning(t, p, spec)
	if images.requests.Load() != 1 {
		t.Errorf("the image was requested %d times, want once", images.requests.Load())
	}
	t.Run("another owner is refused and the machine untouched", func(t *testing.T) { foreignOwner(t, p, spec, m) })
	t.Run("second machine uploads nothing", func(t *testing.T) { secondMachine(t, p, spec, images) })

	addr := pollUntilAddress(t, p, m.ID)
	guest.check(t, addr)

	listed, err := p.List(t.Context())
	if err != nil || len(listed) != 1 || listed[0].ID != m.ID || listed[0].State != kvm2.StateRunning {
		t.Errorf("List() = %+v, %v; want the one machine %s, running", listed, err, m.ID)
	}
	pollUntilDeleted(t, p, m.ID)
	if _, err := p.Get(t.Context(), m.ID); !errors.Is(err, kvm2.ErrNotFound) {
		t.Errorf("Get() after Delete = %v, want ErrNotFound", err)
	}
	if left := domainsOf(t, scope); len(left) != 0 {
		t.Errorf("domains left: %q", left)
	}
	for _, v := range volumesOf(t, h.Pool, scope) {
		if !strings.HasPrefix(v, scope+"-image-") {
			t.Errorf("volume left: %q", v)
		}
	}
}

func foreignOwner(t *testing.T, p *kvm2.Provider, spec kvm2.Spec, first kvm2.Machine) {
	spec.OwnerUID = "owner-2"
	_, err := p.Create(t.Context(), spec)
	if !errors.Is(err, kvm2.ErrForeignOwner) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
		t.Errorf("Create() with another owner = %v, want Permanent ErrForeignOwner", err)
	}
	m, err := p.Get(t.Context(), first.ID)
	if err != nil || m.State != kvm2.StateRunning || m.OwnerUID != "owner-1" || !m.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("Get() = %+v, %v; want the first machine as it was", m, err)
	}
}

func secondMachine(t *testing.T, p *kvm2.Provider, spec kvm2.Spec, images *imageServer) {
	before := images.requests.Load()
	spec.Name, spec.OwnerUID = "web-2", "owner-3"
	spec.Disks = []kvm2.Disk{{Name: "data", SizeBytes: 64 * mib}}
	m := pollUntilRunning(t, p, spec)
	if got := images.requests.Load(); got != before {
		t.Errorf("the image was requested %d times more", got-before)
	}
	pollUntilDeleted(t, p, m.ID)
}

func TestRealHost_CancelledPollDoesNotStopTransfer(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { cancelledPoll(t, h, uri, "kvm2-it-cancel-"+name) })
	}
}

func cancelledPoll(t *testing.T, h testhost.Host, uri, scope string) {
	images := serveImage(t, h.Image)
	images.hold = make(chan struct{})
	p := realProvider(t, h, uri, scope)
	spec := realSpec(h, images.URL, "web-1", "owner-1")

	half := fileSize(t, h.Image) / 2
	poll(t, time.Minute, func() bool {
		m, err := p.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		return m.Image != nil && m.Image.DoneBytes >= half
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Create(ctx, spec); !errors.Is(err, context.Canceled) || kvm2.ClassOf(err) != kvm2.ClassTransient {
		t.Fatalf("Create() with a cancelled context = %v, want Transient context.Canceled", err)
	}
	close(images.hold)
	m := pollUntilRunning(t, p, spec)
	if images.requests.Load() != 1 {
		t.Errorf("the image was requested %d times, want once", images.requests.Load())
	}
	pollUntilDeleted(t, p, m.ID)
}

// realProvider returns a Provider on the test host, and removes all that the scope has when the test ends.
func realProvider(t *testing.T, h testhost.Host, uri, scope string) *kvm2.Provider {
	t.Helper()
	removeScope(t, h.Pool, scope) // what an interrupted run left
	p, err := kvm2.New(kvm2.Config{URI: uri, Scope: scope, Pool: h.Pool, Network: h.Network, DomainType: "qemu"},
		kvm2.WithLogger(slog.New(slog.NewTextHandler(testWriter{t}, nil))))
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

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", bytes.TrimRight(p, "\n"))
	return len(p), nil
}

func realSpec(h testhost.Host, imageURL, name, owner string) kvm2.Spec {
	return kvm2.Spec{
		Name: name, OwnerUID: owner, Labels: map[string]string{"role": "web"},
		Image: kvm2.Image{URL: imageURL, Checksum: "sha256:" + h.ImageSHA256},
		CPUs:  2, MemoryBytes: 512 * mib, RootDiskBytes: 4 * gib,
	}
}

// imageServer is a plain HTTP server with one file.
type imageServer struct {
	*httptest.Server
	requests atomic.Int64
	hold     chan struct{} // when set: the second half of the file waits until it is closed
}

func serveImage(t *testing.T, path string) *imageServer {
	t.Helper()
	s := &imageServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		f, err := os.Open(path)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(info.Size()))
		if s.hold != nil {
			_, _ = io.CopyN(w, f, info.Size()*3/4)
			select {
			case <-s.hold:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = io.Copy(w, f)
	}))
	t.Cleanup(s.Close)
	return s
}

func fileSize(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// poll repeats done until it is true, as a controller would.
func poll(t *testing.T, limit time.Duration, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not reached within %s", limit)
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		}
	}
}

func pollUntilRunning(t *testing.T, p *kvm2.Provider, spec kvm2.Spec) kvm2.Machine {
	t.Helper()
	var m kvm2.Machine
	var id string
	poll(t, 2*time.Minute, func() bool {
		var err error
		m, err = p.Create(t.Context(), spec)
		if err != nil {
			t.Fatalf("Create() = %v", err)
		}
		if id == "" {
			id = m.ID
		}
		if m.ID != id || id == "" {
			t.Fatalf("the machine's ID changed from %q to %q", id, m.ID)
		}
		return m.State == kvm2.StateRunning
	})
	return m
}

func pollUntilAddress(t *testing.T, p *kvm2.Provider, id string) string {
	t.Helper()
	var addr string
	poll(t, bootLimit, func() bool {
		m, err := p.Get(t.Context(), id)
		if err != nil {
			t.Fatalf("Get() = %v", err)
		}
		if len(m.Addresses) == 0 {
			return false
		}
		addr = m.Addresses[0].IP.String()
		return true
	})
	return addr
}

func pollUntilDeleted(t *testing.T, p *kvm2.Provider, id string) {
	t.Helper()
	poll(t, time.Minute, func() bool {
		err := p.Delete(t.Context(), id)
		if err != nil && kvm2.ClassOf(err) != kvm2.ClassTransient {
			t.Fatalf("Delete() = %v", err)
		}
		return err == nil
	})
}

// guest is what the test seeds into a machine and looks for in it.
type guest struct {
	login   ssh.Signer
	hostKey ssh.Signer
	hostPEM string
}

func newGuest(t *testing.T) guest {
	t.Helper()
	login, _ := newKey(t)
	host, hostPEM := newKey(t)
	return guest{login: login, hostKey: host, hostPEM: hostPEM}
}

func newKey(t *testing.T) (ssh.Signer, string) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return signer, string(pem.EncodeToMemory(block))
}

const seededFile = "seeded by kvm2 <&> 'quoted'\n"

// userData is a cloud-config. JSON is YAML.
func (g guest) userData(t *testing.T) []byte {
	t.Helper()
	config, err := json.Marshal(map[string]any{
		"users": []any{map[string]any{
			"name": "tester", "shell": "/bin/bash", "sudo": "ALL=(ALL) NOPASSWD:ALL",
			"ssh_authorized_keys": []string{string(ssh.MarshalAuthorizedKey(g.login.PublicKey()))},
		}},
		"ssh_keys": map[string]string{
			"ed25519_private": g.hostPEM, "ed25519_public": string(ssh.MarshalAuthorizedKey(g.hostKey.PublicKey())),
		},
		"write_files": []any{map[string]any{"path": "/etc/kvm2-seeded", "content": seededFile}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte("#cloud-config\n"), config...)
}

// check logs in with the seeded key, the host key verified, and looks at what cloud-init has done.
func (g guest) check(t *testing.T, addr string) {
	t.Helper()
	client := g.dial(t, addr)
	defer client.Close()
	if out := run(t, client, "cloud-init status --wait"); !strings.Contains(out, "status: done") {
		t.Errorf("cloud-init: %q, want done", out)
	}
	for _, c := range []struct{ command, want string }{
		{"hostname", "web-1\n"},
		{"id -un", "tester\n"},
		{"cat /etc/kvm2-seeded", seededFile},
		{"test $(df --output=size -B1 / | tail -1) -gt 3500000000 && echo grown", "grown\n"},
	} {
		if got := run(t, client, c.command); got != c.want {
			t.Errorf("%s printed %q, want %q", c.command, got, c.want)
		}
	}
}

func (g guest) dial(t *testing.T, addr string) *ssh.Client {
	t.Helper()
	config := &ssh.ClientConfig{
		User: "tester", Auth: []ssh.AuthMethod{ssh.PublicKeys(g.login)},
		HostKeyCallback:   ssh.FixedHostKey(g.hostKey.PublicKey()),
		HostKeyAlgorithms: []string{ssh.KeyAlgoED25519}, Timeout: 5 * time.Second,
	}
	var client *ssh.Client
	poll(t, bootLimit, func() (ok bool) {
		var err error
		client, err = ssh.Dial("tcp", net.JoinHostPort(addr, "22"), config)
		return err == nil
	})
	return client
}

func run(t *testing.T, client *ssh.Client, command string) string {
	t.Helper()
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	out, err := s.CombinedOutput(command)
	if err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

func virsh(t *testing.T, args ...string) string {
	t.Helper()
	out, err := testhost.Virsh(args...)
	if err != nil {
		t.Error(err)
	}
	return out
}

func domainsOf(t *testing.T, scope string) []string {
	t.Helper()
	return withPrefix(virsh(t, "list", "--all", "--name"), scope+"-")
}

func volumesOf(t *testing.T, pool, scope string) []string {
	t.Helper()
	virsh(t, "pool-refresh", pool)
	return withPrefix(virsh(t, "vol-list", pool), scope+"-")
}

func withPrefix(lines, prefix string) []string {
	var out []string
	for line := range strings.Lines(lines) {
		if fields := strings.Fields(line); len(fields) > 0 && strings.HasPrefix(fields[0], prefix) {
			out = append(out, fields[0])
		}
	}
	return out
}

func removeScope(t *testing.T, pool, scope string) {
	t.Helper()
	for _, d := range domainsOf(t, scope) {
		_, _ = testhost.Virsh("destroy", d) // fails when it is not running
		virsh(t, "undefine", d, "--nvram", "--managed-save", "--snapshots-metadata", "--checkpoints-metadata")
	}
	for _, v := range volumesOf(t, pool, scope) {
		virsh(t, "vol-delete", v, pool)
	}
}
