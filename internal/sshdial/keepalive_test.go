package sshdial

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2/internal/sshtest"
)

func TestKeepalive_FrozenHostEndsTheConnection(t *testing.T) {
	calls := map[string]func(net.Conn) error{
		"read": func(conn net.Conn) error {
			_, err := conn.Read(make([]byte, 1))
			return err
		},
		"write": func(conn net.Conn) error {
			_, err := conn.Write(make([]byte, 64<<20))
			return err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t, serverConfig())
				cfg := clientConfig(t, server)
				cfg.KeepaliveInterval, cfg.KeepaliveCount = 10*time.Second, 4
				conn := mustDial(t, cfg)
				mustEcho(t, conn)
				server.Freeze()

				start := time.Now()
				err := call(conn)
				var got *KeepaliveError
				if !errors.As(err, &got) || got.Silence != 40*time.Second {
					t.Fatalf("error = %v, want a *KeepaliveError after 40s", err)
				}
				// One interval until the first request that stays unanswered, and four for
				// the answers.
				if took := time.Since(start); took != 50*time.Second {
					t.Errorf("it took %v, want 50s", took)
				}
				wantText(t, err, "40s")
				for name, again := range calls {
					if err := again(conn); !errors.Is(err, got) {
						t.Errorf("%s afterwards: %v, want the same", name, err)
					}
				}
			})
		})
	}
}

// On a real connection a frozen host blocks the transport itself, and with it
// the request.
func TestKeepalive_FrozenHostEndsAWriteThatFillsTheSocket(t *testing.T) {
	config := serverConfig()
	config.Connect = nil
	server := startServer(t, config)
	cfg := overTCP(t, clientConfig(t, server), server)
	cfg.Sockets = []string{listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })}
	cfg.KeepaliveInterval, cfg.KeepaliveCount = 50*time.Millisecond, 2
	cfg.DialTCP = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return conn, conn.(*net.TCPConn).SetWriteBuffer(4096)
	}
	before := currentUsage(t)
	conn, err := Dial(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	mustEcho(t, conn)
	server.Freeze()
	_, err = conn.Write(make([]byte, 64<<20))
	if _, ok := errors.AsType[*KeepaliveError](err); !ok {
		t.Errorf("error = %v, want a *KeepaliveError", err)
	}
	if err := conn.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	before.fds-- // the listener
	wantUsage(t, before)
}

func TestKeepalive_ConnectionThatNobodyClosesLeavesNothing(t *testing.T) {
	ends := map[string]func(*sshtest.Server){
		"frozen": func(server *sshtest.Server) { server.Freeze() },
		"gone":   func(server *sshtest.Server) { _ = server.Close() },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t, serverConfig())
				cfg := clientConfig(t, server)
				cfg.KeepaliveInterval = 10 * time.Second
				conn, err := Dial(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				end(server)
				_, _ = io.Copy(io.Discard, conn)
				time.Sleep(cfg.KeepaliveInterval) // on the bubble's clock: the next request fails
			})
		})
	}
}

func TestKeepalive_IdleConnectionStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, serverConfig())
		cfg := clientConfig(t, server)
		cfg.KeepaliveInterval, cfg.KeepaliveCount = 10*time.Second, 1
		conn := mustDial(t, cfg)
		time.Sleep(time.Hour + time.Second) // on the bubble's clock
		mustEcho(t, conn)
		if got := server.Keepalives(); got != 360 {
			t.Errorf("%d requests in an hour, want one every 10s", got)
		}
	})
}

func TestKeepalive_AnyTrafficIsASignOfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ticking := func(string) (net.Conn, error) {
			near, far := sshtest.Pipe()
			go func() {
				defer func() { _ = far.Close() }()
				ticker := time.NewTicker(9 * time.Second)
				defer ticker.Stop()
				for {
					select {
					case <-t.Context().Done():
						return
					case <-ticker.C:
						_, _ = far.Write([]byte{1})
					}
				}
			}()
			return near, nil
		}
		config := serverConfig()
		config.Connect = ticking
		config.Behaviour = sshtest.IgnoreRequests
		cfg := clientConfig(t, newServer(t, config))
		cfg.KeepaliveInterval, cfg.KeepaliveCount = 10*time.Second, 1
		conn := mustDial(t, cfg)
		if _, err := io.ReadFull(conn, make([]byte, 1000)); err != nil {
			t.Errorf("after 9000s: %v", err)
		}
	})
}

func TestKeepalive_WithoutIntervalNothingIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, serverConfig())
		conn := mustDial(t, clientConfig(t, server))
		time.Sleep(24 * time.Hour) // on the bubble's clock
		mustEcho(t, conn)
		if got := server.Keepalives(); got != 0 {
			t.Errorf("%d requests, want none", got)
		}
	})
}

func TestConn_CloseDoesNotWaitForAFrozenHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, serverConfig())
		cfg := clientConfig(t, server)
		cfg.KeepaliveInterval = time.Hour
		conn, err := Dial(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		server.Freeze()
		wrote := make(chan error, 1)
		go func() {
			_, err := conn.Write(make([]byte, 64<<20))
			wrote <- err
		}()
		synctest.Wait()
		start := time.Now()
		if err := conn.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if err := <-wrote; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Write: %v, want net.ErrClosed", err)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("it took %v", took)
		}
	})
}
