package sshdial

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2/internal/sshtest"
)

func TestDial_IncompleteConfigIsRefused(t *testing.T) {
	tests := []struct {
		name string
		edit func(*Config)
		says string
	}{
		{"no user", func(cfg *Config) { cfg.User = "" }, "no user"},
		{"no host", func(cfg *Config) { cfg.Host = "" }, "no host"},
		{"no socket", func(cfg *Config) { cfg.Sockets = nil }, "no socket"},
		{"port", func(cfg *Config) { cfg.Port = 65536 }, "65536"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
			test.edit(&cfg)
			_, err := Dial(t.Context(), cfg)
			if err == nil {
				t.Fatal("no error")
			}
			wantText(t, err, test.says)
		})
	}
}

func TestDial_CarriesBulkDataBothWays(t *testing.T) {
	const size = 20 << 20
	config := serverConfig()
	config.Connect = nil
	cfg := overTCP(t, clientConfig(t, sshtest.New(config)), startServer(t, config))
	cfg.Sockets = []string{listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })}
	cfg.KeepaliveInterval = time.Second
	conn := mustDial(t, cfg)

	sent := sha256.New()
	wrote := make(chan error, 1)
	go func() {
		source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
		_, err := io.Copy(struct{ io.Writer }{conn}, source)
		wrote <- err
	}()
	got := sha256.New()
	if _, err := io.CopyN(got, conn, size); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Sum(nil), sent.Sum(nil)) {
		t.Error("the data has changed on the way")
	}
}

func TestDial_FirstSocketThatOpensWins(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	good := listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	never := listenUnix(t, func(net.Conn) { t.Error("a later socket was tried") })

	config := serverConfig()
	config.Connect = nil
	cfg := clientConfig(t, newServer(t, config))
	cfg.Sockets = []string{filepath.Join(dir, "missing"), stale, good, never}
	conn := mustDial(t, cfg)
	mustEcho(t, conn)
	if got := conn.RemoteAddr().String(); got != good {
		t.Errorf("remote address %q, want %q", got, good)
	}
}

func TestDial_RefusedSocketIsAForwardError(t *testing.T) {
	tests := []struct {
		name   string
		reason ssh.RejectionReason
		says   []string
	}{
		{"prohibited", ssh.Prohibited, []string{"forbids", "AllowStreamLocalForwarding"}},
		{"connection failed", ssh.ConnectionFailed, []string{"AllowStreamLocalForwarding", "does not exist", "nothing listens", "permission"}},
		{"unknown channel type", ssh.UnknownChannelType, []string{"cannot forward to unix sockets"}},
		{"resource shortage", ssh.ResourceShortage, []string{"short of resources"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := serverConfig()
				config.Reject = func(string) *ssh.OpenChannelError {
					return &ssh.OpenChannelError{Reason: test.reason, Message: "because I say so"}
				}
				server := newServer(t, config)
				cfg := clientConfig(t, server)
				cfg.Sockets = []string{"/run/a", "/run/b"}
				_, err := Dial(t.Context(), cfg)
				var got *ForwardError
				if !errors.As(err, &got) || got.Reason != test.reason || got.Message != "because I say so" {
					t.Fatalf("error = %v, want a *ForwardError with reason %d", err, test.reason)
				}
				wantText(t, err, append(test.says, `"/run/a", "/run/b"`, "because I say so")...)
				if open, ok := errors.AsType[*ssh.OpenChannelError](err); !ok || open.Reason != test.reason {
					t.Errorf("it does not unwrap to the *ssh.OpenChannelError")
				}
				synctest.Wait()
				if n := server.Conns(); n != 0 {
					t.Errorf("%d connections are left open", n)
				}
			})
		})
	}
}

func TestDial_ServerThatStopsIsBounded(t *testing.T) {
	tests := []struct {
		name      string
		behaviour sshtest.Behaviour
		step      string
	}{
		{"silent after accepting", sshtest.SilentAfterAccept, stepExchange},
		{"silent in the handshake", sshtest.SilentAfterVersion, stepExchange},
		{"silent when asked for the socket", sshtest.SilentOnOpen, stepOpen},
	}
	for _, test := range tests {
		ends := []struct {
			name string
			want error
			dial func(t *testing.T, cfg Config) error
		}{
			{"by the timeout", context.DeadlineExceeded, func(t *testing.T, cfg Config) error {
				t.Helper()
				_, err := Dial(t.Context(), cfg)
				return err
			}},
			{"by the deadline", context.DeadlineExceeded, func(t *testing.T, cfg Config) error {
				t.Helper()
				cfg.HandshakeTimeout = 0
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err := Dial(ctx, cfg)
				return err
			}},
			{"by cancelling", context.Canceled, func(t *testing.T, cfg Config) error {
				t.Helper()
				cfg.HandshakeTimeout = 0
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(30*time.Second, cancel)
				_, err := Dial(ctx, cfg)
				return err
			}},
		}
		for _, end := range ends {
			t.Run(test.name+", "+end.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					config := serverConfig()
					config.Behaviour = test.behaviour
					server := newServer(t, config)
					cfg := clientConfig(t, server)
					cfg.HandshakeTimeout = 30 * time.Second

					start := time.Now()
					err := end.dial(t, cfg)
					var got *DialError
					if !errors.As(err, &got) || got.Step != test.step || !errors.Is(err, end.want) {
						t.Errorf("error = %v, want %v in step %q", err, end.want, test.step)
					}
					if took := time.Since(start); took != 30*time.Second {
						t.Errorf("it took %v, want 30s", took)
					}
					wantText(t, err, testHost, testUser, test.step)
					synctest.Wait()
					if n := server.Conns(); n != 0 {
						t.Errorf("%d connections are left open", n)
					}
				})
			})
		}
	}
}

func TestDial_NetworkThatDoesNotAnswerIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := clientConfig(t, newServer(t, serverConfig()))
		cfg.HandshakeTimeout = 30 * time.Second
		cfg.DialTCP = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if network != "tcp" || addr != testHost+":22" {
				t.Errorf("dialed %q %q", network, addr)
			}
			<-ctx.Done()
			return nil, errors.New("gave up")
		}
		start := time.Now()
		_, err := Dial(t.Context(), cfg)
		var got *DialError
		if !errors.As(err, &got) || got.Step != stepConnect || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error = %v, want the deadline in the TCP connection", err)
		}
		if took := time.Since(start); took != 30*time.Second {
			t.Errorf("it took %v, want 30s", took)
		}
	})
}

func TestDial_ServerThatHangsUpIsADialError(t *testing.T) {
	for name, behaviour := range map[string]sshtest.Behaviour{
		"in the handshake": sshtest.DropAfterVersion,
		"on the channel":   sshtest.DropOnOpen,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := serverConfig()
				config.Behaviour = behaviour
				cfg := clientConfig(t, newServer(t, config))
				_, err := Dial(t.Context(), cfg)
				if _, ok := errors.AsType[*DialError](err); !ok || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error = %v, want a *DialError other than the deadline", err)
				}
			})
		})
	}
}

func TestDial_RefusedTCPConnectionIsADialError(t *testing.T) {
	server := startServer(t, serverConfig())
	cfg := overTCP(t, clientConfig(t, server), server)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := Dial(t.Context(), cfg)
	if got, ok := errors.AsType[*DialError](err); !ok || got.Step != stepConnect || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error = %v, want a *DialError for the refusal", err)
	}
}

func TestDial_EndOfContextAfterwardsChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := clientConfig(t, newServer(t, serverConfig()))
		ctx, cancel := context.WithCancel(t.Context())
		conn, err := Dial(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		cancel()
		time.Sleep(2 * cfg.HandshakeTimeout) // on the bubble's clock
		mustEcho(t, conn)
	})
}

func TestConn_ReportsNoDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := mustDial(t, clientConfig(t, newServer(t, serverConfig())))
		for name, set := range map[string]func(time.Time) error{
			"SetDeadline": conn.SetDeadline, "SetReadDeadline": conn.SetReadDeadline, "SetWriteDeadline": conn.SetWriteDeadline,
		} {
			if err := set(time.Now()); !errors.Is(err, os.ErrNoDeadline) {
				t.Errorf("%s: %v, want os.ErrNoDeadline", name, err)
			}
		}
	})
}

func TestConn_CloseEndsABlockedReadAndIsIdempotent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, serverConfig())
		conn, err := Dial(t.Context(), clientConfig(t, server))
		if err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		go func() {
			_, err := conn.Read(make([]byte, 1))
			read <- err
		}()
		synctest.Wait()
		for range 2 {
			if err := conn.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if err := <-read; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Read: %v, want net.ErrClosed", err)
		}
		if _, err := conn.Write([]byte{1}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Write: %v, want net.ErrClosed", err)
		}
		synctest.Wait()
		if n := server.Conns(); n != 0 {
			t.Errorf("%d connections are left open", n)
		}
	})
}

func TestConn_EndOfTheSocketIsEOF(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := serverConfig()
		config.Connect = func(string) (net.Conn, error) {
			near, far := sshtest.Pipe()
			_ = far.Close()
			return near, nil
		}
		conn := mustDial(t, clientConfig(t, newServer(t, config)))
		if _, err := conn.Read(make([]byte, 1)); err != io.EOF { //nolint:errorlint // a reader must return it bare
			t.Errorf("Read: %v, want io.EOF", err)
		}
	})
}

func TestDial_ManyCyclesLeakNothing(t *testing.T) {
	config := serverConfig()
	config.Connect = nil
	server := startServer(t, config)
	cfg := overTCP(t, clientConfig(t, server), server)
	cfg.Sockets = []string{listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })}
	cfg.KeepaliveInterval = time.Minute

	before := currentUsage(t)
	for range 200 {
		conn, err := Dial(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		mustEcho(t, conn)
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	wantUsage(t, before)
}

func TestDial_FailuresLeakNothing(t *testing.T) {
	tests := []struct {
		name   string
		server func(*sshtest.Config)
		client func(t *testing.T, cfg *Config)
	}{
		{"unknown host", nil, func(t *testing.T, cfg *Config) { t.Helper(); cfg.KnownHostsFiles = []string{knownHosts(t)} }},
		{"changed host key", func(config *sshtest.Config) { config.HostKeys = []ssh.Signer{newHostKey()} }, nil},
		{"no common algorithm", func(config *sshtest.Config) { config.HostKeys = []ssh.Signer{ecHostKey()} }, nil},
		{"wrong key", nil, func(t *testing.T, cfg *Config) { t.Helper(); cfg.KeyFiles = []string{writeKey(t, otherKey())} }},
		{"bad key file", nil, func(t *testing.T, cfg *Config) { t.Helper(); cfg.KeyFiles = append(cfg.KeyFiles, "/nonexistent") }},
		{"no socket", nil, func(t *testing.T, cfg *Config) { t.Helper(); cfg.Sockets = []string{"/nonexistent"} }},
		{"dropped in the handshake", func(config *sshtest.Config) { config.Behaviour = sshtest.DropAfterVersion }, nil},
		{"dropped on the channel", func(config *sshtest.Config) { config.Behaviour = sshtest.DropOnOpen }, nil},
		{
			"silent", func(config *sshtest.Config) { config.Behaviour = sshtest.SilentAfterAccept },
			func(_ *testing.T, cfg *Config) { cfg.HandshakeTimeout = 10 * time.Millisecond },
		},
		{
			"silent in the handshake", func(config *sshtest.Config) { config.Behaviour = sshtest.SilentAfterVersion },
			func(_ *testing.T, cfg *Config) { cfg.HandshakeTimeout = 10 * time.Millisecond },
		},
		{
			"silent on the channel", func(config *sshtest.Config) { config.Behaviour = sshtest.SilentOnOpen },
			func(_ *testing.T, cfg *Config) { cfg.HandshakeTimeout = 100 * time.Millisecond },
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config := serverConfig()
			config.Connect = nil
			if test.server != nil {
				test.server(&config)
			}
			server := startServer(t, config)
			cfg := overTCP(t, clientConfig(t, server), server)
			if test.client != nil {
				test.client(t, &cfg)
			}
			before := currentUsage(t)
			for range 10 {
				if _, err := Dial(t.Context(), cfg); err == nil {
					t.Fatal("no error")
				}
			}
			wantUsage(t, before)
		})
	}
}

func TestErrors_QuoteForeignValues(t *testing.T) {
	evil := "evil\nvalue"
	errs := []error{
		&MaterialError{Path: evil, What: "private key", Err: io.EOF},
		&HostKeyError{Kind: Unknown, Files: []string{evil}, LookupKey: evil},
		&HostKeyError{Kind: Mismatch, Type: evil, LookupKey: evil, Known: []KnownKey{{File: evil}}},
		&HostKeyError{Kind: Revoked, LookupKey: evil, Known: []KnownKey{{File: evil}}},
		&HostKeyError{Kind: BadCertificate, LookupKey: evil, Err: io.EOF},
		&AuthError{User: evil, Host: evil, Err: io.EOF},
		&ForwardError{Sockets: []string{evil}, Reason: ssh.Prohibited, Message: evil},
		&DialError{User: evil, Addr: evil, Step: stepOpen, Err: io.EOF},
	}
	for _, err := range errs {
		if text := err.Error(); strings.Contains(text, "\n") || !strings.Contains(text, `evil\nvalue`) {
			t.Errorf("%T: %s", err, text)
		}
	}
}
