package sshdial

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/kvm2/kvm2/internal/sshtest"
)

const (
	testHost = "host.example"
	testUser = "operator"
)

// The keys are made once: RSA takes its time.
var (
	userKey     = onceKey(ssh.KeyAlgoED25519)
	otherKey    = onceKey(ssh.KeyAlgoED25519)
	authority   = onceKey(ssh.KeyAlgoED25519)
	edHostKey   = onceKey(ssh.KeyAlgoED25519)
	rsaHostKey  = onceKey(ssh.KeyAlgoRSA)
	ecHostKey   = onceKey(ssh.KeyAlgoECDSA256)
	newHostKey  = onceKey(ssh.KeyAlgoED25519)
	rsaUserKey  = onceKey(ssh.KeyAlgoRSA)
	testSockets = []string{"/run/libvirt/libvirt-sock"}
)

func onceKey(keyType string) func() *sshtest.Key {
	return sync.OnceValue(func() *sshtest.Key {
		key, err := sshtest.NewKey(keyType)
		if err != nil {
			panic(err)
		}
		return key
	})
}

// writeFile writes a file in a new directory and returns its path.
func writeFile(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// writeKey writes a key file.
func writeKey(t *testing.T, key *sshtest.Key) string {
	t.Helper()
	content, err := key.PEM("")
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "id", content)
}

const (
	secret      = "correct horse battery staple"
	wrongSecret = "tr0ub4dor"
)

// encryptedKey is the file of the user's key under secret. It is made once: the
// derivation of the key is slow by design.
var encryptedKey = sync.OnceValues(func() ([]byte, error) { return userKey().PEM(secret) })

// writeEncryptedKey writes it.
func writeEncryptedKey(t *testing.T) string {
	t.Helper()
	content, err := encryptedKey()
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "id", content)
}

// writeCert writes cert where it belongs to the key file at path.
func writeCert(t *testing.T, path string, cert ssh.Signer) {
	t.Helper()
	if err := os.WriteFile(path+"-cert.pub", ssh.MarshalAuthorizedKey(cert.PublicKey()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// knownHosts writes a known_hosts file of these lines.
func knownHosts(t *testing.T, lines ...string) string {
	t.Helper()
	return writeFile(t, "known_hosts", []byte(strings.Join(lines, "\n")+"\n"))
}

// entry returns a line for a host, which can be a pattern or hashed.
func entry(host string, key ssh.Signer) string {
	return host + " " + strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key.PublicKey())))
}

// echo connects to a socket that sends back what it gets.
func echo(string) (net.Conn, error) {
	near, far := sshtest.Pipe()
	go func() {
		defer func() { _ = far.Close() }()
		_, _ = io.Copy(far, far)
	}()
	return near, nil
}

// serverConfig is that of a server with one host key that lets the user in and
// echoes.
func serverConfig() sshtest.Config {
	return sshtest.Config{
		HostKeys:       []ssh.Signer{edHostKey()},
		User:           testUser,
		AuthorizedKeys: []ssh.PublicKey{userKey().PublicKey()},
		Connect:        echo,
	}
}

// clientConfig is that of a client which such a server accepts.
func clientConfig(t *testing.T, server *sshtest.Server) Config {
	t.Helper()
	return Config{
		Hop: Hop{
			User:            testUser,
			Host:            testHost,
			KeyFiles:        []string{writeKey(t, userKey())},
			KnownHostsFiles: []string{knownHosts(t, entry(testHost, edHostKey()))},
		},
		Sockets:          testSockets,
		HandshakeTimeout: time.Minute,
		DialTCP:          server.Dial,
	}
}

// newServer returns a server in memory that ends with the test.
func newServer(t *testing.T, config sshtest.Config) *sshtest.Server {
	t.Helper()
	server := sshtest.New(config)
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return server
}

// startServer is newServer on TCP.
func startServer(t *testing.T, config sshtest.Config) *sshtest.Server {
	t.Helper()
	server, err := sshtest.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return server
}

// overTCP makes cfg connect to server through TCP.
func overTCP(t *testing.T, cfg Config, server *sshtest.Server) Config {
	t.Helper()
	cfg.Host, cfg.Port, cfg.DialTCP = server.Host(), server.Port(), nil
	cfg.KnownHostsFiles = []string{knownHosts(t, entry(knownhosts.Normalize(server.Addr()), edHostKey()))}
	return cfg
}

// mustDial returns a connection that ends with the test.
func mustDial(t *testing.T, cfg Config) net.Conn {
	t.Helper()
	conn, err := Dial(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return conn
}

// mustEcho sends something over conn and wants it back.
func mustEcho(t *testing.T, conn net.Conn) {
	t.Helper()
	sent := []byte("is there anybody?")
	if _, err := conn.Write(sent); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("got %q, error %v, want %q", got, err, sent)
	}
}

// wantText fails unless the error says all of parts.
func wantText(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
}

// usage counts what a process can leak.
type usage struct{ fds, goroutines int }

func currentUsage(t *testing.T) usage {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return usage{fds: len(fds), goroutines: runtime.NumGoroutine()}
}

// wantUsage waits until no more is in use than before.
func wantUsage(t *testing.T, before usage) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		now := currentUsage(t)
		if now.fds <= before.fds && now.goroutines <= before.goroutines {
			return
		}
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%+v in use, before it was %+v\n%s", now, before, stacks[:runtime.Stack(stacks, true)])
		}
		runtime.Gosched()
	}
}
