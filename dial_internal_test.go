package kvm2

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/kvm2/kvm2/internal/sshtest"
)

func newSSHKey(t testing.TB) *sshtest.Key {
	t.Helper()
	key, err := sshtest.NewKey(ssh.KeyAlgoED25519)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func writeTestFile(t testing.TB, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func writeKeyFile(t testing.TB, key *sshtest.Key, passphrase string) string {
	t.Helper()
	content, err := key.PEM(passphrase)
	if err != nil {
		t.Fatal(err)
	}
	return writeTestFile(t, "id", content)
}

// sshHost is an SSH server, and what a client needs to be let in.
type sshHost struct {
	server                  *sshtest.Server
	hostKey, userKey        *sshtest.Key
	keyFile, knownHostsFile string
}

// startSSHHost starts a server on the loopback interface that ends with the test.
func startSSHHost(t testing.TB, edit func(*sshtest.Config)) *sshHost {
	t.Helper()
	h := &sshHost{hostKey: newSSHKey(t), userKey: newSSHKey(t)}
	c := sshtest.Config{
		HostKeys: []ssh.Signer{h.hostKey}, User: "operator", AuthorizedKeys: []ssh.PublicKey{h.userKey.PublicKey()},
		Connect: func(string) (net.Conn, error) { return nil, os.ErrNotExist },
	}
	edit(&c)
	var err error
	if h.server, err = sshtest.Start(c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.server.Close(); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	h.keyFile = writeKeyFile(t, h.userKey, "")
	h.knownHostsFile = h.knows(t, h.hostKey)
	return h
}

// knows writes a known_hosts file with that key for the server.
func (h *sshHost) knows(t testing.TB, key *sshtest.Key) string {
	t.Helper()
	return writeTestFile(t, "known_hosts", []byte(knownhosts.Line([]string{h.server.Addr()}, key.PublicKey())+"\n"))
}

func (h *sshHost) uri() string {
	q := url.Values{"keyfile": {h.keyFile}, "known_hosts": {h.knownHostsFile}, "socket": {"/run/libvirt/libvirt-sock"}}
	return fmt.Sprintf("qemu+ssh://operator@%s/system?%s", h.server.Addr(), q.Encode())
}

// openURI dials as a Provider does and returns its error.
func openURI(t testing.TB, uri string, timeout time.Duration) error {
	t.Helper()
	h, err := parseURI(uri)
	if err != nil {
		t.Fatal(err)
	}
	d := &decorator{next: &libvirtDialer{uri: h}, host: "kvm-1", timeout: timeout, log: slog.New(slog.DiscardHandler)}
	s, err := d.open(t.Context())
	if err == nil {
		_ = s.Close()
	}
	return err
}

// generous is a timeout that no test waits for.
const generous = time.Minute

func TestDial_SSHFailuresHaveTheirClass(t *testing.T) {
	const passphrase = "hunter2hunter2"
	reject := func(reason ssh.RejectionReason) func(*sshtest.Config) {
		return func(c *sshtest.Config) {
			c.Reject = func(string) *ssh.OpenChannelError {
				return &ssh.OpenChannelError{Reason: reason, Message: "open failed"}
			}
		}
	}
	serve := func(*sshtest.Config) {}
	behave := func(b sshtest.Behaviour) func(*sshtest.Config) { return func(c *sshtest.Config) { c.Behaviour = b } }

	tests := []struct {
		name    string
		server  func(*sshtest.Config)
		client  func(testing.TB, *sshHost)
		timeout time.Duration
		class   Class
		is      error
		says    func(*sshHost) []string
		why     string
	}{
		{
			name: "unknown host key", server: serve, class: ClassPermanent, is: ErrHostKey,
			client: func(t testing.TB, h *sshHost) { h.knownHostsFile = writeTestFile(t, "known_hosts", nil) },
			says: func(h *sshHost) []string {
				return []string{h.knownHostsFile, knownhosts.Normalize(h.server.Addr()), ssh.FingerprintSHA256(h.hostKey.PublicKey())}
			},
			why: "nobody else is trusted at first sight",
		},
		{
			name: "changed host key", server: serve, class: ClassPermanent, is: ErrHostKey,
			client: func(t testing.TB, h *sshHost) { h.knownHostsFile = h.knows(t, newSSHKey(t)) },
			says: func(h *sshHost) []string {
				return []string{h.knownHostsFile, ssh.FingerprintSHA256(h.hostKey.PublicKey())}
			},
			why: "it may be an attack",
		},
		{
			name: "revoked host key", server: serve, class: ClassPermanent, is: ErrHostKey,
			client: func(t testing.TB, h *sshHost) {
				line := strings.TrimSpace(knownhosts.Line([]string{h.server.Addr()}, h.hostKey.PublicKey()))
				h.knownHostsFile = writeTestFile(t, "known_hosts", []byte(line+"\n@revoked "+line+"\n"))
			},
			says: func(h *sshHost) []string {
				return []string{h.knownHostsFile, "@revoked", ssh.FingerprintSHA256(h.hostKey.PublicKey())}
			},
		},
		{
			name: "wrong user", server: func(c *sshtest.Config) { c.User = "somebody" }, class: ClassPermanent, is: ErrUnauthorized,
			says: func(h *sshHost) []string {
				return []string{`"operator"`, ssh.FingerprintSHA256(h.userKey.PublicKey())}
			},
		},
		{
			name: "no known_hosts file", server: serve, class: ClassPermanent,
			client: func(t testing.TB, h *sshHost) { h.knownHostsFile = filepath.Join(t.TempDir(), "absent") },
			says:   func(h *sshHost) []string { return []string{h.knownHostsFile} },
		},
		{
			name: "wrong key", server: serve, class: ClassPermanent, is: ErrUnauthorized,
			client: func(t testing.TB, h *sshHost) { h.keyFile = writeKeyFile(t, newSSHKey(t), "") },
			says:   func(*sshHost) []string { return []string{`"operator"`, "SHA256:"} },
			why:    "trying again locks accounts",
		},
		{
			name: "absent key", server: serve, class: ClassPermanent,
			client: func(t testing.TB, h *sshHost) { h.keyFile = filepath.Join(t.TempDir(), "absent") },
			says:   func(h *sshHost) []string { return []string{h.keyFile} },
		},
		{
			name: "unreadable key", server: serve, class: ClassPermanent,
			client: func(t testing.TB, h *sshHost) { h.keyFile = writeTestFile(t, "id", []byte("no key "+passphrase)) },
			says:   func(h *sshHost) []string { return []string{h.keyFile} },
		},
		{
			name: "encrypted key", server: serve, class: ClassPermanent,
			client: func(t testing.TB, h *sshHost) { h.keyFile = writeKeyFile(t, h.userKey, passphrase) },
			says:   func(h *sshHost) []string { return []string{h.keyFile, "passphrase"} },
			why:    "its cause must not hide behind what the server says",
		},
		{
			name: "connection refused", server: serve, class: ClassTransient,
			client: func(t testing.TB, h *sshHost) {
				if err := h.server.Close(); err != nil {
					t.Error(err)
				}
			},
			says: func(h *sshHost) []string { return []string{h.server.Addr(), "refused"} }, why: "the host may be restarting",
		},
		{
			name: "silent server", server: behave(sshtest.SilentAfterAccept), class: ClassTransient, timeout: 100 * time.Millisecond,
			says: func(h *sshHost) []string { return []string{h.server.Addr(), "deadline"} }, why: "the deadline covers the handshake",
		},
		{
			name: "server silent in the handshake", server: behave(sshtest.SilentAfterVersion), class: ClassTransient, timeout: 100 * time.Millisecond,
			says: func(*sshHost) []string { return []string{"deadline"} },
		},
		{
			name: "server silent behind the login", server: behave(sshtest.SilentOnOpen), class: ClassTransient, timeout: 500 * time.Millisecond,
			says: func(*sshHost) []string { return []string{"deadline"} },
		},
		{name: "dropped in the handshake", server: behave(sshtest.DropAfterVersion), class: ClassTransient, why: "sshd's MaxStartups does that"},
		{name: "dropped behind the login", server: behave(sshtest.DropOnOpen), class: ClassTransient},
		{
			name: "forwarding prohibited", server: reject(ssh.Prohibited), class: ClassPermanent,
			says: func(*sshHost) []string { return []string{"AllowStreamLocalForwarding"} },
		},
		{
			name: "socket cannot be opened", server: reject(ssh.ConnectionFailed), class: ClassTransient,
			says: func(*sshHost) []string { return []string{"/run/libvirt/libvirt-sock"} }, why: "libvirtd may be starting",
		},
		{name: "server short of resources", server: reject(ssh.ResourceShortage), class: ClassTransient, says: func(*sshHost) []string { return []string{"short of resources"} }},
		{
			name: "server that cannot forward", server: reject(ssh.UnknownChannelType), class: ClassPermanent,
			says: func(*sshHost) []string { return []string{"cannot forward to unix sockets"} },
		},
		{name: "socket absent", server: serve, class: ClassTransient, says: func(*sshHost) []string { return []string{"/run/libvirt/libvirt-sock"} }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := startSSHHost(t, tt.server)
			if tt.client != nil {
				tt.client(t, h)
			}
			if tt.timeout == 0 {
				tt.timeout = generous
			}
			err := openURI(t, h.uri(), tt.timeout)
			wantDialError(t, err, tt.class, tt.is)
			if err == nil {
				t.Fatalf("opened; %s", tt.why)
			}
			if tt.says != nil {
				for _, want := range tt.says(h) {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q does not say %q; %s", err, want, tt.why)
					}
				}
			}
			if strings.Contains(err.Error(), passphrase) {
				t.Errorf("error %q tells a secret", err)
			}
		})
	}
}

func wantDialError(t testing.TB, err error, class Class, sentinel error) {
	t.Helper()
	if got := ClassOf(err); got != class {
		t.Errorf("class of %v is %s, want %s", err, got, class)
	}
	wantIs(t, err, sentinel)
	if err != nil && !strings.HasPrefix(err.Error(), "kvm-1: dial: ") {
		t.Errorf("error %q does not say where and when", err)
	}
}

func TestDial_NoKeyAtAllIsUnauthorized(t *testing.T) {
	t.Setenv("SSH_AUTH_SOCK", "")
	h := startSSHHost(t, func(*sshtest.Config) {})
	uri := fmt.Sprintf("qemu+ssh://operator@%s/system?known_hosts=%s", h.server.Addr(), url.QueryEscape(h.knownHostsFile))
	wantDialError(t, openURI(t, uri, generous), ClassPermanent, ErrUnauthorized)
}

func TestDial_KeysAreReadAtEachDial(t *testing.T) {
	h := startSSHHost(t, func(*sshtest.Config) {})
	h.keyFile = writeKeyFile(t, newSSHKey(t), "")
	uri, err := parseURI(h.uri())
	if err != nil {
		t.Fatal(err)
	}
	d := &decorator{next: &libvirtDialer{uri: uri}, host: "kvm-1", timeout: generous, log: slog.New(slog.DiscardHandler)}
	_, err = d.open(t.Context())
	wantDialError(t, err, ClassPermanent, ErrUnauthorized)

	content, err := h.userKey.PEM("")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.keyFile, content, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = d.open(t.Context())
	wantDialError(t, err, ClassTransient, nil) // now it is let in, and there is no socket
}

// listenUnix serves a unix socket until the test ends.
func listenUnix(t testing.TB, serve func(net.Conn)) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serve(conn)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return path
}

func TestDial_UnixFailuresAreTransient(t *testing.T) {
	stale := filepath.Join(t.TempDir(), "stale")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name    string
		socket  string
		timeout time.Duration
		why     string
	}{
		{name: "absent", socket: filepath.Join(t.TempDir(), "absent"), why: "libvirtd may be starting"},
		{name: "no socket", socket: stale},
		{name: "ends at once", socket: listenUnix(t, func(net.Conn) {})},
		{
			name: "says nothing", timeout: 100 * time.Millisecond, why: "the deadline covers libvirt's own handshake",
			socket: listenUnix(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }),
		},
		{
			name: "says something else",
			socket: listenUnix(t, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 1))
				_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			}),
			why: "it must not bring the process down",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.timeout == 0 {
				tt.timeout = generous
			}
			err := openURI(t, "qemu:///system?socket="+url.QueryEscape(tt.socket), tt.timeout)
			if err == nil {
				t.Fatalf("opened; %s", tt.why)
			}
			wantDialError(t, err, ClassTransient, nil)
		})
	}
}

func TestDialUnix_TriesEachSocket(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	good := listenUnix(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	conn, err := dialUnix(t.Context(), []string{absent, good})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	_, err = dialUnix(t.Context(), []string{absent, absent + "2"})
	for _, want := range []string{absent, absent + "2"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("dialUnix = %v, want it to name %q", err, want)
		}
	}
}
