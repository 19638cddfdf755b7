package sshdial

import (
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/kvm2/kvm2/internal/sshtest"
)

func signHost(t *testing.T, ca, key ssh.Signer, expiry time.Time, names ...string) ssh.Signer {
	t.Helper()
	cert, err := ca.(*sshtest.Key).SignHost(key, expiry, names...)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestDial_KnownHostIsAccepted(t *testing.T) {
	soon := time.Now().Add(time.Hour).AddDate(100, 0, 0)
	all := []ssh.Signer{rsaHostKey(), ecHostKey(), edHostKey()}
	tests := []struct {
		name     string
		host     string
		port     int
		hostKeys []ssh.Signer
		files    [][]string
		why      string
	}{
		{name: "plain", files: [][]string{{entry(testHost, edHostKey())}}},
		{name: "hashed", files: [][]string{{entry(knownhosts.HashHostname(testHost), edHostKey())}}},
		{name: "pattern", files: [][]string{{entry("*.example,!other.example", edHostKey())}}},
		{name: "other port", port: 2222, files: [][]string{{entry("["+testHost+"]:2222", edHostKey())}}},
		{name: "other port, hashed", port: 2222, files: [][]string{{entry(knownhosts.HashHostname("["+testHost+"]:2222"), edHostKey())}}},
		{name: "upper case", host: "Host.Example", files: [][]string{{entry(testHost, edHostKey())}}, why: "OpenSSH looks up the lower case"},
		{name: "IPv4", host: "192.0.2.7", files: [][]string{{entry("192.0.2.7", edHostKey())}}},
		{name: "IPv6", host: "2001:db8::7", files: [][]string{{entry("2001:db8::7", edHostKey())}}},
		{name: "IPv6, other port", host: "2001:db8::7", port: 2222, files: [][]string{{entry("[2001:db8::7]:2222", edHostKey())}}},
		{name: "in the second file", files: [][]string{{entry("other.example", otherKey())}, {entry(testHost, edHostKey())}}},
		{name: "old and new key", files: [][]string{{entry(testHost, newHostKey()), entry(testHost, edHostKey())}}},
		{name: "a broken line beside it", files: [][]string{{"nonsense", entry(testHost, edHostKey())}}, why: "OpenSSH skips it too"},

		{name: "several keys, ed25519 known", hostKeys: all, files: [][]string{{entry(testHost, edHostKey())}}, why: "only its algorithm may be offered"},
		{name: "several keys, RSA known", hostKeys: all, files: [][]string{{entry(testHost, rsaHostKey())}}, why: "ssh-rsa stands for the SHA-2 algorithms"},
		{name: "several keys, ECDSA known", hostKeys: all, files: [][]string{{entry(testHost, ecHostKey())}}},
		{name: "several keys, all known", hostKeys: all, files: [][]string{{entry(testHost, ecHostKey()), entry(testHost, rsaHostKey()), entry(testHost, edHostKey())}}},
		{name: "one key, several known", hostKeys: []ssh.Signer{rsaHostKey()}, files: [][]string{{entry(testHost, edHostKey()), entry(testHost, rsaHostKey())}}},

		{
			name:     "certificate",
			hostKeys: []ssh.Signer{signHost(t, authority(), edHostKey(), soon, testHost)},
			files:    [][]string{{"@cert-authority " + entry("*.example", authority())}},
		},
		{
			name: "RSA certificate", port: 2222,
			hostKeys: []ssh.Signer{signHost(t, authority(), rsaHostKey(), soon, testHost)},
			files:    [][]string{{"@cert-authority " + entry("["+testHost+"]:2222", authority())}},
		},
		{
			name:     "certificate beside plain keys",
			hostKeys: []ssh.Signer{ecHostKey(), signHost(t, authority(), edHostKey(), soon, testHost), rsaHostKey()},
			files:    [][]string{{"@cert-authority " + entry("*", authority())}},
			why:      "the plain keys are not known",
		},
		{
			name:     "plain key while an authority is known",
			hostKeys: []ssh.Signer{rsaHostKey(), edHostKey()},
			files:    [][]string{{"@cert-authority " + entry("*", authority()), entry(testHost, rsaHostKey())}},
		},
		{
			name:     "certificate of a strange authority on a known key",
			hostKeys: []ssh.Signer{signHost(t, otherKey(), edHostKey(), soon, testHost)},
			files:    [][]string{{"@cert-authority " + entry("*", authority()), entry(testHost, edHostKey())}},
			why:      "OpenSSH falls back to the key in it",
		},
		{name: "another key revoked", files: [][]string{{"@revoked " + entry("*", newHostKey()), entry(testHost, edHostKey())}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := serverConfig()
				if test.hostKeys != nil {
					server.HostKeys = test.hostKeys
				}
				cfg := clientConfig(t, newServer(t, server))
				cfg.Port = test.port
				if test.host != "" {
					cfg.Host = test.host
				}
				cfg.KnownHostsFiles = nil
				for _, lines := range test.files {
					cfg.KnownHostsFiles = append(cfg.KnownHostsFiles, knownHosts(t, lines...))
				}
				conn, err := Dial(t.Context(), cfg)
				if err != nil {
					t.Fatalf("%v (%s)", err, test.why)
				}
				mustEcho(t, conn)
				if err := conn.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestDial_HostKeyThatIsNotKnownIsRefused(t *testing.T) {
	soon := time.Now().Add(time.Hour).AddDate(100, 0, 0)
	past := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)
	fp := func(key ssh.Signer) string { return fingerprint(key.PublicKey()) }
	tests := []struct {
		name        string
		port        int
		hostKeys    []ssh.Signer
		lines       []string
		noFile      bool
		kind        HostKeyKind
		lookupKey   string
		fingerprint string
		says        []string
	}{
		{name: "unknown", lines: []string{entry("other.example", edHostKey())}, kind: Unknown, fingerprint: fp(edHostKey()), says: []string{"is not known"}},
		{name: "empty file", kind: Unknown, fingerprint: fp(edHostKey())},
		{name: "no file", noFile: true, kind: Unknown, fingerprint: fp(edHostKey()), says: []string{"no known_hosts file is configured"}},
		{
			name: "known on another port only", port: 2222,
			lines: []string{entry(testHost, edHostKey())},
			kind:  Unknown, lookupKey: "[host.example]:2222", fingerprint: fp(edHostKey()),
		},
		{
			name:  "changed",
			lines: []string{"# old", entry(testHost, newHostKey())},
			kind:  Mismatch, fingerprint: fp(edHostKey()),
			says: []string{"does not match", fp(newHostKey()), "line 2"},
		},
		{
			name:  "changed, hashed, other port",
			port:  2222,
			lines: []string{entry(knownhosts.HashHostname("[host.example]:2222"), newHostKey())},
			kind:  Mismatch, lookupKey: "[host.example]:2222", fingerprint: fp(edHostKey()),
		},
		{
			name:  "no key of the known type",
			lines: []string{entry(testHost, rsaHostKey())},
			kind:  Mismatch, says: []string{`only keys for "ssh-ed25519"`, fp(rsaHostKey())},
		},
		{
			name:  "no certificate",
			lines: []string{"@cert-authority " + entry("*", authority())},
			kind:  Mismatch, says: []string{`only keys for "ssh-ed25519"`, "@cert-authority", fp(authority())},
		},
		{
			name:  "revoked",
			lines: []string{"@revoked " + entry("*", edHostKey()), entry(testHost, edHostKey())},
			kind:  Revoked, fingerprint: fp(edHostKey()), says: []string{"is revoked", "line 1"},
		},
		{
			name:  "revoked and not known",
			lines: []string{"@revoked " + entry("*", edHostKey())},
			kind:  Revoked, fingerprint: fp(edHostKey()),
		},
		{
			name:     "certificate of a strange authority",
			hostKeys: []ssh.Signer{signHost(t, otherKey(), edHostKey(), soon, testHost)},
			lines:    []string{"@cert-authority " + entry("*", authority())},
			kind:     Mismatch, fingerprint: fp(edHostKey()), says: []string{"certified by " + fp(otherKey()), fp(authority())},
		},
		{
			name:     "certificate for another host",
			hostKeys: []ssh.Signer{signHost(t, authority(), edHostKey(), soon, "other.example")},
			lines:    []string{"@cert-authority " + entry("*", authority())},
			kind:     BadCertificate, fingerprint: fp(edHostKey()), says: []string{"does not hold", "principal"},
		},
		{
			name:     "certificate that has expired",
			hostKeys: []ssh.Signer{signHost(t, authority(), edHostKey(), past, testHost)},
			lines:    []string{"@cert-authority " + entry("*", authority())},
			kind:     BadCertificate, fingerprint: fp(edHostKey()), says: []string{"expired"},
		},
		{
			name:     "certificate on a revoked key",
			hostKeys: []ssh.Signer{signHost(t, authority(), edHostKey(), soon, testHost)},
			lines:    []string{"@cert-authority " + entry("*", authority()), "@revoked " + entry("*", edHostKey())},
			kind:     Revoked, fingerprint: fp(edHostKey()),
		},
		{
			name:     "certificate of an authority revoked beside a good one",
			hostKeys: []ssh.Signer{signHost(t, otherKey(), edHostKey(), soon, testHost)},
			lines:    []string{"@cert-authority " + entry("*", authority()), "@cert-authority " + entry("*", otherKey()), "@revoked " + entry("*", otherKey())},
			kind:     Revoked, fingerprint: fp(otherKey()),
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := serverConfig()
				if test.hostKeys != nil {
					server.HostKeys = test.hostKeys
				}
				cfg := clientConfig(t, newServer(t, server))
				cfg.Port = test.port
				cfg.KnownHostsFiles = []string{knownHosts(t, test.lines...)}
				if test.noFile {
					cfg.KnownHostsFiles = nil
				}
				start := time.Now()
				_, err := Dial(t.Context(), cfg)
				var got *HostKeyError
				if !errors.As(err, &got) {
					t.Fatalf("error = %v, want a *HostKeyError", err)
				}
				if got.Kind != test.kind || got.Fingerprint != test.fingerprint {
					t.Errorf("kind %d, fingerprint %q, want %d and %q: %v", got.Kind, got.Fingerprint, test.kind, test.fingerprint, err)
				}
				lookupKey := testHost
				if test.lookupKey != "" {
					lookupKey = test.lookupKey
				}
				if got.LookupKey != lookupKey {
					t.Errorf("look-up key %q, want %q", got.LookupKey, lookupKey)
				}
				wantText(t, err, test.says...)
				wantText(t, err, lookupKey, test.fingerprint)
				if !test.noFile && test.kind != BadCertificate && len(test.lines) > 0 {
					wantText(t, err, cfg.KnownHostsFiles[0])
				}
				if took := time.Since(start); took != 0 {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

func TestDial_UnusableKnownHostsIsAMaterialError(t *testing.T) {
	tests := []struct {
		name string
		make func(t *testing.T) string
		is   error
	}{
		{"missing", func(t *testing.T) string { t.Helper(); return t.TempDir() + "/none" }, os.ErrNotExist},
		{"directory", func(t *testing.T) string { t.Helper(); return t.TempDir() }, nil},
		{"garbage", func(t *testing.T) string {
			t.Helper()
			return writeFile(t, "known_hosts", []byte("\x00\x01garbage\xff\n"))
		}, nil},
		{"private key", func(t *testing.T) string { t.Helper(); return writeKey(t, userKey()) }, nil},
		{"endless line", func(t *testing.T) string { t.Helper(); return writeFile(t, "known_hosts", make([]byte, 1<<20)) }, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := clientConfig(t, newServer(t, serverConfig()))
				bad := test.make(t)
				cfg.KnownHostsFiles = append(cfg.KnownHostsFiles, bad)
				_, err := Dial(t.Context(), cfg)
				var material *MaterialError
				if !errors.As(err, &material) || material.Path != bad {
					t.Fatalf("error = %v, want a *MaterialError for %q", err, bad)
				}
				if test.is != nil && !errors.Is(err, test.is) {
					t.Errorf("error = %v, want %v", err, test.is)
				}
				wantText(t, err, "known_hosts", bad)
			})
		})
	}
}

func TestLoadHostKeys_OffersOnlyKnownAlgorithms(t *testing.T) {
	rsa := []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	tests := []struct {
		name  string
		lines []string
		want  []string
	}{
		{"nothing known", nil, plainAlgorithms},
		{"ed25519", []string{entry(testHost, edHostKey())}, []string{ssh.KeyAlgoED25519}},
		{"RSA", []string{entry(testHost, rsaHostKey())}, rsa},
		{"RSA and ECDSA", []string{entry(testHost, rsaHostKey()), entry(testHost, ecHostKey())}, append([]string{ssh.KeyAlgoECDSA256}, rsa...)},
		{"another host's", []string{entry(testHost, edHostKey()), entry("other.example", rsaHostKey())}, []string{ssh.KeyAlgoED25519}},
		{"another port's", []string{entry(testHost, edHostKey()), entry("["+testHost+"]:2222", rsaHostKey())}, []string{ssh.KeyAlgoED25519}},
		{"authority", []string{"@cert-authority " + entry("*", authority())}, certAlgorithms},
		{"authority of others", []string{"@cert-authority " + entry("*.test", authority()), entry(testHost, edHostKey())}, []string{ssh.KeyAlgoED25519}},
		{"authority and RSA", []string{entry(testHost, rsaHostKey()), "@cert-authority " + entry("*", authority())}, append(append([]string{}, certAlgorithms...), rsa...)},
		{"revoked only", []string{"@revoked " + entry("*", edHostKey())}, plainAlgorithms},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			hosts, err := loadHostKeys([]string{knownHosts(t, test.lines...)}, testHost, 22)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, hosts.algorithms); diff != "" {
				t.Errorf("algorithms (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzLoadHostKeys reads any known_hosts file, for any host, and wants a key
// that is not in it refused.
func FuzzLoadHostKeys(f *testing.F) {
	f.Add([]byte(entry(testHost, edHostKey())), testHost, 22)
	f.Add([]byte("@cert-authority "+entry("*", authority())), testHost, 22)
	f.Add([]byte("@revoked "+entry("*", edHostKey())+"\n"+entry("[2001:db8::7]:2222", edHostKey())), "2001:db8::7", 2222)
	f.Add([]byte(entry(knownhosts.HashHostname(testHost), ecHostKey())), testHost, 22)
	f.Add([]byte("|1||| ssh-rsa AAAA"), "[", -1)
	path := f.TempDir() + "/known_hosts"
	stranger := throwAwayKey()
	f.Fuzz(func(t *testing.T, content []byte, host string, port int) {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		hosts, err := loadHostKeys([]string{path}, host, port)
		if err != nil {
			if _, ok := errors.AsType[*MaterialError](err); !ok {
				t.Fatalf("error = %v, want a *MaterialError", err)
			}
			return
		}
		if len(hosts.algorithms) == 0 {
			t.Error("no algorithm to offer")
		}
		if _, ok := errors.AsType[*HostKeyError](hosts.verify("", nil, stranger)); !ok {
			t.Error("a key that is not in the file is not refused")
		}
	})
}
