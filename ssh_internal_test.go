package kvm2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/kvm2/kvm2/internal/sshdial"
	"github.com/kvm2/kvm2/internal/sshtest"
)

// openWith dials as a Provider does that has the options.
func openWith(t testing.TB, cfg Config, opts ...Option) error {
	t.Helper()
	cfg.Scope, cfg.Host, cfg.CallTimeout = "prod", "kvm-1", Duration(generous)
	e, err := newEndpoint(cfg, append(opts, WithLogger(slog.New(slog.DiscardHandler))))
	if err != nil {
		t.Fatal(err)
	}
	s, err := e.dial.open(t.Context())
	if err == nil {
		_ = s.Close()
	}
	return err
}

// hopsOf are the servers on the way to the host of a URI.
func hopsOf(t testing.TB, uri string, d libvirtDialer) ([]sshdial.Hop, error) {
	t.Helper()
	var err error
	if d.uri, err = parseURI(uri); err != nil {
		t.Fatal(err)
	}
	return (&sshWay{libvirtDialer: &d, home: "/home/op"}).hops()
}

func TestSSHWay_URIThenFileThenDefault(t *testing.T) {
	t.Setenv("SSH_AUTH_SOCK", "/agent")
	const file = `
Host kvm1
  HostName 192.0.2.7
  User op
  Port 2222
  IdentityFile ~/.ssh/%r
  UserKnownHostsFile /hosts
Host via
  ProxyJump me@outer:7,inner
Host bare
  IdentityFile none
  IdentityAgent none
  UserKnownHostsFile none
Host ownagent
  IdentityAgent /own
Host outer
  HostName outer.example
  ProxyJump first
Host inner
  User in
  IdentityFile /inner
  UserKnownHostsFile /innerhosts
Host nokey
  IdentityFile none
  IdentityAgent SSH_AUTH_SOCK
`
	known := []string{"/home/op/.ssh/known_hosts"}
	signers := func(context.Context) ([]ssh.Signer, error) { return nil, nil }
	tests := []struct {
		name, uri string
		dialer    libvirtDialer
		noFile    bool
		want      []sshdial.Hop
		why       string
	}{
		{
			name: "defaults", uri: "qemu+ssh://kvm1/system", noFile: true,
			want: []sshdial.Hop{{User: "root", Host: "kvm1", AgentSocket: "/agent", KnownHostsFiles: known}},
		},
		{
			name: "URI", uri: "qemu+ssh://u@kvm1:23/system?keyfile=/k&known_hosts=/h",
			want: []sshdial.Hop{{User: "u", Host: "192.0.2.7", Port: 23, KeyFiles: []string{"/k"}, KnownHostsFiles: []string{"/h"}}},
			why:  "what the URI says wins; it cannot say a HostName",
		},
		{
			name: "file", uri: "qemu+ssh://kvm1/system",
			want: []sshdial.Hop{{User: "op", Host: "192.0.2.7", Port: 2222, KeyFiles: []string{"/home/op/.ssh/op"}, KnownHostsFiles: []string{"/hosts"}}},
		},
		{
			name: "nothing at all", uri: "qemu+ssh://bare/system",
			want: []sshdial.Hop{{User: "root", Host: "bare"}},
		},
		{
			name: "agent of the file", uri: "qemu+ssh://ownagent/system",
			want: []sshdial.Hop{{User: "root", Host: "ownagent", AgentSocket: "/own", KnownHostsFiles: known}},
		},
		{
			name: "signers", uri: "qemu+ssh://kvm1/system", noFile: true, dialer: libvirtDialer{signers: signers},
			want: []sshdial.Hop{{User: "root", Host: "kvm1", KnownHostsFiles: known}}, why: "no agent beside them",
		},
		{
			name: "jump hosts of the file", uri: "qemu+ssh://via/system?keyfile=/k",
			want: []sshdial.Hop{
				{User: "root", Host: "first", KeyFiles: []string{"/k"}, KnownHostsFiles: known},
				{User: "me", Host: "outer.example", Port: 7, KeyFiles: []string{"/k"}, KnownHostsFiles: known},
				{User: "in", Host: "inner", KeyFiles: []string{"/inner"}, KnownHostsFiles: []string{"/innerhosts"}},
				{User: "root", Host: "via", KeyFiles: []string{"/k"}, KnownHostsFiles: known},
			},
			why: "the first has a jump host of its own",
		},
		{
			name: "jump hosts of the Config", uri: "qemu+ssh://u@via/system?keyfile=/k&known_hosts=/h", noFile: true,
			dialer: libvirtDialer{ssh: SSHConfig{ProxyJump: "a, op@b:23"}},
			want: []sshdial.Hop{
				{User: "u", Host: "a", KeyFiles: []string{"/k"}, KnownHostsFiles: []string{"/h"}},
				{User: "op", Host: "b", Port: 23, KeyFiles: []string{"/k"}, KnownHostsFiles: []string{"/h"}},
				{User: "u", Host: "via", KeyFiles: []string{"/k"}, KnownHostsFiles: []string{"/h"}},
			},
		},
		{
			name: "no jump host after all", uri: "qemu+ssh://via/system?keyfile=/k", dialer: libvirtDialer{ssh: SSHConfig{ProxyJump: "none"}},
			want: []sshdial.Hop{{User: "root", Host: "via", KeyFiles: []string{"/k"}, KnownHostsFiles: known}},
		},
		{
			name: "jump host without the host's key", uri: "qemu+ssh://kvm2/system?keyfile=/k", dialer: libvirtDialer{ssh: SSHConfig{ProxyJump: "nokey"}},
			want: []sshdial.Hop{
				{User: "root", Host: "nokey", AgentSocket: "/agent", KnownHostsFiles: known},
				{User: "root", Host: "kvm2", KeyFiles: []string{"/k"}, KnownHostsFiles: known},
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.noFile {
				tt.dialer.ssh.ConfigFile = writeTestFile(t, "config", []byte(file))
			}
			got, err := hopsOf(t, tt.uri, tt.dialer)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("servers differ (-want +got):\n%s%s", diff, tt.why)
			}
		})
	}
}

func TestSSHWay_UnusableFileIsPermanentAndNamed(t *testing.T) {
	tests := []struct{ name, content, says string }{
		{"ProxyCommand", "Host host\n  ProxyCommand nc %h %p\n", "config:2: \"proxycommand\""},
		{"Match", "Match user root\n", "config:1: "},
		{"circle", "Host host\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n", "without an end"},
		{"fault that concerns a jump host only", "Host host\n ProxyJump a\nHost a\n Ciphers x\n", "config:4: "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := writeTestFile(t, "config", []byte(tt.content))
			err := openWith(t, Config{URI: "qemu+ssh://host/system", SSH: SSHConfig{ConfigFile: path}})
			wantDialError(t, err, ClassPermanent, nil)
			if err == nil || !strings.Contains(err.Error(), tt.says) || failedStep(err) != CheckDial {
				t.Errorf("error %v (step %q), want one that says %q", err, failedStep(err), tt.says)
			}
		})
	}
	absent := filepath.Join(t.TempDir(), "absent")
	err := openWith(t, Config{URI: "qemu+ssh://host/system", SSH: SSHConfig{ConfigFile: absent}})
	wantDialError(t, err, ClassPermanent, nil)
	if !strings.Contains(err.Error(), absent) {
		t.Errorf("error %q does not name the file", err)
	}
}

// configFileFor writes a configuration file with which the host "kvm1" is h, reached through the servers of jumps.
func configFileFor(t testing.TB, h *sshHost, jumps map[string]*sshHost, list string) string {
	t.Helper()
	var b strings.Builder
	entry := func(name string, h *sshHost) {
		fmt.Fprintf(&b, "Host %s\n  HostName %s\n  Port %d\n  User operator\n  IdentityFile %q\n  UserKnownHostsFile %q\n  StrictHostKeyChecking no\n",
			name, h.server.Host(), h.server.Port(), h.keyFile, h.knownHostsFile)
	}
	for name, jump := range jumps {
		entry(name, jump)
	}
	entry("kvm1", h)
	if list != "" {
		fmt.Fprintf(&b, "  ProxyJump %s\n", list)
	}
	return writeTestFile(t, "config", []byte(b.String()))
}

// forwardsTo makes a server a jump host to h alone.
func forwardsTo(h *sshHost) func(*sshtest.Config) {
	return func(c *sshtest.Config) {
		c.ConnectTCP = func(addr string) (net.Conn, error) {
			if addr != h.server.Addr() {
				return nil, os.ErrNotExist
			}
			return net.Dial("tcp", addr)
		}
	}
}

func TestDial_ThroughJumpHostsOfTheConfigurationFile(t *testing.T) {
	socket := listenUnix(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	h := startSSHHost(t, func(c *sshtest.Config) {
		c.Connect = func(string) (net.Conn, error) { return net.Dial("unix", socket) }
	})
	inner := startSSHHost(t, forwardsTo(h))
	outer := startSSHHost(t, forwardsTo(inner))
	jumps := map[string]*sshHost{"outer": outer, "inner": inner}
	cfg := Config{URI: "qemu+ssh://kvm1/system?socket=/run/libvirt/libvirt-sock", SSH: SSHConfig{ConfigFile: configFileFor(t, h, jumps, "outer,inner")}}

	err := openWith(t, cfg)
	wantDialError(t, err, ClassTransient, nil) // it has come to the socket, where nobody speaks libvirt's protocol
	if err == nil || !strings.Contains(err.Error(), "libvirt connection") {
		t.Errorf("error %v, want one behind the connection", err)
	}

	inner.knownHostsFile = inner.knows(t, newSSHKey(t))
	before := h.server.Auths()
	cfg.SSH.ConfigFile = configFileFor(t, h, jumps, "outer,inner")
	err = openWith(t, cfg)
	wantDialError(t, err, ClassPermanent, ErrHostKey)
	if !strings.Contains(err.Error(), inner.knownHostsFile) || !strings.Contains(err.Error(), strconv.Itoa(inner.server.Port())) {
		t.Errorf("error %q does not name the file and the jump host", err)
	}
	if got := h.server.Auths(); got != before {
		t.Errorf("the host behind it was offered credentials %d times", got-before)
	}

	inner.knownHostsFile = inner.knows(t, inner.hostKey)
	cfg.SSH.ConfigFile = configFileFor(t, h, jumps, "inner")
	other := startSSHHost(t, func(*sshtest.Config) {}) // which forwards nothing
	jumps["inner"] = other
	cfg.SSH.ConfigFile = configFileFor(t, h, jumps, "inner")
	err = openWith(t, cfg)
	wantDialError(t, err, ClassPermanent, nil)
	if !strings.Contains(err.Error(), other.server.Addr()) || failedStep(err) != CheckDial {
		t.Errorf("error %q (step %q) does not name the jump host that forbids it", err, failedStep(err))
	}
}

func TestDial_ConfigurationFileIsReadAtEachDial(t *testing.T) {
	h := startSSHHost(t, func(*sshtest.Config) {})
	good := configFileFor(t, h, nil, "")
	h.keyFile = writeKeyFile(t, newSSHKey(t), "")
	path := configFileFor(t, h, nil, "")
	d, err := NewDialer(Config{URI: "qemu+ssh://kvm1/system", Scope: "prod", SSH: SSHConfig{ConfigFile: path}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Dial(t.Context())
	wantIs(t, classify(OpDial, "kvm-1", err), ErrUnauthorized)
	if err := os.Rename(good, path); err != nil {
		t.Fatal(err)
	}
	_, err = d.Dial(t.Context())
	if err == nil || classify(OpDial, "kvm-1", err).(*Error).Class != ClassTransient { //nolint:errorlint // classify made it
		t.Errorf("Dial = %v, want it to be let in, where there is no socket", err)
	}
}

func TestDial_OptionsGiveKeysAndPassphrases(t *testing.T) {
	const passphrase = "hunter2hunter2"
	var failure error
	asked := ""
	withPassphrase := func(text string) Option {
		return WithSSHPassphrase(func(_ context.Context, keyFile string) ([]byte, error) {
			asked = keyFile
			return []byte(text), failure
		})
	}
	withSigners := func(keys ...ssh.Signer) Option {
		return WithSSHSigners(func(context.Context) ([]ssh.Signer, error) { return keys, failure })
	}
	h := startSSHHost(t, func(*sshtest.Config) {})
	h.keyFile = writeKeyFile(t, h.userKey, passphrase)
	withoutKey := Config{URI: fmt.Sprintf("qemu+ssh://operator@%s/system?known_hosts=%s", h.server.Addr(), h.knownHostsFile)}
	t.Setenv("SSH_AUTH_SOCK", "/absent") // which would be an error if it were asked

	// Who is let in finds that there is no socket.
	wantDialError(t, openWith(t, Config{URI: h.uri()}, withPassphrase(passphrase)), ClassTransient, nil)
	if asked != h.keyFile {
		t.Errorf("asked for the passphrase of %q, want %q", asked, h.keyFile)
	}
	wantDialError(t, openWith(t, withoutKey, withSigners(h.userKey)), ClassTransient, nil)

	err := openWith(t, Config{URI: h.uri()}, withPassphrase("other"+passphrase))
	wantDialError(t, err, ClassPermanent, nil)
	if strings.Contains(err.Error(), passphrase) || failedStep(err) != CheckAuthentication {
		t.Errorf("wrong passphrase: %v", err)
	}
	wantDialError(t, openWith(t, withoutKey, withSigners(newSSHKey(t))), ClassPermanent, ErrUnauthorized)
	wantDialError(t, openWith(t, withoutKey, withSigners()), ClassPermanent, ErrUnauthorized)

	failure = errors.New("the vault is sealed")
	for _, err := range []error{openWith(t, Config{URI: h.uri()}, withPassphrase("")), openWith(t, withoutKey, withSigners())} {
		wantDialError(t, err, ClassTransient, failure)
		if failedStep(err) != CheckAuthentication {
			t.Errorf("%v is of step %q", err, failedStep(err))
		}
	}
	failure = &Error{Class: ClassPermanent, Err: errors.New("there is no such key in the vault")}
	wantDialError(t, openWith(t, withoutKey, withSigners()), ClassPermanent, failure)
}

func TestDial_CommandsWhereSocketsAreRefused(t *testing.T) {
	const helper = "exec virt-ssh-helper"
	exec := func(status int, stderr string) func(*sshtest.Config) {
		return func(c *sshtest.Config) {
			c.Reject = func(string) *ssh.OpenChannelError { return &ssh.OpenChannelError{Reason: ssh.Prohibited} }
			c.Exec = func(command string, in io.Reader, out, errs io.Writer) int {
				if status != 127 {
					_, _ = io.WriteString(out, "kvm2-connected\n")
					_, _ = in.Read(make([]byte, 1))
				}
				_, _ = io.WriteString(errs, stderr)
				if strings.Contains(command, helper) {
					_, _ = io.WriteString(errs, " helper")
				}
				return status
			}
		}
	}
	tests := []struct {
		name, params string
		server       func(*sshtest.Config)
		class        Class
		step         CheckName
		says         []string
		silentOn     string
	}{
		{
			name: "nothing is there", server: exec(127, ""), class: ClassPermanent, step: CheckDaemon,
			says: []string{"AllowStreamLocalForwarding", `"virt-ssh-helper"`, `"nc"`},
		},
		{
			name: "sessions and forwarding are refused", server: func(c *sshtest.Config) { exec(127, "")(c); c.Exec = nil }, class: ClassPermanent, step: CheckDaemon,
			says: []string{"AllowStreamLocalForwarding", "unknown channel type"},
		},
		{
			name: "helper finds no daemon", server: exec(1, "cannot connect to the socket"), class: ClassTransient, step: CheckDaemon,
			says: []string{"virt-ssh-helper", "cannot connect to the socket helper"},
		},
		{name: "native", params: "?proxy=native", server: exec(127, ""), class: ClassPermanent, step: CheckDaemon, says: []string{"virt-ssh-helper"}, silentOn: `"nc"`},
		{name: "netcat", params: "?proxy=netcat&netcat=/opt/nc", server: exec(127, ""), class: ClassPermanent, step: CheckDaemon, says: []string{`"/opt/nc"`}, silentOn: "virt-ssh-helper"},
		{name: "auto", params: "?proxy=auto", server: exec(127, ""), class: ClassPermanent, step: CheckDaemon, says: []string{"virt-ssh-helper", `"nc"`}, silentOn: "AllowStreamLocalForwarding"},
		{name: "socket that is named", params: "?socket=/s", server: exec(127, ""), class: ClassPermanent, step: CheckDaemon, says: []string{`"/s"`, `"nc"`}, silentOn: "virt-ssh-helper"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := startSSHHost(t, tt.server)
			path := configFileFor(t, h, nil, "")
			err := openWith(t, Config{URI: "qemu+ssh://kvm1/system" + tt.params, SSH: SSHConfig{ConfigFile: path}})
			wantDialError(t, err, tt.class, nil)
			if got := failedStep(err); got != tt.step {
				t.Errorf("it failed at %q, want %q", got, tt.step)
			}
			for _, want := range tt.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if tt.silentOn != "" && strings.Contains(err.Error(), tt.silentOn) {
				t.Errorf("error %q speaks of %q", err, tt.silentOn)
			}
		})
	}
}

func TestClassify_OfSeveralWaysOneMayOpenLater(t *testing.T) {
	never := &sshdial.ForwardError{Reason: ssh.Prohibited}
	later := &sshdial.ForwardError{Reason: ssh.ConnectionFailed}
	missing := &sshdial.CommandError{Command: "nc", Status: 127}
	failed := &sshdial.CommandError{Command: "nc", Status: 1}
	for _, tt := range []struct {
		errs []error
		want Class
	}{
		{[]error{never, missing, missing}, ClassPermanent},
		{[]error{later, missing}, ClassTransient},
		{[]error{never, failed}, ClassTransient},
		{[]error{never, missing, failed}, ClassTransient},
	} {
		err := classify(OpDial, "kvm-1", fmt.Errorf("dial: %w", &sshdial.NoWayError{Errs: tt.errs}))
		if got := ClassOf(err); got != tt.want {
			t.Errorf("class of %v is %s, want %s", err, got, tt.want)
		}
	}
}

func TestCheck_TakesTheOptionsOfTheDialer(t *testing.T) {
	h := startSSHHost(t, func(*sshtest.Config) {})
	asked := false
	c, err := NewChecker(
		Config{URI: fmt.Sprintf("qemu+ssh://operator@%s/system?known_hosts=%s", h.server.Addr(), h.knownHostsFile), Scope: "prod"},
		WithSSHSigners(func(ctx context.Context) ([]ssh.Signer, error) {
			_, asked = ctx.Deadline()
			return []ssh.Signer{h.userKey}, nil
		}),
	)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r := c.Check(ctx)
	for _, result := range r.Results {
		if result.Name == CheckAuthentication && result.Status != CheckPassed {
			t.Errorf("%s: %s, %v", result.Name, result.Status, result.Err)
		}
	}
	if !asked {
		t.Error("the signers were not asked for, or without a deadline")
	}
}

// silence is after how long a frozen peer is noticed at the latest.
const silence = (sshKeepaliveCount + 1) * sshKeepalive

func TestSession_HostThatFreezesEndsWhatWaits(t *testing.T) {
	h := startSSHHost(t, func(*sshtest.Config) {}) // for its keys; those of the bubble are made outside, as making them takes real time
	uri, err := parseURI(fmt.Sprintf("qemu+ssh://operator@kvm-1/system?keyfile=%s&known_hosts=%s", h.keyFile,
		writeTestFile(t, "known_hosts", []byte(knownhosts.Line([]string{"kvm-1"}, h.hostKey.PublicKey())+"\n"))))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		wait func(ctx context.Context, conn Conn, freeze func()) error
	}{
		{"in a call", func(ctx context.Context, conn Conn, freeze func()) error {
			freeze()
			return conn.SetDomainMetadata(ctx, UUID{}, "<machine/>")
		}},
		{"in an upload", func(ctx context.Context, conn Conn, freeze func()) error {
			return conn.UploadVolume(ctx, "p", "v", 0, &freezingReader{after: 1 << 20, freeze: freeze})
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := sshtest.New(sshtest.Config{
					HostKeys: []ssh.Signer{h.hostKey}, User: "operator", AuthorizedKeys: []ssh.PublicKey{h.userKey.PublicKey()},
					Connect: func(string) (net.Conn, error) {
						near, far := sshtest.Pipe()
						go func() {
							answerCalls(far, nil)
							_ = far.Close()
						}()
						return near, nil
					},
				})
				defer func() {
					if err := server.Close(); err != nil {
						t.Error(err)
					}
				}()
				conn, err := (&libvirtDialer{uri: uri, dialTCP: server.Dial}).Dial(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				err = tt.wait(t.Context(), conn, server.Freeze) // without a deadline: the keepalive must do it
				frozen, ok := errors.AsType[*sshdial.KeepaliveError](err)
				if !ok || frozen.Silence != sshKeepaliveCount*sshKeepalive || ClassOf(classify(OpVolumeUpload, "kvm-1", err)) != ClassTransient {
					t.Errorf("error %v, want a Transient *KeepaliveError", err)
				}
				if took := time.Since(start); took > silence {
					t.Errorf("it took %v, want at most %v", took, silence)
				}
				_ = conn.Close()
			})
		})
	}
}

// freezingReader is an upload without an end, in which the host freezes.
type freezingReader struct {
	after  int
	freeze func()
}

func (r *freezingReader) Read(p []byte) (int, error) {
	r.after -= len(p)
	if r.after < 0 && r.freeze != nil {
		r.freeze()
		r.freeze = nil
	}
	return len(p), nil
}
