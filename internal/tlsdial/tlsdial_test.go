package tlsdial

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2/internal/tlstest"
)

// generous is a timeout that no test waits for.
const generous = time.Minute

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// world is an authority with a daemon's and a client's certificate.
type world struct {
	authority      *tlstest.Authority
	server, client tls.Certificate
	dir            string // of the client
	// admit judges the client's certificate, as libvirtd does it behind the handshake.
	admit func(*tls.Conn) error
	// clientAuth is when the handshake judges it.
	clientAuth tls.ClientAuthType
	maxVersion uint16
	verdict    []byte
}

var loopback = []net.IP{net.IPv4(127, 0, 0, 1)}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{authority: must(tlstest.NewAuthority("kvm2 test"))(t), dir: t.TempDir(), verdict: []byte{1}, clientAuth: tls.RequestClientCert}
	w.server = must(w.authority.Issue("kvm1", loopback, nil))(t)
	w.client = must(w.authority.Issue("controller", nil, nil))(t)
	w.write(t)
	return w
}

func (w *world) write(t testing.TB) {
	t.Helper()
	if err := w.authority.Write(w.dir, "client", w.client); err != nil {
		t.Fatal(err)
	}
}

// start serves, and echoes to whom it accepts.
func (w *world) start(t testing.TB) Config {
	t.Helper()
	config := &tls.Config{Certificates: []tls.Certificate{w.server}, ClientAuth: w.clientAuth, ClientCAs: w.authority.Pool(), MaxVersion: w.maxVersion}
	return serve(t, w.dir, func(conn net.Conn) {
		c := tls.Server(conn, config)
		if c.Handshake() != nil || len(c.ConnectionState().PeerCertificates) != 1 {
			return
		}
		if w.admit != nil && w.admit(c) != nil {
			return
		}
		_, _ = c.Write(w.verdict)
		_, _ = io.Copy(c, c)
	})
}

func serve(t testing.TB, dir string, handle func(net.Conn)) Config {
	t.Helper()
	server := must(tlstest.Start(handle))(t)
	t.Cleanup(server.Close)
	return Config{Host: "127.0.0.1", Port: server.Port(), Locations: []Location{Directory(dir)}, DialTCP: new(net.Dialer).DialContext}
}

func dial(t testing.TB, cfg Config, timeout time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	conn, err := Dial(ctx, cfg)
	if err == nil {
		_ = conn.Close()
	}
	return err
}

func TestDial_AcceptedClientHasAConnection(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		w := newWorld(t)
		w.maxVersion = version
		w.admit = func(c *tls.Conn) error {
			if got := c.ConnectionState().Version; got != version {
				t.Errorf("version %x, want %x", got, version)
			}
			_, err := c.ConnectionState().PeerCertificates[0].Verify(x509.VerifyOptions{
				Roots: w.authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			})
			return err
		}
		conn, err := Dial(t.Context(), w.start(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, "hello"); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
			t.Errorf("got %q, %v", got, err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestDial_ServerThatIsNotTrustedIsAServerError(t *testing.T) {
	tests := []struct {
		name string
		edit func(t testing.TB, w *world)
		says string
	}{
		{"other authority", func(t testing.TB, w *world) {
			w.server = must(must(tlstest.NewAuthority("other"))(t).Issue("kvm1", loopback, nil))(t)
		}, "unknown authority"},
		{"other name", func(t testing.TB, w *world) {
			w.server = must(w.authority.Issue("127.0.0.1", []net.IP{net.IPv4(192, 0, 2, 1)}, nil))(t)
		}, "192.0.2.1"},
		{"expired", func(t testing.TB, w *world) {
			w.server = must(w.authority.Issue("kvm1", loopback, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }))(t)
		}, "expired"},
		{"for clients", func(t testing.TB, w *world) {
			w.server = must(w.authority.Issue("kvm1", loopback, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }))(t)
		}, "usage"},
		{"revoked", func(t testing.TB, w *world) {
			list := must(w.authority.Revoke(w.server))(t)
			if err := os.WriteFile(filepath.Join(w.dir, "cacrl.pem"), list, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "revoked"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			tt.edit(t, w)
			w.admit = func(*tls.Conn) error {
				t.Error("the handshake ended well")
				return nil
			}
			err := dial(t, w.start(t), generous)
			if _, ok := errors.AsType[*ServerError](err); !ok {
				t.Fatalf("error %v (%T), want a *ServerError", err, err)
			}
			for _, want := range []string{tt.says, filepath.Join(w.dir, "cacert.pem"), "127.0.0.1:"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestDial_RevokedOthersDoNoHarm(t *testing.T) {
	w := newWorld(t)
	list := must(w.authority.Revoke(w.client))(t)
	if err := os.WriteFile(filepath.Join(w.dir, "cacrl.pem"), list, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, w.start(t), generous); err != nil {
		t.Error(err)
	}
}

func TestDial_ClientThatIsNotAcceptedIsARefusedError(t *testing.T) {
	tests := []struct {
		name string
		edit func(t testing.TB, w *world)
		why  string
	}{
		{"daemon hangs up", func(_ testing.TB, w *world) { w.admit = func(*tls.Conn) error { return errors.New("no") } }, "so libvirtd does it"},
		{"daemon says no", func(_ testing.TB, w *world) { w.verdict = []byte{0} }, ""},
		{"handshake says no", func(t testing.TB, w *world) {
			w.clientAuth = tls.RequireAndVerifyClientCert
			w.client = must(must(tlstest.NewAuthority("other"))(t).Issue("controller", nil, nil))(t)
			w.write(t)
		}, "a daemon that asks for it in the handshake"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			tt.edit(t, w)
			err := dial(t, w.start(t), generous)
			if _, ok := errors.AsType[*RefusedError](err); !ok || !strings.Contains(err.Error(), filepath.Join(w.dir, "clientcert.pem")) {
				t.Errorf("error %v (%T), want a *RefusedError that names the certificate; %s", err, err, tt.why)
			}
		})
	}
}

func TestDial_UnusableFileIsAMaterialError(t *testing.T) {
	tests := []struct {
		name, file string
		content    string // empty: the file is removed
		is         error
	}{
		{"no authority", "cacert.pem", "", fs.ErrNotExist},
		{"no certificate", "clientcert.pem", "", fs.ErrNotExist},
		{"no key", "clientkey.pem", "", fs.ErrNotExist},
		{"no authority in it", "cacert.pem", "x", nil},
		{"no certificate in it", "clientcert.pem", "x", nil},
		{"no list in it", "cacrl.pem", "x", nil},
		{"broken list", "cacrl.pem", "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			path := filepath.Join(w.dir, tt.file)
			var err error
			if tt.content == "" {
				err = os.Remove(path)
			} else {
				err = os.WriteFile(path, []byte(tt.content), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			cfg := w.start(t)
			cfg.DialTCP = func(context.Context, string, string) (net.Conn, error) {
				t.Error("it was dialed")
				return nil, net.ErrClosed
			}
			err = dial(t, cfg, generous)
			if material, ok := errors.AsType[*MaterialError](err); !ok || material.Path != path || (tt.is != nil && !errors.Is(err, tt.is)) {
				t.Errorf("error %v (%T), want a *MaterialError for %q", err, err, path)
			}
		})
	}
}

func TestDial_FirstCompleteLocationIsUsed(t *testing.T) {
	w := newWorld(t)
	cfg := w.start(t)
	incomplete := t.TempDir()
	if err := os.WriteFile(filepath.Join(incomplete, "cacert.pem"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg.Locations = []Location{Directory(incomplete), Directory(w.dir)}
	if err := dial(t, cfg, generous); err != nil {
		t.Error(err)
	}
}

func TestDial_FilesAreReadAgain(t *testing.T) {
	w := newWorld(t)
	cfg := w.start(t)
	stranger := must(tlstest.NewAuthority("other"))(t)
	if err := stranger.Write(w.dir, "client", w.client); err != nil {
		t.Fatal(err)
	}
	if _, ok := errors.AsType[*ServerError](dial(t, cfg, generous)); !ok {
		t.Error("another authority was taken")
	}
	w.write(t)
	if err := dial(t, cfg, generous); err != nil {
		t.Error(err)
	}
}

func TestDial_DaemonThatStopsIsBounded(t *testing.T) {
	w := newWorld(t)
	silent := serve(t, w.dir, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	w.verdict = nil
	for name, cfg := range map[string]Config{"in the handshake": silent, "before its verdict": w.start(t)} {
		if err := dial(t, cfg, 500*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("silent %s: %v, want the deadline", name, err)
		}
	}
}

func TestDial_OtherFailuresAreOfTheNetwork(t *testing.T) {
	w := newWorld(t)
	for name, handle := range map[string]func(net.Conn){
		"hangs up":              func(net.Conn) {},
		"speaks another tongue": func(c net.Conn) { _, _ = io.WriteString(c, "SSH-2.0-x\r\n"); _, _ = c.Read(make([]byte, 1)) },
	} {
		err := dial(t, serve(t, w.dir, handle), generous)
		_, server := errors.AsType[*ServerError](err)
		_, refused := errors.AsType[*RefusedError](err)
		if err == nil || server || refused {
			t.Errorf("%s: %v (%T)", name, err, err)
		}
	}
}

func TestConn_CloseDoesNotWaitForAFrozenDaemon(t *testing.T) {
	w := newWorld(t)
	frozen := make(chan struct{})
	w.admit = func(c *tls.Conn) error {
		_, _ = c.Write([]byte{1})
		<-frozen
		return net.ErrClosed
	}
	conn, err := Dial(t.Context(), w.start(t))
	if err != nil {
		t.Fatal(err)
	}
	defer close(frozen)
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		for {
			if _, err := conn.Write(make([]byte, 1<<20)); err != nil { // until the buffers are full
				return
			}
		}
	}()
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	<-wrote
}
