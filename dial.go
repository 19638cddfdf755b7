package kvm2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/crypto/ssh"
)

// libvirtDialer opens sessions with the host that a URI names. Keys and known_hosts are read anew each time.
type libvirtDialer struct {
	uri        hostURI
	ssh        SSHConfig
	passphrase func(ctx context.Context, keyFile string) ([]byte, error)
	signers    func(ctx context.Context) ([]ssh.Signer, error)
	dialTCP    func(ctx context.Context, network, addr string) (net.Conn, error) // nil but in tests
}

// NewDialer returns the Dialer that a Provider uses for cfg and the options, to wrap it or to test it. Its errors are
// as they arrive: a Provider gives them their class. The error of NewDialer is of class Permanent, ErrInvalidConfig.
func NewDialer(cfg Config, opts ...Option) (Dialer, error) {
	e, err := newEndpoint(cfg, opts)
	if err != nil {
		return nil, err
	}
	return e.dialer, nil
}

// Dial opens a connection and starts a libvirt session on it.
func (d *libvirtDialer) Dial(ctx context.Context) (Conn, error) {
	raw, err := d.connect(ctx)
	if err != nil {
		return nil, err
	}
	c, err := openLibvirt(ctx, raw, d.uri.driver)
	if err != nil {
		return nil, err // and not a Conn that holds no connection
	}
	return c, nil
}

func (d *libvirtDialer) connect(ctx context.Context) (net.Conn, error) {
	switch d.uri.transport {
	case "ssh":
		return d.connectSSH(ctx)
	case "tls":
		return d.connectTLS(ctx)
	case "tcp":
		return dialTCP(ctx, "tcp", net.JoinHostPort(d.uri.host, strconv.Itoa(cmp.Or(d.uri.port, libvirtTCPPort))))
	default:
		return dialUnix(ctx, d.uri.localSockets())
	}
}

// dialUnix connects to the first socket that accepts.
func dialUnix(ctx context.Context, sockets []string) (net.Conn, error) {
	var errs []error
	for _, path := range sockets {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("no libvirt daemon answers: %w", errors.Join(errs...))
}

func (h hostURI) isSystem() bool { return h.driver == "qemu:///system" }

// localSockets are the sockets to try on this machine.
func (h hostURI) localSockets() []string {
	if len(h.sockets) > 0 {
		return h.sockets
	}
	if h.isSystem() {
		return systemSockets
	}
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = filepath.Join("/run/user", strconv.Itoa(os.Getuid()))
	}
	return []string{filepath.Join(dir, "libvirt", "libvirt-sock"), filepath.Join(dir, "libvirt", "virtqemud-sock")}
}

func homeDir() string {
	dir, err := os.UserHomeDir()
	if err != nil {
		return "/" // known_hosts is then not found, and the error names where it was looked for
	}
	return dir
}
