package sshdial

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// hostKeys is what the known_hosts files say about one server.
type hostKeys struct {
	files []string
	host  string // as it is looked up
	addr  string // host and port
	check ssh.HostKeyCallback
	known []KnownKey

	// algorithms are the only ones to offer to the server. It picks the first
	// that it has a key for: with an algorithm for which known_hosts has no entry,
	// a server with several keys would seem to have changed its key.
	algorithms []string
}

// plainAlgorithms and certAlgorithms are the host key algorithms to offer, in
// order of preference. SHA-1 is left out.
var (
	plainAlgorithms = []string{
		ssh.KeyAlgoED25519,
		ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521,
		ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256,
	}
	certAlgorithms = []string{
		ssh.CertAlgoED25519v01,
		ssh.CertAlgoECDSA256v01, ssh.CertAlgoECDSA384v01, ssh.CertAlgoECDSA521v01,
		ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01,
	}
)

// loadHostKeys reads the files for the server at host and port.
func loadHostKeys(files []string, host string, port int) (*hostKeys, error) {
	check, err := knownhosts.New(files...)
	if err != nil {
		return nil, blame(files, err)
	}
	host = strings.ToLower(host) // as OpenSSH does it
	h := &hostKeys{
		files: files,
		host:  host,
		addr:  net.JoinHostPort(host, strconv.Itoa(port)),
		check: check,
	}

	var keyErr *knownhosts.KeyError
	probe := throwAwayKey()
	if err := h.lookup(probe); !errors.As(err, &keyErr) {
		return nil, &MaterialError{What: "known_hosts", Err: err}
	}
	var types []string
	hasAuthority := false
	for _, entry := range keyErr.Want {
		authority := h.isAuthority(entry.Key, probe)
		h.known = append(h.known, knownKey(entry, authority))
		if authority {
			hasAuthority = true
		} else {
			types = append(types, entry.Key.Type())
		}
	}
	h.algorithms = algorithmsFor(types, hasAuthority)
	return h, nil
}

// blame returns a *MaterialError that names the one of the files that cannot be
// used.
func blame(files []string, err error) error {
	for _, file := range files {
		if _, err := knownhosts.New(file); err != nil {
			return &MaterialError{Path: file, What: "known_hosts", Err: err}
		}
	}
	return &MaterialError{What: "known_hosts", Err: err} // it has been mended just now
}

// throwAwayKey returns a key that is in no known_hosts file.
func throwAwayKey() ssh.PublicKey {
	random := make([]byte, ed25519.PublicKeySize)
	_, _ = rand.Read(random) // never fails
	key, err := ssh.NewPublicKey(ed25519.PublicKey(random))
	if err != nil {
		panic(err) // the size is right
	}
	return key
}

// algorithmsFor returns the algorithms for keys of these types, and before them
// those for certificates if an authority is known. For a host of which nothing is
// known it returns all for plain keys, so that the error can name its key.
func algorithmsFor(types []string, authority bool) []string {
	if len(types) == 0 && !authority {
		return plainAlgorithms
	}
	var algorithms []string
	if authority {
		algorithms = append(algorithms, certAlgorithms...)
	}
	for _, algorithm := range plainAlgorithms {
		if slices.Contains(types, keyType(algorithm)) {
			algorithms = append(algorithms, algorithm)
		}
	}
	// A type that is not in the list is its own algorithm.
	for _, typ := range types {
		if typ != ssh.KeyAlgoRSA && !slices.Contains(algorithms, typ) {
			algorithms = append(algorithms, typ)
		}
	}
	return algorithms
}

// keyType returns the type of the keys that a plain algorithm is for.
func keyType(algorithm string) string {
	switch algorithm {
	case ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256:
		return ssh.KeyAlgoRSA
	}
	return algorithm
}

// lookup checks key against the files.
func (h *hostKeys) lookup(key ssh.PublicKey) error {
	// The second argument is for look-ups by IP address. It must look like an
	// address even though it is not used.
	return h.check(h.addr, literalAddr(h.addr), key)
}

type literalAddr string

func (a literalAddr) Network() string { return "tcp" }
func (a literalAddr) String() string  { return string(a) }

// isAuthority reports whether key is marked @cert-authority for this host. The
// knownhosts package does not tell, so it is given a certificate of that
// authority, made of a signature that cannot hold: it looks at the signature only
// if it knows the authority.
func (h *hostKeys) isAuthority(key, certified ssh.PublicKey) bool {
	spy := &verifySpy{PublicKey: key}
	_ = h.lookup(&ssh.Certificate{
		Key:             certified,
		CertType:        ssh.HostCert,
		ValidPrincipals: []string{h.host},
		ValidBefore:     ssh.CertTimeInfinity,
		SignatureKey:    spy,
		Signature:       &ssh.Signature{Format: key.Type()},
	})
	return spy.asked
}

// verifySpy notes that it was asked to verify a signature.
type verifySpy struct {
	ssh.PublicKey
	asked bool
}

// Verify always fails.
func (s *verifySpy) Verify([]byte, *ssh.Signature) error {
	s.asked = true
	return errors.New("not a signature")
}

// verify checks the key that the server has shown, as an ssh.HostKeyCallback.
func (h *hostKeys) verify(_ string, _ net.Addr, key ssh.PublicKey) error {
	err := h.lookup(key)
	if err == nil {
		return nil
	}
	if cert, ok := key.(*ssh.Certificate); ok {
		return h.verifyCertificate(cert, err)
	}
	return h.explain(key, err)
}

// verifyCertificate decides about a certificate that was refused with err. As in
// OpenSSH, the key in it may still be known as a plain key.
func (h *hostKeys) verifyCertificate(cert *ssh.Certificate, err error) error {
	for _, key := range []ssh.PublicKey{cert.Key, cert.SignatureKey} {
		keyErr := h.lookup(key)
		if _, revoked := errors.AsType[*knownhosts.RevokedError](keyErr); revoked {
			return h.explain(key, keyErr)
		}
	}
	if h.lookup(cert.Key) == nil {
		return nil
	}
	hostKeyErr := h.newError(Mismatch, cert.Key, err)
	hostKeyErr.Authority = ssh.FingerprintSHA256(cert.SignatureKey)
	if h.isAuthority(cert.SignatureKey, cert.Key) {
		hostKeyErr.Kind = BadCertificate
	}
	return hostKeyErr
}

// explain makes a *HostKeyError of an error of the knownhosts package about key.
func (h *hostKeys) explain(key ssh.PublicKey, err error) error {
	if revoked, ok := errors.AsType[*knownhosts.RevokedError](err); ok {
		hostKeyErr := h.newError(Revoked, key, err)
		hostKeyErr.Known = []KnownKey{knownKey(revoked.Revoked, false)}
		return hostKeyErr
	}
	kind := Mismatch
	if len(h.known) == 0 {
		kind = Unknown
	}
	return h.newError(kind, key, err)
}

func (h *hostKeys) newError(kind HostKeyKind, key ssh.PublicKey, err error) *HostKeyError {
	return &HostKeyError{
		Kind:        kind,
		Files:       h.files,
		LookupKey:   knownhosts.Normalize(h.addr),
		Type:        key.Type(),
		Fingerprint: ssh.FingerprintSHA256(key),
		Known:       h.known,
		Err:         err,
	}
}

// explainNegotiation makes a *HostKeyError of the failure to agree on a host key
// algorithm: the server has no key of a type that is known.
func (h *hostKeys) explainNegotiation(err error) error {
	negotiation, ok := errors.AsType[*ssh.AlgorithmNegotiationError](err)
	if !ok || negotiation.What != "host key" || len(h.known) == 0 {
		return err
	}
	knowsRSA := slices.ContainsFunc(h.known, func(k KnownKey) bool { return k.Type == ssh.KeyAlgoRSA && !k.Authority })
	if knowsRSA && slices.Contains(negotiation.RequestedAlgorithms, ssh.KeyAlgoRSA) {
		return err // not another key, but a server that can only sign with SHA-1
	}
	return &HostKeyError{
		Kind:      Mismatch,
		Files:     h.files,
		LookupKey: knownhosts.Normalize(h.addr),
		Type:      strings.Join(negotiation.RequestedAlgorithms, ", "),
		Known:     h.known,
		Err:       err,
	}
}

func knownKey(entry knownhosts.KnownKey, authority bool) KnownKey {
	return KnownKey{
		File:        entry.Filename,
		Line:        entry.Line,
		Type:        entry.Key.Type(),
		Fingerprint: ssh.FingerprintSHA256(entry.Key),
		Authority:   authority,
	}
}
