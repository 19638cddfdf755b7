package kvm2

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	libvirt "github.com/digitalocean/go-libvirt"

	"github.com/kvm2/kvm2/internal/tlsdial"
	"github.com/kvm2/kvm2/internal/tlstest"
)

// answerCalls is a small libvirt daemon: it answers the calls that open a session, each with the payload of its
// procedure, or with an error of a code where that is set for it.
func answerCalls(conn io.ReadWriter, fails map[uint32]uint32) {
	for {
		head := make([]byte, 28) // length, program, version, procedure, type, serial, status
		if _, err := io.ReadFull(conn, head); err != nil {
			return
		}
		if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head)-28)); err != nil {
			return
		}
		if binary.BigEndian.Uint32(head[16:]) != 0 { // part of a stream
			continue
		}
		procedure := binary.BigEndian.Uint32(head[12:])
		var payload []byte
		if procedure == procAuthList {
			payload = binary.BigEndian.AppendUint32(payload, 1) // one way to authenticate
			payload = binary.BigEndian.AppendUint32(payload, 0) // which is none
		}
		code, failing := fails[procedure]
		if failing {
			payload = errorPayload(code)
			binary.BigEndian.PutUint32(head[24:], 1)
		}
		binary.BigEndian.PutUint32(head, uint32(28+len(payload)))
		binary.BigEndian.PutUint32(head[16:], 1) // a reply
		if _, err := conn.Write(append(head, payload...)); err != nil {
			return
		}
	}
}

// Procedures of the remote protocol (src/remote/remote_protocol.x).
const (
	procConnectOpen = 1
	procAuthList    = 66
)

// errorPayload is a virNetMessageError with a code and the message "as told".
func errorPayload(code uint32) []byte {
	p := binary.BigEndian.AppendUint32(nil, code)
	p = binary.BigEndian.AppendUint32(p, 7)                       // domain: RPC
	p = binary.BigEndian.AppendUint32(p, 1)                       // a message follows
	p = append(binary.BigEndian.AppendUint32(p, 7), "as told"...) // and is padded to 8
	p = append(p, 0)
	p = binary.BigEndian.AppendUint32(p, 2) // level: error
	return append(p, make([]byte, 4*7)...)  // no domain, str1, str2, str3, int1, int2, network
}

// tlsHost is such a daemon behind TLS, and a client's directory.
type tlsHost struct {
	authority *tlstest.Authority
	dir       string
	port      int
}

func startTLSHost(t testing.TB, admit bool, fails map[uint32]uint32) *tlsHost {
	t.Helper()
	authority, err := tlstest.NewAuthority("kvm2 test")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := authority.Issue("kvm1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	server, err := tlstest.Start(func(conn net.Conn) {
		c := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12})
		if c.Handshake() != nil || !admit {
			return
		}
		_, _ = c.Write([]byte{1})
		answerCalls(c, fails)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	h := &tlsHost{authority: authority, dir: t.TempDir(), port: server.Port()}
	h.issue(t, authority)
	return h
}

// issue gives the client a certificate and the authority's.
func (h *tlsHost) issue(t testing.TB, authority *tlstest.Authority) {
	t.Helper()
	cert, err := authority.Issue("controller", nil, nil)
	if err == nil {
		err = authority.Write(h.dir, "client", cert)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (h *tlsHost) uri() string {
	return fmt.Sprintf("qemu+tls://127.0.0.1:%d/system?pkipath=%s", h.port, h.dir)
}

func TestDial_TLSOpensASession(t *testing.T) {
	if err := openWith(t, Config{URI: startTLSHost(t, true, nil).uri()}); err != nil {
		t.Error(err)
	}
}

func TestDial_TLSFailuresHaveTheirClass(t *testing.T) {
	other, err := tlstest.NewAuthority("other")
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		admit bool
		fails map[uint32]uint32
		edit  func(testing.TB, *tlsHost)
		class Class
		is    error
		step  CheckName
		says  string
	}{
		{name: "daemon that is not trusted", admit: true, edit: func(t testing.TB, h *tlsHost) { h.issue(t, other) }, class: ClassPermanent, is: ErrHostKey, step: CheckHostKey, says: "cacert.pem"},
		{name: "client that is refused", class: ClassPermanent, is: ErrUnauthorized, step: CheckAuthentication, says: "clientcert.pem"},
		{
			name: "no certificate", edit: func(t testing.TB, h *tlsHost) {
				if err := os.Remove(filepath.Join(h.dir, "clientcert.pem")); err != nil {
					t.Error(err)
				}
			},
			class: ClassPermanent, step: CheckAuthentication, says: "clientcert.pem",
		},
		{
			name: "SASL on top", admit: true, fails: map[uint32]uint32{procConnectOpen: uint32(libvirt.ErrAuthFailed)},
			class: ClassPermanent, is: ErrUnauthorized, step: CheckAuthentication, says: "as told",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := startTLSHost(t, tt.admit, tt.fails)
			if tt.edit != nil {
				tt.edit(t, h)
			}
			err := openWith(t, Config{URI: h.uri()})
			wantDialError(t, err, tt.class, tt.is)
			if err == nil || failedStep(err) != tt.step || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("error %v (step %q), want step %q and %q", err, failedStep(err), tt.step, tt.says)
			}
		})
	}
	h := startTLSHost(t, true, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.port = l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	wantDialError(t, openWith(t, Config{URI: h.uri()}), ClassTransient, nil) // nobody listens there
}

func TestDial_TCPOpensASessionOnTheLoopback(t *testing.T) {
	for _, tt := range []struct {
		fails map[uint32]uint32
		want  error
	}{
		{nil, nil},
		{map[uint32]uint32{procConnectOpen: uint32(libvirt.ErrAuthFailed)}, ErrUnauthorized}, // as it is with auth_tcp = "sasl"
	} {
		server, err := tlstest.Start(func(conn net.Conn) { answerCalls(conn, tt.fails) })
		if err != nil {
			t.Fatal(err)
		}
		err = openWith(t, Config{URI: "qemu+tcp://127.0.0.1:" + strconv.Itoa(server.Port()) + "/system"})
		server.Close()
		if tt.want == nil && err != nil {
			t.Error(err)
		}
		if tt.want != nil {
			wantDialError(t, err, ClassPermanent, tt.want)
		}
	}
}

func TestHostURI_PKILocations(t *testing.T) {
	got := hostURI{pkiPath: "/pki"}.pkiLocations()
	if len(got) != 1 || got[0] != tlsdial.Directory("/pki") {
		t.Errorf("with pkipath: %+v", got)
	}
	got = hostURI{}.pkiLocations()
	if got[len(got)-1] != tlsdial.System() || (os.Geteuid() == 0) != (len(got) == 1) {
		t.Errorf("without: %+v; root has no directory of its own there", got)
	}
}
