package kvm2

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvm2/kvm2/internal/sshdial"
)

// libvirtDialer opens sessions with the host that a URI names. Keys and known_hosts are read anew each time.
type libvirtDialer struct {
	uri hostURI
}

// NewDialer returns the Dialer that a Provider uses for Config.URI, to wrap it or to test it. Its errors are as they
// arrive: a Provider gives them their class. The error of NewDialer is of class Permanent, ErrInvalidConfig.
func NewDialer(uri string) (Dialer, error) {
	parsed, err := parseURI(uri)
	if err != nil {
		return nil, permanent(ErrInvalidConfig, "uri: %w", err)
	}
	return &libvirtDialer{uri: parsed}, nil
}

// A frozen peer is noticed after sshKeepalive * sshKeepaliveCount.
const (
	sshKeepalive      = 15 * time.Second
	sshKeepaliveCount = 3
)

// Dial opens a connection and starts a libvirt session on it.
func (d *libvirtDialer) Dial(ctx context.Context) (Conn, error) {
	raw, err := d.connect(ctx)
	if err != nil {
		return nil, err
	}
	return openLibvirt(ctx, raw, d.uri.driver)
}

func (d *libvirtDialer) connect(ctx context.Context) (net.Conn, error) {
	if d.uri.transport == "ssh" {
		return sshdial.Dial(ctx, d.sshConfig())
	}
	return dialUnix(ctx, d.uri.localSockets())
}

func (d *libvirtDialer) sshConfig() sshdial.Config {
	c := sshdial.Config{
		Hop: sshdial.Hop{
			User: d.uri.user, Host: d.uri.host, Port: d.uri.port,
			KeyFiles: d.uri.keyFiles, KnownHostsFiles: d.uri.knownHosts,
		},
		Sockets:           d.uri.sockets,
		KeepaliveInterval: sshKeepalive, KeepaliveCount: sshKeepaliveCount,
	}
	if len(c.Sockets) == 0 {
		c.Sockets = systemSockets
	}
	if len(c.KnownHostsFiles) == 0 {
		c.KnownHostsFiles = []string{filepath.Join(homeDir(), ".ssh", "known_hosts")}
	}
	if len(c.KeyFiles) == 0 {
		c.AgentSocket = os.Getenv("SSH_AUTH_SOCK")
	}
	return c
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
