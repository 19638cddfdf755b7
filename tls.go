package kvm2

import (
	"cmp"
	"context"
	"net"
	"os"
	"path/filepath"

	"github.com/kvm2/kvm2/internal/tlsdial"
)

// The ports on which libvirt's daemons listen (https://libvirt.org/remote.html).
const (
	libvirtTLSPort = 16514
	libvirtTCPPort = 16509
)

// dialTCP connects. A frozen peer is noticed as soon as over SSH.
func dialTCP(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: sshKeepalive, Interval: sshKeepalive, Count: sshKeepaliveCount}}
	return d.DialContext(ctx, network, addr)
}

// connectTLS reaches a daemon that listens to the network.
func (d *libvirtDialer) connectTLS(ctx context.Context) (net.Conn, error) {
	return tlsdial.Dial(ctx, tlsdial.Config{
		Host: d.uri.host, Port: cmp.Or(d.uri.port, libvirtTLSPort), Locations: d.uri.pkiLocations(), DialTCP: dialTCP,
	})
}

// pkiLocations are where libvirt's own client looks for certificates: where the URI says, or in the user's directory, and
// for want of that in the machine's.
func (h hostURI) pkiLocations() []tlsdial.Location {
	if h.pkiPath != "" {
		return []tlsdial.Location{tlsdial.Directory(h.pkiPath)}
	}
	if os.Geteuid() == 0 {
		return []tlsdial.Location{tlsdial.System()}
	}
	return []tlsdial.Location{tlsdial.Directory(filepath.Join(homeDir(), ".pki", "libvirt")), tlsdial.System()}
}
