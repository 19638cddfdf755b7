//go:build integration

package kvm2_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/sshtest"
	"github.com/kvm2/kvm2/internal/testhost"
)

// sshd is an OpenSSH server of a test's own, which lets root in with one key.
type sshd struct {
	port                            int
	keyFile, knownHostsFile, config string
	cmd                             *exec.Cmd // nil while it is stopped
	log                             bytes.Buffer
}

// startSSHD runs a server that ends with the test. Its configuration gets the lines.
func startSSHD(t *testing.T, lines ...string) *sshd {
	t.Helper()
	dir := t.TempDir()
	host, user := newKeyFile(t, filepath.Join(dir, "host")), newKeyFile(t, filepath.Join(dir, "user"))
	s := &sshd{port: freePort(t), keyFile: filepath.Join(dir, "user"), knownHostsFile: filepath.Join(dir, "known_hosts"), config: filepath.Join(dir, "sshd_config")}
	authorized := filepath.Join(dir, "authorized_keys")
	writeFiles(t, map[string]string{
		authorized:       string(ssh.MarshalAuthorizedKey(user.PublicKey())),
		s.knownHostsFile: fmt.Sprintf("[127.0.0.1]:%d %s", s.port, ssh.MarshalAuthorizedKey(host.PublicKey())),
		s.config: strings.Join(append([]string{
			fmt.Sprintf("ListenAddress 127.0.0.1:%d", s.port), "HostKey " + filepath.Join(dir, "host"), "AuthorizedKeysFile " + authorized,
			"PidFile none", "StrictModes no", "UsePAM no", "PermitRootLogin prohibit-password", "PasswordAuthentication no", "UseDNS no",
		}, lines...), "\n") + "\n",
	})
	t.Cleanup(func() {
		if s.cmd != nil {
			_ = s.cmd.Process.Signal(syscall.SIGTERM)
			_ = s.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("sshd:\n%s", s.log.String())
		}
	})
	s.start(t)
	return s
}

// start runs a server that is stopped.
func (s *sshd) start(t *testing.T) {
	t.Helper()
	cmd := exec.Command("/usr/sbin/sshd", "-D", "-e", "-f", s.config)
	cmd.Stderr = &s.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.cmd = cmd
	poll(t, 20*time.Second, func() bool {
		conn, err := net.Dial("tcp", s.addr())
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}

func (s *sshd) addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

func (s *sshd) uri(params string) string {
	return fmt.Sprintf("qemu+ssh://root@%s/system?keyfile=%s&known_hosts=%s%s", s.addr(), s.keyFile, s.knownHostsFile, params)
}

func newKeyFile(t *testing.T, path string) *sshtest.Key {
	t.Helper()
	key, err := sshtest.NewKey(ssh.KeyAlgoED25519)
	if err != nil {
		t.Fatal(err)
	}
	content, err := key.PEM("")
	if err != nil {
		t.Fatal(err)
	}
	writeFiles(t, map[string]string{path: string(content)})
	return key
}

func writeFiles(t *testing.T, contents map[string]string) {
	t.Helper()
	for path, content := range contents {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// processes are the commands that a server runs for its clients, by what sshd tells them in SSH_CONNECTION.
func (s *sshd) processes() []string {
	mark := fmt.Appendf(nil, " 127.0.0.1 %d\x00", s.port)
	paths, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is good
	var found []string
	for _, path := range paths {
		environ, err := os.ReadFile(path)
		if err == nil && bytes.Contains(environ, mark) {
			command, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			found = append(found, strings.ReplaceAll(string(command), "\x00", " "))
		}
	}
	return found
}

func TestRealHost_MachineThroughACommandWhereForwardingIsForbidden(t *testing.T) {
	h := testhost.Require(t)
	server := startSSHD(t, "AllowStreamLocalForwarding no")
	for _, tt := range []struct{ name, params, command string }{
		{"unasked", "", "virt-ssh-helper"},
		{"auto", "&proxy=auto", "virt-ssh-helper"},
		{"native", "&proxy=native", "virt-ssh-helper"},
		{"netcat", "&proxy=netcat&netcat=nc.openbsd", "nc.openbsd"},
		{"socket", "&socket=" + h.Socket, "nc "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := realProvider(t, h, server.uri(tt.params), "kvm2-it-proxy-"+tt.name)
			if got, err := p.List(t.Context()); err != nil || len(got) != 0 {
				t.Fatalf("List() = %+v, %v; want none", got, err)
			}
			if commands := server.processes(); len(commands) == 0 || !strings.Contains(strings.Join(commands, "\n"), tt.command) {
				t.Errorf("the server runs %q, want %q", commands, tt.command)
			}
			if tt.name == "unasked" || tt.name == "netcat" {
				m := pollUntilRunning(t, p, realSpec(h, serveImage(t, h.Image).URL, "web-1", "owner-1"))
				pollUntilDeleted(t, p, m.ID)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			poll(t, 20*time.Second, func() bool { return len(server.processes()) == 0 }) // a command that outlived its connection would stay for ever
		})
	}
}

func TestRealHost_NoWayToTheSocketSaysWhy(t *testing.T) {
	testhost.Require(t)
	server := startSSHD(t, "AllowStreamLocalForwarding no")
	tests := []struct {
		name, params string
		class        kvm2.Class
		says         []string
	}{
		{"socket that is not there", "&socket=/absent", kvm2.ClassTransient, []string{"/absent", "none of these is a socket"}},
		{"netcat that is not there", "&proxy=netcat&netcat=/absent/nc", kvm2.ClassPermanent, []string{"/absent/nc", "does not have it"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := checkDial(t, kvm2.Config{URI: server.uri(tt.params)})
			if kvm2.ClassOf(err) != tt.class {
				t.Errorf("class of %v is %s, want %s", err, kvm2.ClassOf(err), tt.class)
			}
			for _, want := range tt.says {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v does not say %q", err, want)
				}
			}
		})
	}
}

// checkDial lists what is on a host, in a scope where nothing is.
func checkDial(t *testing.T, cfg kvm2.Config) ([]kvm2.Machine, error) {
	t.Helper()
	h := testhost.Require(t)
	cfg.Scope, cfg.Pool, cfg.Network, cfg.DomainType = "kvm2-it-ways", h.Pool, h.Network, "qemu"
	p, err := kvm2.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return p.List(ctx)
}

func TestRealHost_ThroughJumpHosts(t *testing.T) {
	h := testhost.Require(t)
	outer, inner := startSSHD(t), startSSHD(t, "AllowStreamLocalForwarding no")
	config := filepath.Join(t.TempDir(), "config")
	entry := func(name string, s *sshd) string {
		return fmt.Sprintf("Host %s\n  HostName 127.0.0.1\n  Port %d\n  User root\n  IdentityFile %s\n  UserKnownHostsFile %s\n", name, s.port, s.keyFile, s.knownHostsFile)
	}
	target := &sshd{port: h.SSHPort, keyFile: h.KeyFile, knownHostsFile: h.KnownHosts}
	writeFiles(t, map[string]string{config: entry("outer", outer) + entry("inner", inner) + entry("kvm1", target) + "  ProxyJump outer,inner\n"})
	cfg := kvm2.Config{URI: "qemu+ssh://kvm1/system", SSH: kvm2.SSHConfig{ConfigFile: config}}
	if got, err := checkDial(t, cfg); err != nil || len(got) != 0 {
		t.Errorf("List() = %+v, %v; want none", got, err)
	}

	writeFiles(t, map[string]string{inner.knownHostsFile: fmt.Sprintf("[127.0.0.1]:%d %s", inner.port, ssh.MarshalAuthorizedKey(newKeyFile(t, filepath.Join(t.TempDir(), "k")).PublicKey()))})
	_, err := checkDial(t, cfg)
	if !errors.Is(err, kvm2.ErrHostKey) || !strings.Contains(err.Error(), fmt.Sprintf("[127.0.0.1]:%d", inner.port)) {
		t.Errorf("with another key of the second jump host: %v, want ErrHostKey that names it", err)
	}

	closed := startSSHD(t, "AllowTcpForwarding no")
	cfg = kvm2.Config{URI: h.SSHURI, SSH: kvm2.SSHConfig{ConfigFile: config, ProxyJump: "closed"}}
	writeFiles(t, map[string]string{config: entry("closed", closed)})
	_, err = checkDial(t, cfg)
	if kvm2.ClassOf(err) != kvm2.ClassPermanent || !strings.Contains(fmt.Sprint(err), closed.addr()) {
		t.Errorf("through a jump host that does not forward: %v, want Permanent and its address", err)
	}
}
