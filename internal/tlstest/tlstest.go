// Package tlstest makes certificates for tests, and daemons that show them.
package tlstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Authority signs certificates.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an authority.
func NewAuthority(name string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	// As libvirt's instructions have it made, it is not marked as a signer of lists.
	template := certificate(name)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

func certificate(name string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62)) // the error is always nil
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

// Issue makes a certificate for a daemon at the addresses, or for a client if there
// are none. Edit may change it before it is signed.
func (a *Authority) Issue(name string, addrs []net.IP, edit func(*x509.Certificate)) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := certificate(name)
	template.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment // libvirtd wants both
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if addrs != nil {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		template.IPAddresses = addrs
	}
	if edit != nil {
		edit(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// Revoke returns a list, in the PEM format, with the certificate on it.
func (a *Authority) Revoke(cert tls.Certificate) ([]byte, error) {
	signer := *a.cert
	signer.KeyUsage |= x509.KeyUsageCRLSign // which only the maker of the list checks
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour),
		RevokedCertificateEntries: []x509.RevocationListEntry{{SerialNumber: cert.Leaf.SerialNumber, RevocationTime: time.Now()}},
	}, &signer, a.key)
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}), err
}

// Pool holds the authority.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

// Write writes the authority and a certificate with its key into a directory, under
// the names that libvirt gives them: those of a "client", or of a "server".
func (a *Authority) Write(dir, role string, cert tls.Certificate) error {
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		return err
	}
	for name, block := range map[string]*pem.Block{
		"cacert.pem":      {Type: "CERTIFICATE", Bytes: a.cert.Raw},
		role + "cert.pem": {Type: "CERTIFICATE", Bytes: cert.Certificate[0]},
		role + "key.pem":  {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// Server is a daemon that speaks TLS on a port of the loopback interface.
type Server struct {
	listener net.Listener
	serving  sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
}

// Start returns a daemon that gives each TCP connection to serve, and closes it
// afterwards.
func Start(serve func(net.Conn)) (*Server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l}
	s.serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			s.serving.Go(func() {
				serve(conn)
				_ = conn.Close()
			})
		}
	})
	return s, nil
}

// Port returns the port that the daemon listens on.
func (s *Server) Port() int { return s.listener.Addr().(*net.TCPAddr).Port }

// Close ends all connections, and waits for them.
func (s *Server) Close() {
	_ = s.listener.Close()
	s.mu.Lock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.serving.Wait()
}
