// Package tlsdial opens a connection to a libvirt daemon that listens to the
// network with TLS.
//
// Both sides show certificates. The daemon's must be signed by the certificate
// authority that the client knows, for the name in the URI, and must not be in the
// authority's list of revoked ones, if there is such a list. The daemon judges the
// client's certificate after the handshake, and then sends one byte, '\1'
// (virNetClientSetTLSSession in libvirt's src/rpc/virnetclient.c). All files are
// read again at every [Dial], so a rotation needs no restart.
//
// Failures have types that say what has to change for the next attempt to succeed:
// [MaterialError] (a local file), [ServerError] (the daemon's certificate does not
// hold), [RefusedError] (the daemon does not accept the client's). Everything else
// is an error of the network.
package tlsdial

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Config says where to connect to and with what. All fields are
// required.
type Config struct {
	// Host is a name or an IP address, IPv6 without brackets. The daemon's
	// certificate must be for it.
	Host string
	Port int
	// Locations are where the files may be. The first that has all three is used; if
	// none has, the last one's missing file is reported.
	Locations []Location

	// DialTCP opens the connection that TLS runs over, and must return when its
	// context ends.
	DialTCP func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Location names the files of a client, in the PEM format.
type Location struct {
	// CA are the certificates of the authorities that sign daemons' certificates,
	// RevocationList what they have revoked; that file may be missing.
	CA, RevocationList string
	// Cert and Key are the client's own.
	Cert, Key string
}

// Directory is a location with all files in one directory, under the names that
// libvirt gives them there (https://libvirt.org/kbase/tlscerts.html).
func Directory(dir string) Location {
	return Location{
		CA: filepath.Join(dir, "cacert.pem"), RevocationList: filepath.Join(dir, "cacrl.pem"),
		Cert: filepath.Join(dir, "clientcert.pem"), Key: filepath.Join(dir, "clientkey.pem"),
	}
}

// System is where libvirt keeps the files of a machine.
func System() Location {
	return Location{
		CA: "/etc/pki/CA/cacert.pem", RevocationList: "/etc/pki/CA/cacrl.pem",
		Cert: "/etc/pki/libvirt/clientcert.pem", Key: "/etc/pki/libvirt/private/clientkey.pem",
	}
}

// MaterialError reports a file on this side that cannot be used.
type MaterialError struct {
	Path string
	Err  error
}

// Error implements error.
func (e *MaterialError) Error() string { return fmt.Sprintf("tls: file %q: %v", e.Path, e.Err) }

// Unwrap returns the cause.
func (e *MaterialError) Unwrap() error { return e.Err }

// ServerError reports that the daemon's certificate does not hold.
type ServerError struct {
	Addr string
	// CA is the file of the authorities.
	CA  string
	Err error
}

// Error implements error.
func (e *ServerError) Error() string {
	return fmt.Sprintf("tls: the certificate of %q is not trusted (authorities in %q): %v", e.Addr, e.CA, e.Err)
}

// Unwrap returns the cause.
func (e *ServerError) Unwrap() error { return e.Err }

// RefusedError reports that the daemon does not accept the client's certificate or
// address.
type RefusedError struct {
	Addr string
	// Cert is the file of the client's certificate.
	Cert string
	Err  error
}

// Error implements error.
func (e *RefusedError) Error() string {
	return fmt.Sprintf("tls: %q does not accept the certificate in %q, or this machine's address "+
		"(tls_allowed_dn_list and tls_ca_file in its libvirtd.conf): %v", e.Addr, e.Cert, e.Err)
}

// Unwrap returns the cause.
func (e *RefusedError) Unwrap() error { return e.Err }

// Dial connects to the daemon. It returns when the daemon has accepted the client,
// or when ctx ends. The connection then lives until it is closed.
func Dial(ctx context.Context, cfg Config) (net.Conn, error) {
	location, err := choose(cfg.Locations)
	if err != nil {
		return nil, err
	}
	materials, err := load(location)
	if err != nil {
		return nil, err
	}
	addr := net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))
	tcp, err := cfg.DialTCP(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = tcp.Close() })
	conn := tls.Client(tcp, materials.config(cfg.Host))
	err = login(conn, addr, location)
	if !stop() {
		err = ctx.Err() // what the closed connection led to says nothing
	}
	if err != nil {
		_ = tcp.Close()
		return nil, err
	}
	return conn, nil
}

// login makes the handshake and waits for the daemon's verdict.
func login(conn *tls.Conn, addr string, location Location) error {
	if err := conn.Handshake(); err != nil { //nolint:noctx // closed with its context
		return explain(err, addr, location)
	}
	verdict := make([]byte, 1)
	_, err := io.ReadFull(conn, verdict)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // it hangs up on whom it refuses
		return &RefusedError{Addr: addr, Cert: location.Cert, Err: errors.New("it has hung up after the handshake")}
	}
	if err != nil {
		return explain(err, addr, location)
	}
	if verdict[0] != 1 {
		return &RefusedError{Addr: addr, Cert: location.Cert, Err: fmt.Errorf("it has answered %d in place of 1", verdict[0])}
	}
	return nil
}

// explain gives an error of TLS its type.
func explain(err error, addr string, location Location) error {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return &ServerError{Addr: addr, CA: location.CA, Err: err}
	}
	if _, ok := errors.AsType[*revokedError](err); ok {
		return &ServerError{Addr: addr, CA: location.CA, Err: err}
	}
	if aboutCertificate(err) {
		return &RefusedError{Addr: addr, Cert: location.Cert, Err: err}
	}
	return fmt.Errorf("tls: %q: %w", addr, err)
}

// aboutCertificate reports whether an error is an alert with which the daemon judges
// the certificate that it was shown (RFC 8446, section 6.2). The type of alerts is not
// exported, so their text must do.
func aboutCertificate(err error) bool {
	alert, ok := errors.AsType[*net.OpError](err)
	if !ok || alert.Op != "remote error" {
		return false
	}
	text := alert.Err.Error()
	return strings.Contains(text, "certificate") || strings.Contains(text, "access denied")
}

// choose returns the first location that is complete.
func choose(locations []Location) (Location, error) {
	var missing error
	for _, l := range locations {
		if missing = l.complete(); missing == nil {
			return l, nil
		}
	}
	return Location{}, missing
}

func (l Location) complete() error {
	for _, path := range []string{l.CA, l.Cert, l.Key} {
		if _, err := os.Stat(path); err != nil {
			return &MaterialError{Path: path, Err: err}
		}
	}
	return nil
}

// materials are the contents of a location.
type materials struct {
	authorities *x509.CertPool
	revoked     []*x509.RevocationList
	client      tls.Certificate
}

func load(l Location) (*materials, error) {
	m := &materials{authorities: x509.NewCertPool()}
	data, err := os.ReadFile(l.CA)
	if err == nil && !m.authorities.AppendCertsFromPEM(data) {
		err = errors.New("it holds no certificate")
	}
	if err != nil {
		return nil, &MaterialError{Path: l.CA, Err: err}
	}
	if m.client, err = tls.LoadX509KeyPair(l.Cert, l.Key); err != nil {
		path := l.Cert
		if file, ok := errors.AsType[*fs.PathError](err); ok {
			path = file.Path
		}
		return nil, &MaterialError{Path: path, Err: err}
	}
	if m.revoked, err = loadRevoked(l.RevocationList); err != nil {
		return nil, &MaterialError{Path: l.RevocationList, Err: err}
	}
	return m, nil
}

// loadRevoked reads lists of revoked certificates, of which there may be none.
func loadRevoked(path string) ([]*x509.RevocationList, error) {
	data, err := os.ReadFile(path) //nolint:gosec // reading the configured file is the purpose
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var lists []*x509.RevocationList
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		list, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, err
		}
		lists = append(lists, list)
	}
	if lists == nil {
		return nil, errors.New("it holds no list")
	}
	return lists, nil
}

func (m *materials) config(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		ServerName: host,
		RootCAs:    m.authorities,
		// The daemon need not name our authority as one that it knows: what is shown is
		// always the same.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &m.client, nil },
		VerifyConnection:     m.notRevoked,
	}
}

// revokedError reports a certificate that its authority has revoked.
type revokedError struct{ subject string }

func (e *revokedError) Error() string {
	return fmt.Sprintf("the certificate of %q is revoked", e.subject)
}

// notRevoked holds the daemon's certificate, which has been verified, against the
// lists of those who signed it.
func (m *materials) notRevoked(state tls.ConnectionState) error {
	for _, chain := range state.VerifiedChains {
		for i, issuer := range chain[1:] {
			if err := m.checkRevoked(chain[i], issuer); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *materials) checkRevoked(cert, issuer *x509.Certificate) error {
	for _, list := range m.revoked {
		// The file is trusted as that of the authorities is. Its signature is not asked
		// about: authorities are often not marked as signers of lists, and a list that
		// was left out would let the revoked in.
		if !bytes.Equal(list.RawIssuer, issuer.RawSubject) {
			continue
		}
		for _, entry := range list.RevokedCertificateEntries {
			if entry.SerialNumber.Cmp(cert.SerialNumber) == 0 {
				return &revokedError{cert.Subject.String()}
			}
		}
	}
	return nil
}
