package sshdial

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2/internal/sshtest"
)

// jumpChain is a way over two jump hosts, which only the first of can be reached
// directly. Each server has a host key of its own.
type jumpChain struct {
	servers [3]*sshtest.Server // the last is the host
	cfg     Config
}

var (
	jumpNames = [3]string{"bastion.example", "inner.example", testHost}
	jumpAddrs = [3]string{"bastion.example:22", "inner.example:2222", testHost + ":22"}
)

func jumpHostKeys() [3]*sshtest.Key { return [3]*sshtest.Key{ecHostKey(), newHostKey(), edHostKey()} }

// newJumpChain makes the servers, and a client that gets through.
func newJumpChain(t *testing.T, edit func(server int, c *sshtest.Config)) *jumpChain {
	t.Helper()
	chain := &jumpChain{}
	for i := len(chain.servers) - 1; i >= 0; i-- {
		config := serverConfig()
		config.HostKeys = []ssh.Signer{jumpHostKeys()[i]}
		if i < len(chain.servers)-1 {
			next := chain.servers[i+1]
			config.Connect = nil
			config.ConnectTCP = func(addr string) (net.Conn, error) {
				if addr != jumpAddrs[i+1] {
					return nil, os.ErrNotExist
				}
				return next.Dial(context.Background(), "tcp", addr)
			}
		}
		edit(i, &config)
		chain.servers[i] = newServer(t, config)
	}
	chain.cfg = clientConfig(t, chain.servers[0])
	chain.cfg.Jumps = []Hop{chain.hop(t, 0), chain.hop(t, 1)}
	chain.cfg.Jumps[1].Port = 2222
	chain.cfg.Jumps[1].KnownHostsFiles = []string{knownHosts(t, entry("[inner.example]:2222", newHostKey()))}
	return chain
}

func (c *jumpChain) hop(t *testing.T, i int) Hop {
	t.Helper()
	return Hop{
		User: testUser, Host: jumpNames[i], KeyFiles: c.cfg.KeyFiles,
		KnownHostsFiles: []string{knownHosts(t, entry(jumpNames[i], jumpHostKeys()[i]))},
	}
}

func asIs(int, *sshtest.Config) {}

func TestDial_LeadsThroughJumpHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		chain := newJumpChain(t, asIs)
		chain.cfg.KeepaliveInterval = time.Second
		conn, err := Dial(t.Context(), chain.cfg)
		if err != nil {
			t.Fatal(err)
		}
		mustEcho(t, conn)
		time.Sleep(10 * time.Second) // of the bubble
		mustEcho(t, conn)
		if chain.servers[2].Keepalives() == 0 {
			t.Error("the host itself got no keepalive")
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		for i, server := range chain.servers {
			if n := server.Conns(); n != 0 {
				t.Errorf("%s has %d connections left", jumpNames[i], n)
			}
		}
	})
}

func TestDial_JumpHostsLeakNothing(t *testing.T) {
	chain := newJumpChain(t, asIs)
	cycle := func() {
		conn, err := Dial(t.Context(), chain.cfg)
		if err != nil {
			t.Fatal(err)
		}
		mustEcho(t, conn)
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	cycle()
	before := currentUsage(t)
	for range 10 {
		cycle()
	}
	wantUsage(t, before)
}

// No credential is offered to a server whose key is not trusted, and nothing at
// all is sent to what lies behind it.
func TestDial_CredentialsAreNotOfferedToAServerThatIsNotTrusted(t *testing.T) {
	for i, name := range jumpNames {
		for _, kind := range []struct {
			name  string
			kind  HostKeyKind
			lines func(host string) []string
		}{
			{"unknown", Unknown, func(string) []string { return []string{entry("elsewhere.example", otherKey())} }},
			{"changed", Mismatch, func(host string) []string { return []string{entry(host, otherKey())} }},
			{"revoked", Revoked, func(host string) []string {
				return []string{entry(host, jumpHostKeys()[i]), "@revoked " + entry("*", jumpHostKeys()[i])}
			}},
		} {
			t.Run(name+" "+kind.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					chain := newJumpChain(t, asIs)
					lookUp := name
					if i == 1 {
						lookUp = "[inner.example]:2222"
					}
					file := knownHosts(t, kind.lines(lookUp)...)
					hops := []*Hop{&chain.cfg.Jumps[0], &chain.cfg.Jumps[1], &chain.cfg.Hop}
					hops[i].KnownHostsFiles = []string{file}

					_, err := Dial(t.Context(), chain.cfg)
					var hostKey *HostKeyError
					if !errors.As(err, &hostKey) || hostKey.Kind != kind.kind || hostKey.LookupKey != lookUp {
						t.Fatalf("error %v, want a *HostKeyError for %q of kind %v", err, lookUp, kind.kind)
					}
					if kind.kind != Mismatch { // there the server is not even asked for its key: it has none of the type
						wantText(t, err, file)
					}
					synctest.Wait()
					for n, server := range chain.servers {
						if got := server.Auths(); n >= i && got != 0 {
							t.Errorf("%s saw %d attempts to authenticate", jumpNames[n], got)
						} else if n < i && got == 0 {
							t.Errorf("%s saw no attempt to authenticate", jumpNames[n])
						}
						if server.Conns() != 0 {
							t.Errorf("%s has a connection left", jumpNames[n])
						}
					}
				})
			})
		}
	}
}

func TestDial_FailureOnTheWayNamesTheServer(t *testing.T) {
	tests := []struct {
		name   string
		server func(i int, c *sshtest.Config)
		client func(t *testing.T, cfg *Config)
		check  func(err error) bool
		says   []string
	}{
		{
			name: "second jump host lets nobody in",
			server: func(i int, c *sshtest.Config) {
				if i == 1 {
					c.AuthorizedKeys = nil
				}
			},
			check: is[*AuthError], says: []string{"inner.example", fingerprint(userKey().PublicKey())},
		},
		{
			name: "first jump host forbids forwarding",
			server: func(i int, c *sshtest.Config) {
				if i == 0 {
					c.ConnectTCP = nil
				}
			},
			check: is[*TunnelError], says: []string{"bastion.example:22", "inner.example:2222", "AllowTcpForwarding"},
		},
		{
			name: "second jump host cannot reach the host",
			server: func(i int, c *sshtest.Config) {
				if i == 1 {
					c.ConnectTCP = func(string) (net.Conn, error) { return nil, syscall.ECONNREFUSED }
				}
			},
			check: is[*TunnelError], says: []string{"inner.example:2222", testHost + ":22"},
		},
		{
			name: "host hangs up", server: func(i int, c *sshtest.Config) {
				if i == 2 {
					c.Behaviour = sshtest.DropAfterVersion
				}
			},
			check: is[*DialError], says: []string{testHost + ":22", stepExchange},
		},
		{
			name: "known_hosts of a jump host is missing",
			client: func(t *testing.T, cfg *Config) {
				t.Helper()
				cfg.Jumps[1].KnownHostsFiles = []string{t.TempDir() + "/absent"}
			},
			check: is[*MaterialError], says: []string{"known_hosts", "/absent"},
		},
		{
			name:   "jump host without a user",
			client: func(_ *testing.T, cfg *Config) { cfg.Jumps[1].User = "" },
			check:  func(error) bool { return true }, says: []string{"jump host 2", "no user"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := test.server
				if server == nil {
					server = asIs
				}
				chain := newJumpChain(t, server)
				if test.client != nil {
					test.client(t, &chain.cfg)
				}
				_, err := Dial(t.Context(), chain.cfg)
				if err == nil || !test.check(err) {
					t.Fatalf("error %v (%T)", err, err)
				}
				wantText(t, err, test.says...)
			})
		})
	}
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func TestDial_JumpHostThatStopsIsBounded(t *testing.T) {
	for _, behaviour := range []sshtest.Behaviour{sshtest.SilentAfterAccept, sshtest.SilentAfterVersion, sshtest.SilentOnOpen} {
		for i, name := range jumpNames {
			synctest.Test(t, func(t *testing.T) {
				chain := newJumpChain(t, func(n int, c *sshtest.Config) {
					if n == i {
						c.Behaviour = behaviour
					}
				})
				start := time.Now()
				_, err := Dial(t.Context(), chain.cfg)
				if dialErr, ok := errors.AsType[*DialError](err); !ok || !errors.Is(err, context.DeadlineExceeded) || dialErr.Addr != jumpAddrs[i] {
					t.Errorf("%s, behaviour %d: %v; want a *DialError about it, deadline exceeded", name, behaviour, err)
				}
				if took := time.Since(start); took != time.Minute {
					t.Errorf("%s, behaviour %d: it took %v, want the timeout", name, behaviour, took)
				}
			})
		}
	}
}

func TestKeepalive_FrozenJumpHostEndsTheConnection(t *testing.T) {
	for i, name := range jumpNames {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				chain := newJumpChain(t, asIs)
				chain.cfg.KeepaliveInterval = time.Second
				conn := mustDial(t, chain.cfg)
				mustEcho(t, conn)
				chain.servers[i].Freeze()
				_, err := conn.Read(make([]byte, 1))
				if !is[*KeepaliveError](err) {
					t.Errorf("Read: %v, want a *KeepaliveError", err)
				}
			})
		})
	}
}

func TestDial_EachServerGetsItsOwnKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		chain := newJumpChain(t, func(i int, c *sshtest.Config) {
			c.User = strings.TrimSuffix(jumpNames[i], ".example")
			if i == 0 {
				c.AuthorizedKeys = []ssh.PublicKey{otherKey().PublicKey()}
			}
			c.MaxAuthTries = 1
		})
		chain.cfg.User, chain.cfg.Jumps[0].User, chain.cfg.Jumps[1].User = "host", "bastion", "inner"
		chain.cfg.Jumps[0].KeyFiles = []string{writeKey(t, otherKey())}
		mustEcho(t, mustDial(t, chain.cfg))
	})
}

func TestDial_CallbacksAreAskedOnceForEachDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		chain := newJumpChain(t, asIs)
		encrypted := writeEncryptedKey(t)
		passphrases, signers := 0, 0
		chain.cfg.Passphrase = func(ctx context.Context, path string) ([]byte, error) {
			passphrases++
			if _, ok := ctx.Deadline(); !ok || path != encrypted {
				t.Errorf("asked for %q, with a deadline: %t", path, ok)
			}
			return []byte(secret), nil
		}
		chain.cfg.Signers = func(context.Context) ([]ssh.Signer, error) {
			signers++
			return []ssh.Signer{userKey()}, nil
		}
		chain.cfg.KeyFiles = []string{encrypted}
		chain.cfg.Jumps[0].KeyFiles = []string{encrypted}
		chain.cfg.Jumps[1].KeyFiles = nil
		for n := 1; n <= 2; n++ {
			mustEcho(t, mustDial(t, chain.cfg))
			if passphrases != n || signers != n {
				t.Errorf("after %d dials: asked for a passphrase %d times, for signers %d times", n, passphrases, signers)
			}
		}
	})
}
