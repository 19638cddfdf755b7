package sshdial

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"github.com/kvm2/kvm2/internal/sshtest"
)

func TestDial_KeyIsAccepted(t *testing.T) {
	tests := []struct {
		name  string
		setup func(t *testing.T, server *sshtest.Config, cfg *Config)
	}{
		{"key file", func(*testing.T, *sshtest.Config, *Config) {}},
		{"RSA key file", func(t *testing.T, server *sshtest.Config, cfg *Config) {
			t.Helper()
			server.AuthorizedKeys = []ssh.PublicKey{rsaUserKey().PublicKey()}
			cfg.KeyFiles = []string{writeKey(t, rsaUserKey())}
		}},
		{"second key file", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			cfg.KeyFiles = append([]string{writeKey(t, otherKey())}, cfg.KeyFiles...)
		}},
		{"encrypted key file", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			cfg.KeyFiles = []string{writeEncryptedKey(t)}
			cfg.Passphrase = func(_ context.Context, path string) ([]byte, error) {
				if path != cfg.KeyFiles[0] {
					return nil, errors.New("asked for another file")
				}
				return []byte(secret), nil
			}
		}},
		{"signer", func(_ *testing.T, _ *sshtest.Config, cfg *Config) {
			cfg.KeyFiles = nil
			cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return []ssh.Signer{otherKey(), userKey()}, nil }
		}},
		{"signer after a key file", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			cfg.KeyFiles = []string{writeKey(t, otherKey())}
			cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return []ssh.Signer{userKey()}, nil }
		}},
		{"certificate beside the key", func(t *testing.T, server *sshtest.Config, cfg *Config) {
			t.Helper()
			server.AuthorizedKeys = nil
			server.UserAuthorities = []ssh.PublicKey{authority().PublicKey()}
			writeCert(t, cfg.KeyFiles[0], signUser(t, userKey(), testUser))
		}},
		{"RSA certificate", func(t *testing.T, server *sshtest.Config, cfg *Config) {
			t.Helper()
			server.AuthorizedKeys = nil
			server.UserAuthorities = []ssh.PublicKey{authority().PublicKey()}
			cfg.KeyFiles = []string{writeKey(t, rsaUserKey())}
			writeCert(t, cfg.KeyFiles[0], signUser(t, rsaUserKey(), testUser))
		}},
		{"key beside a certificate that is not accepted", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			writeCert(t, cfg.KeyFiles[0], signUser(t, userKey(), "somebody else"))
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := serverConfig()
				cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
				test.setup(t, &config, &cfg)
				cfg.DialTCP = newServer(t, config).Dial
				mustEcho(t, mustDial(t, cfg))
			})
		})
	}
}

func signUser(t *testing.T, key ssh.Signer, names ...string) ssh.Signer {
	t.Helper()
	cert, err := authority().SignUser(key, time.Now().AddDate(100, 0, 0), names...)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestDial_UserThatIsNotLetInIsAnAuthError(t *testing.T) {
	fp := func(keys ...*sshtest.Key) []string {
		var fps []string
		for _, key := range keys {
			fps = append(fps, fingerprint(key.PublicKey()))
		}
		return fps
	}
	strangers := func() []ssh.Signer {
		return []ssh.Signer{otherKey(), authority(), newHostKey(), rsaUserKey(), userKey()}
	}
	tests := []struct {
		name    string
		setup   func(t *testing.T, server *sshtest.Config, cfg *Config)
		offered []string
		says    []string
	}{
		{"wrong key", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			cfg.KeyFiles = []string{writeKey(t, otherKey())}
		}, fp(otherKey()), []string{"unable to authenticate"}},
		{"wrong user", func(_ *testing.T, server *sshtest.Config, _ *Config) {
			server.User = "somebody else"
		}, fp(userKey()), []string{testUser}},
		{"two wrong keys", func(t *testing.T, _ *sshtest.Config, cfg *Config) {
			t.Helper()
			cfg.KeyFiles = []string{writeKey(t, otherKey())}
			cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return []ssh.Signer{newHostKey()}, nil }
		}, fp(otherKey(), newHostKey()), nil},
		{"too many keys", func(_ *testing.T, server *sshtest.Config, cfg *Config) {
			server.MaxAuthTries = 2
			cfg.KeyFiles = nil
			cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return strangers(), nil }
		}, fp(otherKey(), authority(), newHostKey(), rsaUserKey()), []string{"too many authentication failures"}},
		{"certificate of a strange authority", func(t *testing.T, server *sshtest.Config, cfg *Config) {
			t.Helper()
			server.AuthorizedKeys = nil
			writeCert(t, cfg.KeyFiles[0], signUser(t, userKey(), testUser))
		}, []string{fp(userKey())[0] + " (certificate)", fp(userKey())[0]}, []string{"(certificate)"}},
		{"password only", func(_ *testing.T, server *sshtest.Config, _ *Config) {
			server.Password = secret
		}, nil, []string{"no key was offered", `["password"]`}},
		{"no key", func(_ *testing.T, _ *sshtest.Config, cfg *Config) {
			cfg.KeyFiles = nil
		}, nil, []string{"no key file, no signer and no key in an agent"}},
		{"signer that fails to sign", func(_ *testing.T, _ *sshtest.Config, cfg *Config) {
			cfg.KeyFiles = nil
			cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return []ssh.Signer{brokenSigner{userKey()}}, nil }
		}, fp(userKey()), []string{"the token is not plugged in"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := serverConfig()
				cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
				test.setup(t, &config, &cfg)
				cfg.DialTCP = newServer(t, config).Dial

				start := time.Now()
				_, err := Dial(t.Context(), cfg)
				var got *AuthError
				if !errors.As(err, &got) {
					t.Fatalf("error = %v, want an *AuthError", err)
				}
				if got.User != testUser || got.Host != testHost || !slices.Equal(got.Offered, test.offered) {
					t.Errorf("error = %+v, want offered %q", got, test.offered)
				}
				wantText(t, err, append(test.says, testUser, testHost)...)
				wantText(t, err, test.offered...)
				if took := time.Since(start); took != 0 {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

type brokenSigner struct{ ssh.Signer }

func (brokenSigner) Sign(io.Reader, []byte) (*ssh.Signature, error) {
	return nil, errors.New("the token is not plugged in")
}

func TestDial_ConnectionLostDuringAuthenticationIsNoAuthError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var server *sshtest.Server
		config := serverConfig()
		cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
		cfg.Signers = func(context.Context) ([]ssh.Signer, error) {
			return []ssh.Signer{signFunc(func() { _ = server.Close() })}, nil
		}
		config.AuthorizedKeys = []ssh.PublicKey{otherKey().PublicKey()}
		server = newServer(t, config)
		cfg.DialTCP = server.Dial

		_, err := Dial(t.Context(), cfg)
		var got *DialError
		if !errors.As(err, &got) || got.Step != stepAuth {
			t.Fatalf("error = %v, want a *DialError in the authentication", err)
		}
	})
}

// signFunc is the other key, with something happening while it signs.
type signFunc func()

func (signFunc) PublicKey() ssh.PublicKey { return otherKey().PublicKey() }

func (f signFunc) Sign(r io.Reader, data []byte) (*ssh.Signature, error) {
	f()
	return otherKey().Sign(r, data)
}

func TestDial_UnusableKeyIsAMaterialError(t *testing.T) {
	var missing *ssh.PassphraseMissingError
	tests := []struct {
		name  string
		setup func(t *testing.T, cfg *Config)
		what  string
		file  string // added to the path of the key
		is    error
		as    any
		says  string
	}{
		{name: "missing", setup: func(_ *testing.T, cfg *Config) { cfg.KeyFiles[0] += "-gone" }, what: "private key", is: fs.ErrNotExist},
		{name: "directory", setup: func(_ *testing.T, cfg *Config) { cfg.KeyFiles[0] = filepath.Dir(cfg.KeyFiles[0]) }, what: "private key"},
		{name: "garbage", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			cfg.KeyFiles[0] = writeFile(t, "id", []byte("garbage"))
		}, what: "private key", says: "no key found"},
		{name: "public key", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			cfg.KeyFiles[0] = writeFile(t, "id.pub", ssh.MarshalAuthorizedKey(userKey().PublicKey()))
		}, what: "private key", says: "no key found"},
		{name: "encrypted, no passphrase", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			cfg.KeyFiles[0] = writeEncryptedKey(t)
		}, what: "private key", as: &missing, says: "it is encrypted and no passphrase is configured"},
		{name: "encrypted, wrong passphrase", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			cfg.KeyFiles[0] = writeEncryptedKey(t)
			cfg.Passphrase = func(context.Context, string) ([]byte, error) { return []byte(wrongSecret), nil }
		}, what: "private key", is: x509.IncorrectPasswordError},
		{name: "encrypted, passphrase unavailable", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			cfg.KeyFiles[0] = writeEncryptedKey(t)
			cfg.Passphrase = func(context.Context, string) ([]byte, error) { return nil, fs.ErrPermission }
		}, what: "private key", is: fs.ErrPermission, says: "its passphrase"},
		{name: "certificate is garbage", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			writeBeside(t, cfg.KeyFiles[0], []byte("garbage"))
		}, what: "certificate", file: "-cert.pub"},
		{name: "certificate is a plain key", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			writeBeside(t, cfg.KeyFiles[0], ssh.MarshalAuthorizedKey(userKey().PublicKey()))
		}, what: "certificate", file: "-cert.pub", says: "plain key"},
		{name: "certificate of another key", setup: func(t *testing.T, cfg *Config) {
			t.Helper()
			writeCert(t, cfg.KeyFiles[0], signUser(t, otherKey(), testUser))
		}, what: "certificate", file: "-cert.pub"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
			cfg.DialTCP = func(context.Context, string, string) (net.Conn, error) {
				t.Error("the network was touched")
				return nil, net.ErrClosed
			}
			test.setup(t, &cfg)
			_, err := Dial(t.Context(), cfg)
			var got *MaterialError
			if !errors.As(err, &got) || got.Path != cfg.KeyFiles[0]+test.file || got.What != test.what {
				t.Fatalf("error = %v, want a *MaterialError for the %s", err, test.what)
			}
			wantText(t, err, test.what, got.Path, test.says)
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error = %v, want %v", err, test.is)
			}
			if test.as != nil && !errors.As(err, test.as) {
				t.Errorf("error = %v, want a %T", err, test.as)
			}
			for _, leak := range []string{secret, wrongSecret, "BEGIN", "b3BlbnNzaC1rZXk"} {
				if strings.Contains(err.Error(), leak) {
					t.Errorf("error %q says %q", err, leak)
				}
			}
		})
	}
}

func writeBeside(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path+"-cert.pub", content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDial_FailingSignersAreAMaterialError(t *testing.T) {
	cfg := clientConfig(t, sshtest.New(sshtest.Config{}))
	cfg.Signers = func(context.Context) ([]ssh.Signer, error) { return nil, fs.ErrPermission }
	_, err := Dial(t.Context(), cfg)
	if got, ok := errors.AsType[*MaterialError](err); !ok || got.What != "signers" || !errors.Is(err, fs.ErrPermission) {
		t.Errorf("error = %v, want a *MaterialError of the signers", err)
	}
}

func TestDial_MaterialsAreReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := clientConfig(t, newServer(t, serverConfig()))
		mustEcho(t, mustDial(t, cfg))

		rotated := serverConfig()
		rotated.HostKeys = []ssh.Signer{newHostKey()}
		rotated.AuthorizedKeys = []ssh.PublicKey{otherKey().PublicKey()}
		cfg.DialTCP = newServer(t, rotated).Dial
		if _, err := Dial(t.Context(), cfg); !isHostKeyError(err) {
			t.Errorf("before the rotation: %v, want a *HostKeyError", err)
		}
		replace(t, cfg.KnownHostsFiles[0], []byte(entry(testHost, newHostKey())))
		if _, err := Dial(t.Context(), cfg); !isAuthError(err) {
			t.Errorf("with the new host key: %v, want an *AuthError", err)
		}
		content, err := otherKey().PEM("")
		if err != nil {
			t.Fatal(err)
		}
		replace(t, cfg.KeyFiles[0], content)
		mustEcho(t, mustDial(t, cfg))
	})
}

func isHostKeyError(err error) bool {
	_, ok := errors.AsType[*HostKeyError](err)
	return ok
}

func isAuthError(err error) bool {
	_, ok := errors.AsType[*AuthError](err)
	return ok
}

// replace replaces a file as a mounted secret is replaced: by renaming.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.Rename(writeFile(t, "new", content), path); err != nil {
		t.Fatal(err)
	}
}

// startAgent returns the socket of an agent with these keys.
func startAgent(t *testing.T, keys ...*sshtest.Key) string {
	t.Helper()
	keyring := agent.NewKeyring()
	for _, key := range keys {
		if err := keyring.Add(agent.AddedKey{PrivateKey: key.Private()}); err != nil {
			t.Fatal(err)
		}
	}
	return listenUnix(t, func(conn net.Conn) { _ = agent.ServeAgent(keyring, conn) })
}

// listenUnix returns the path of a unix socket on which serve is called for each
// connection.
func listenUnix(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer func() { _ = conn.Close() }()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return path
}

func TestDial_AgentKeyIsAccepted(t *testing.T) {
	tests := []struct {
		name string
		keys []*sshtest.Key
		user *sshtest.Key
	}{
		{"only key", []*sshtest.Key{userKey()}, userKey()},
		{"third key", []*sshtest.Key{otherKey(), authority(), userKey()}, userKey()},
		{"RSA key", []*sshtest.Key{rsaUserKey()}, rsaUserKey()},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config := serverConfig()
			config.AuthorizedKeys = []ssh.PublicKey{test.user.PublicKey()}
			cfg := clientConfig(t, newServer(t, config))
			cfg.KeyFiles = nil
			cfg.AgentSocket = startAgent(t, test.keys...)
			before := currentUsage(t)
			conn, err := Dial(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			mustEcho(t, conn)
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
			wantUsage(t, before)
		})
	}
}

func TestDial_KeyFileIsOfferedBeforeTheAgent(t *testing.T) {
	config := serverConfig()
	config.MaxAuthTries = 1
	cfg := clientConfig(t, newServer(t, config))
	cfg.AgentSocket = startAgent(t, otherKey(), authority(), newHostKey())
	mustEcho(t, mustDial(t, cfg))
}

func TestDial_UnusableAgent(t *testing.T) {
	tests := []struct {
		name   string
		socket func(t *testing.T) string
		want   any
	}{
		{"no socket", func(t *testing.T) string { t.Helper(); return filepath.Join(t.TempDir(), "none") }, new(*MaterialError)},
		{"no keys", func(t *testing.T) string { t.Helper(); return startAgent(t) }, new(*AuthError)},
		{"hangs up", func(t *testing.T) string { t.Helper(); return listenUnix(t, func(net.Conn) {}) }, new(*MaterialError)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			cfg := clientConfig(t, newServer(t, serverConfig()))
			cfg.KeyFiles = nil
			cfg.AgentSocket = test.socket(t)
			before := currentUsage(t)
			if _, err := Dial(t.Context(), cfg); !errors.As(err, test.want) {
				t.Errorf("error = %v, want %T", err, test.want)
			}
			wantUsage(t, before)
		})
	}
}

func TestDial_AgentThatHangsIsBounded(t *testing.T) {
	// It lists its keys and then waits for somebody to confirm a signature.
	waits := func(t *testing.T) string {
		t.Helper()
		return listenUnix(t, func(conn net.Conn) {
			keyring := agent.NewKeyring()
			if err := keyring.Add(agent.AddedKey{PrivateKey: userKey().Private()}); err != nil {
				t.Error(err)
			}
			_ = agent.ServeAgent(waitingAgent{keyring, conn}, conn)
		})
	}
	silent := func(t *testing.T) string {
		t.Helper()
		return listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	}
	for name, socket := range map[string]func(*testing.T) string{"silent": silent, "waits to sign": waits} {
		t.Run(name, func(t *testing.T) {
			cfg := clientConfig(t, newServer(t, serverConfig()))
			cfg.KeyFiles = nil
			cfg.AgentSocket = socket(t)
			cfg.HandshakeTimeout = 200 * time.Millisecond
			before := currentUsage(t)
			_, err := Dial(t.Context(), cfg)
			if _, ok := errors.AsType[*DialError](err); !ok || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error = %v, want a *DialError for the deadline", err)
			}
			wantUsage(t, before)
		})
	}
}

// waitingAgent signs when the other side has hung up.
type waitingAgent struct {
	agent.Agent
	conn net.Conn
}

func (a waitingAgent) Sign(key ssh.PublicKey, data []byte) (*ssh.Signature, error) {
	_, _ = a.conn.Read(make([]byte, 1))
	return a.Agent.Sign(key, data)
}
