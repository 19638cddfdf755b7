//go:build integration

package kvm2_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

func realChecker(t *testing.T, cfg kvm2.Config) *kvm2.Checker {
	t.Helper()
	c, err := kvm2.NewChecker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// checkConfig is a Config with which the test host is in order.
func checkConfig(h testhost.Host, uri string) kvm2.Config {
	return kvm2.Config{URI: uri, Scope: "kvm2-it-check", Pool: h.Pool, Network: h.Network, DomainType: "qemu"}
}

// sshOnly are the checks that a connection without SSH skips.
var sshOnly = []kvm2.CheckName{kvm2.CheckHostKey, kvm2.CheckAuthentication}

func TestRealHost_CheckPassesWhereKVM2Works(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) {
			r := realChecker(t, checkConfig(h, uri)).Check(t.Context())
			if !r.OK() {
				t.Errorf("Check() = %v", r)
			}
			var skipped []kvm2.CheckName
			if name == "unix" {
				skipped = sshOnly
			}
			wantReport(t, r, nil, skipped)
			for _, c := range r.Results {
				if c.Name == kvm2.CheckPool && !strings.Contains(c.Detail, h.PoolPath) {
					t.Errorf("%s: %q does not say where it is", c.Name, c.Detail)
				}
				if c.Name == kvm2.CheckDial && c.Latency <= 0 {
					t.Errorf("%s took %v", c.Name, c.Latency)
				}
			}
		})
	}
}

func TestRealHost_CheckReportsKVMAsTheHostOffersIt(t *testing.T) {
	h := testhost.Require(t)
	cfg := checkConfig(h, h.UnixURI)
	cfg.DomainType = "kvm"
	r := realChecker(t, cfg).Check(t.Context())
	var failed map[kvm2.CheckName]checkFailure
	if !strings.Contains(virsh(t, "capabilities"), "<domain type='kvm'/>") {
		failed = map[kvm2.CheckName]checkFailure{kvm2.CheckDomainType: {kvm2.ClassPermanent, kvm2.ErrUnsupported, "/dev/kvm"}}
	}
	wantReport(t, r, failed, sshOnly)
}

// checkFailure is what a failed check must say.
type checkFailure struct {
	class  kvm2.Class
	is     error  // nil for no sentinel
	advice string // is part of it
}

// wantReport checks that exactly these checks failed and were skipped, and that the others passed.
func wantReport(t *testing.T, r kvm2.Report, failed map[kvm2.CheckName]checkFailure, skipped []kvm2.CheckName) {
	t.Helper()
	var names []kvm2.CheckName
	for _, c := range r.Results {
		names = append(names, c.Name)
		want, fails := failed[c.Name]
		switch {
		case fails:
			wantCheckFailed(t, c, want)
		case slices.Contains(skipped, c.Name):
			if c.Status != kvm2.CheckSkipped || c.Detail == "" {
				t.Errorf("%s: %s %q (%v), want it skipped for a reason", c.Name, c.Status, c.Detail, c.Err)
			}
		case c.Status != kvm2.CheckPassed || c.Detail == "" || c.Err != nil || c.Advice != "":
			t.Errorf("%s: %s %q (%v), want it passed", c.Name, c.Status, c.Detail, c.Err)
		}
	}
	if !slices.Equal(names, allChecks) {
		t.Errorf("the report has %q, want %q", names, allChecks)
	}
	if t.Failed() {
		t.Log(r)
	}
}

func wantCheckFailed(t *testing.T, c kvm2.CheckResult, want checkFailure) {
	t.Helper()
	if c.Status != kvm2.CheckFailed || c.Err == nil {
		t.Errorf("%s: %s %q, want it failed", c.Name, c.Status, c.Detail)
	}
	if c.Class != want.class || kvm2.ClassOf(c.Err) != want.class {
		t.Errorf("%s: class %s of %v, want %s", c.Name, c.Class, c.Err, want.class)
	}
	if want.is != nil && !errors.Is(c.Err, want.is) {
		t.Errorf("%s: %v, want %v", c.Name, c.Err, want.is)
	}
	if !strings.Contains(c.Advice, want.advice) {
		t.Errorf("%s: advice %q, want it to say %q", c.Name, c.Advice, want.advice)
	}
}

func TestRealHost_CheckFindsWhatIsMissing(t *testing.T) {
	h := testhost.Require(t)
	const pool, network = "kvm2-it-check-stopped", "kvm2-it-check-down"
	dirPool(t, h, pool)
	inactiveNetwork(t, network)
	tests := []struct {
		name   string
		edit   func(*kvm2.Config)
		failed kvm2.CheckName
		advice string
	}{
		{"stopped pool", func(c *kvm2.Config) { c.Pool = pool }, kvm2.CheckPool, "virsh pool-start " + pool},
		{"missing pool", func(c *kvm2.Config) { c.Pool = "kvm2-it-check-none" }, kvm2.CheckPool, "define the pool"},
		{"network down", func(c *kvm2.Config) { c.Network = network }, kvm2.CheckNetwork, "virsh net-start " + network},
		{"missing network", func(c *kvm2.Config) { c.Network = "kvm2-it-check-none" }, kvm2.CheckNetwork, "define the network"},
	}
	for name, uri := range hostURIs(h) {
		for _, tt := range tests {
			t.Run(name+" "+tt.name, func(t *testing.T) {
				cfg := checkConfig(h, uri)
				tt.edit(&cfg)
				r := realChecker(t, cfg).Check(t.Context())
				var skipped []kvm2.CheckName
				if name == "unix" {
					skipped = sshOnly
				}
				wantReport(t, r, map[kvm2.CheckName]checkFailure{tt.failed: {class: kvm2.ClassPermanent, advice: tt.advice}}, skipped)
			})
		}
	}
}

func inactiveNetwork(t *testing.T, name string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "network.xml")
	if err := os.WriteFile(path, []byte("<network><name>"+name+"</name></network>"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _ = testhost.Virsh("net-undefine", name) // what an interrupted run left
	virsh(t, "net-define", path)
	t.Cleanup(func() { virsh(t, "net-undefine", name) })
}

func TestRealHost_CheckFindsHowFarTheConnectionComes(t *testing.T) {
	h := testhost.Require(t)
	stranger := filepath.Join(t.TempDir(), "stranger")
	_, text := newKey(t)
	if err := os.WriteFile(stranger, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(t.TempDir(), "none")
	refused := checkFailure{kvm2.ClassPermanent, kvm2.ErrUnauthorized, "authorized_keys"}
	tests := []struct {
		name     string
		uri      string
		failed   kvm2.CheckName
		want     checkFailure
		skipped  []kvm2.CheckName
		mentions string
		why      string
	}{
		{
			name: "changed host key", uri: editURI(t, h.SSHURI, setParameter("known_hosts", wrongKnownHosts(t, h))),
			failed: kvm2.CheckHostKey, want: checkFailure{kvm2.ClassPermanent, kvm2.ErrHostKey, "fingerprint"}, skipped: allChecks[2:],
			mentions: hostFingerprint(t, h),
		},
		{
			name: "unknown host key", uri: editURI(t, h.SSHURI, setParameter("known_hosts", emptyFile(t))),
			failed: kvm2.CheckHostKey, want: checkFailure{kvm2.ClassPermanent, kvm2.ErrHostKey, "fingerprint"}, skipped: allChecks[2:],
			mentions: fmt.Sprintf("[127.0.0.1]:%d", h.SSHPort),
		},
		{
			name: "no known_hosts", uri: editURI(t, h.SSHURI, setParameter("known_hosts", nowhere)),
			failed: kvm2.CheckHostKey, want: checkFailure{class: kvm2.ClassPermanent, advice: "known_hosts"},
			skipped: slices.Concat(allChecks[:1], allChecks[2:]), mentions: nowhere,
			why: "the host was not tried, so nothing can be said of it",
		},
		{
			name: "no key", uri: editURI(t, h.SSHURI, setParameter("keyfile", nowhere)),
			failed: kvm2.CheckAuthentication, want: checkFailure{class: kvm2.ClassPermanent, advice: "can be read"},
			skipped: slices.Concat(allChecks[:2], allChecks[3:]), mentions: nowhere,
			why: "likewise",
		},
		{
			name: "wrong key", uri: editURI(t, h.SSHURI, setParameter("keyfile", stranger)),
			failed: kvm2.CheckAuthentication, want: refused, skipped: allChecks[3:], mentions: "root",
		},
		{
			name: "unknown user", uri: editURI(t, h.SSHURI, func(u *url.URL) { u.User = url.User("kvm2-it-nobody") }),
			failed: kvm2.CheckAuthentication, want: refused, skipped: allChecks[3:], mentions: "kvm2-it-nobody",
		},
		{
			name: "closed port", uri: editURI(t, h.SSHURI, func(u *url.URL) { u.Host = closedPort(t) }),
			failed: kvm2.CheckDial, want: checkFailure{class: kvm2.ClassTransient, advice: "port"}, skipped: allChecks[1:],
			why: "without an entry in known_hosts too: nobody has shown a key",
		},
		{
			name: "no socket behind SSH", uri: editURI(t, h.SSHURI, setParameter("socket", nowhere)),
			failed: kvm2.CheckDaemon, want: checkFailure{class: kvm2.ClassTransient, advice: "libvirtd"}, skipped: allChecks[4:], mentions: nowhere,
		},
		{
			name: "no socket", uri: editURI(t, h.UnixURI, setParameter("socket", nowhere)),
			failed: kvm2.CheckDial, want: checkFailure{class: kvm2.ClassTransient, advice: "socket"}, skipped: allChecks[1:], mentions: nowhere,
		},
		{
			name: "read-only socket", uri: editURI(t, h.UnixURI, setParameter("socket", h.Socket+"-ro")),
			failed: kvm2.CheckReadWrite, want: checkFailure{kvm2.ClassPermanent, kvm2.ErrUnauthorized, "libvirt-sock-ro"}, skipped: sshOnly,
			why: "everything that only reads can still be checked",
		},
		{
			name: "read-only socket behind SSH", uri: editURI(t, h.SSHURI, setParameter("socket", h.Socket+"-ro")),
			failed: kvm2.CheckReadWrite, want: checkFailure{kvm2.ClassPermanent, kvm2.ErrUnauthorized, "libvirt-sock-ro"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := realChecker(t, checkConfig(h, tt.uri)).Check(t.Context())
			wantReport(t, r, map[kvm2.CheckName]checkFailure{tt.failed: tt.want}, tt.skipped)
			if err := r.Err(); err == nil || !strings.Contains(err.Error(), tt.mentions) {
				t.Errorf("Err() = %v, want it to name %q", err, tt.mentions)
			}
			if t.Failed() && tt.why != "" {
				t.Log(tt.why)
			}
		})
	}
}

func editURI(t *testing.T, uri string, edit func(*url.URL)) string {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	edit(u)
	return u.String()
}

func setParameter(name, value string) func(*url.URL) {
	return func(u *url.URL) {
		q := u.Query()
		q.Set(name, value)
		u.RawQuery = q.Encode()
	}
}

// wrongKnownHosts is a known_hosts file with another key for each that the host has, as after a change of all.
func wrongKnownHosts(t *testing.T, h testhost.Host) string {
	t.Helper()
	key, _ := newKey(t)
	line := knownhosts.Line([]string{fmt.Sprintf("[127.0.0.1]:%d", h.SSHPort)}, key.PublicKey())
	path := filepath.Join(t.TempDir(), "known_hosts")
	if err := os.WriteFile(path, []byte(line+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// hostFingerprint is the fingerprint of the host's Ed25519 key.
func hostFingerprint(t *testing.T, h testhost.Host) string {
	t.Helper()
	i := slices.IndexFunc(h.HostKeyFiles, func(path string) bool { return strings.HasSuffix(path, "ed25519") })
	if i < 0 {
		t.Fatalf("the host has no Ed25519 key: %q", h.HostKeyFiles)
	}
	text, err := os.ReadFile(h.HostKeyFiles[i] + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey(text)
	if err != nil {
		t.Fatal(err)
	}
	return ssh.FingerprintSHA256(key)
}

func emptyFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// closedPort is an address of this machine where nobody listens: it was free a moment ago.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestRealHost_CheckDialsAnewAndHangsUp(t *testing.T) {
	h := testhost.Require(t)
	relay := newRelay(t, h.Socket)
	c := realChecker(t, checkConfig(h, editURI(t, h.UnixURI, setParameter("socket", relay.path))))
	for i := range 5 {
		if r := c.Check(t.Context()); !r.OK() {
			t.Fatalf("Check() = %v", r)
		}
		if got := relay.accepted.Load(); got != int64(i+1) {
			t.Errorf("after %d checks there were %d connections", i+1, got)
		}
		poll(t, 10*time.Second, func() bool { return relay.open.Load() == 0 })
	}
}

// relay is a unix socket in front of another one that counts.
type relay struct {
	path           string
	accepted, open atomic.Int64
}

func newRelay(t *testing.T, target string) *relay {
	t.Helper()
	r := &relay{path: filepath.Join(t.TempDir(), "s")}
	l, err := net.Listen("unix", r.path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			r.accepted.Add(1)
			r.open.Add(1)
			wg.Go(func() {
				defer r.open.Add(-1)
				passOn(conn, target)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return r
}

// passOn copies both ways until one side hangs up.
func passOn(conn net.Conn, target string) {
	defer conn.Close()
	up, err := net.Dial("unix", target)
	if err != nil {
		return
	}
	defer up.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(up, conn)
		_ = up.Close()
	})
	_, _ = io.Copy(conn, up)
	_ = conn.Close()
	wg.Wait()
}

func TestRealHost_CheckLeaksNoDescriptor(t *testing.T) {
	h := testhost.Require(t)
	uris := hostURIs(h)
	uris["refused"] = editURI(t, h.SSHURI, func(u *url.URL) { u.User = url.User("kvm2-it-nobody") })
	uris["no socket behind SSH"] = editURI(t, h.SSHURI, setParameter("socket", "/nonexistent"))
	uris["host key"] = editURI(t, h.SSHURI, setParameter("known_hosts", wrongKnownHosts(t, h)))
	for _, name := range slices.Sorted(maps.Keys(uris)) {
		t.Run(name, func(t *testing.T) {
			c := realChecker(t, checkConfig(h, uris[name]))
			c.Check(t.Context()) // what the runtime opens once is open after that
			before := openFiles(t)
			for range 5 {
				c.Check(t.Context())
			}
			poll(t, 10*time.Second, func() bool { return openFiles(t) <= before })
		})
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
