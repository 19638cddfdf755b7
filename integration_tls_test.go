//go:build integration

package kvm2_test

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
	"github.com/kvm2/kvm2/internal/tlstest"
)

// nobody is whom the daemon of these tests runs as. One for the whole machine there is already, and it must be left
// as it is; a user's own daemon listens to the network just as well, and says in the end that it is none for the machine.
const nobody = 65534

// ownDaemon is that answer of libvirt.
const ownDaemon = "unexpected qemu URI path"

// startListeningDaemon runs a user's libvirtd that listens with TLS, and without, until the test ends.
func startListeningDaemon(t *testing.T, authority *tlstest.Authority) (tlsPort, tcpPort int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvm2-libvirtd-") //nolint:usetesting // the way to t.TempDir is closed to another user
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cert, err := authority.Issue("kvm1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err == nil {
		err = authority.Write(dir, "server", cert)
	}
	if err != nil {
		t.Fatal(err)
	}
	tlsPort, tcpPort = freePort(t), freePort(t)
	config := filepath.Join(dir, "libvirtd.conf")
	writeFiles(t, map[string]string{config: fmt.Sprintf(
		"listen_tls = 1\nlisten_tcp = 1\nlisten_addr = \"127.0.0.1\"\ntls_port = \"%d\"\ntcp_port = \"%d\"\nauth_tcp = \"sasl\"\nauth_tls = \"none\"\n"+
			"ca_file = \"%s/cacert.pem\"\ncert_file = \"%s/servercert.pem\"\nkey_file = \"%s/serverkey.pem\"\n"+
			"tls_allowed_dn_list = [\"CN=controller\"]\n",
		tlsPort, tcpPort, dir, dir, dir)})
	for _, path := range []string{"", "libvirtd.conf", "cacert.pem", "servercert.pem", "serverkey.pem"} {
		if err := os.Chown(filepath.Join(dir, path), nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	var log bytes.Buffer
	cmd := exec.Command("libvirtd", "--listen", "--config", config, "--pid-file", filepath.Join(dir, "pid"))
	cmd.Dir, cmd.Stderr = dir, &log
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "XDG_RUNTIME_DIR=" + dir, "XDG_CONFIG_HOME=" + dir, "XDG_CACHE_HOME=" + dir, "XDG_DATA_HOME=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("libvirtd:\n%s", log.String())
		}
	})
	poll(t, 30*time.Second, func() bool {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", tlsPort))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return tlsPort, tcpPort
}

func TestRealHost_DaemonThatListens(t *testing.T) {
	testhost.Require(t)
	authority, err := tlstest.NewAuthority("kvm2 test")
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := tlstest.NewAuthority("other")
	if err != nil {
		t.Fatal(err)
	}
	tlsPort, tcpPort := startListeningDaemon(t, authority)
	client := func(signer, trusted *tlstest.Authority, name string, edit func(*x509.Certificate)) string {
		dir := t.TempDir()
		cert, err := signer.Issue(name, nil, edit)
		if err == nil {
			err = trusted.Write(dir, "client", cert)
		}
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("qemu+tls://127.0.0.1:%d/system?pkipath=%s", tlsPort, dir)
	}
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	tests := []struct {
		name, uri string
		is        error
		says      string
	}{
		{"accepted", client(authority, authority, "controller", nil), nil, ownDaemon},
		{"client of another authority", client(stranger, authority, "controller", nil), kvm2.ErrUnauthorized, "clientcert.pem"},
		{"client of another name", client(authority, authority, "somebody", nil), kvm2.ErrUnauthorized, "clientcert.pem"},
		{"client that has expired", client(authority, authority, "controller", expired), kvm2.ErrUnauthorized, "clientcert.pem"},
		{"daemon of another authority", client(authority, stranger, "controller", nil), kvm2.ErrHostKey, "cacert.pem"},
		{"daemon that wants a password", fmt.Sprintf("qemu+tcp://127.0.0.1:%d/system", tcpPort), kvm2.ErrUnauthorized, "authentication"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := checkDial(t, kvm2.Config{URI: tt.uri})
			if kvm2.ClassOf(err) != kvm2.ClassPermanent || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(fmt.Sprint(err), tt.says) {
				t.Errorf("error %v, want Permanent, %v, and %q", err, tt.is, tt.says)
			}
		})
	}
}
