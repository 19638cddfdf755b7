package sshdial

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// credentials are the keys of one dial, and the record of those that the server
// was offered.
type credentials struct {
	signers []ssh.Signer // still to be offered
	offered []string     // fingerprints
	started bool         // the server has begun to ask for authentication

	agent     net.Conn    // nil without one
	stopWatch func() bool // of the context, for agent
}

// keyring reads the keys of one dial, each once however many servers need it.
type keyring struct {
	cfg     Config
	files   map[string][]ssh.Signer
	signers []ssh.Signer
	asked   bool // for the signers
}

// credentials are those that are meant for the hop.
func (k *keyring) credentials(ctx context.Context, hop Hop) (*credentials, error) {
	creds := &credentials{}
	for _, path := range hop.KeyFiles {
		signers, err := k.file(ctx, path)
		if err != nil {
			return nil, err
		}
		creds.signers = append(creds.signers, signers...)
	}
	signers, err := k.given(ctx)
	if err != nil {
		return nil, err
	}
	creds.signers = append(creds.signers, signers...)
	if hop.AgentSocket != "" {
		if err := creds.addAgent(ctx, hop.AgentSocket); err != nil {
			creds.close()
			return nil, &MaterialError{Path: hop.AgentSocket, What: "agent", Err: err}
		}
	}
	if len(creds.signers) == 0 {
		creds.close()
		return nil, &AuthError{User: hop.User, Host: hop.Host, Err: errors.New("there is no key to offer: no key file, no signer and no key in an agent")}
	}
	return creds, nil
}

// file returns what the key file at path is good for.
func (k *keyring) file(ctx context.Context, path string) ([]ssh.Signer, error) {
	if signers, ok := k.files[path]; ok {
		return signers, nil
	}
	signers, err := loadKey(ctx, path, k.cfg.Passphrase)
	if err != nil {
		return nil, err
	}
	if k.files == nil {
		k.files = map[string][]ssh.Signer{}
	}
	k.files[path] = signers
	return signers, nil
}

// given returns the keys of Config.Signers.
func (k *keyring) given(ctx context.Context) ([]ssh.Signer, error) {
	if k.cfg.Signers == nil || k.asked {
		return k.signers, nil
	}
	k.asked = true
	signers, err := k.cfg.Signers(ctx)
	if err != nil {
		return nil, &MaterialError{What: "signers", Err: &CallbackError{err}}
	}
	k.signers = signers
	return signers, nil
}

// addAgent adds the keys of the agent at socket. They stay usable until close or
// the end of ctx: an agent may wait for a person to confirm.
func (c *credentials) addAgent(ctx context.Context, socket string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	c.agent = conn
	c.stopWatch = context.AfterFunc(ctx, func() { _ = conn.Close() })
	signers, err := agent.NewClient(conn).Signers()
	if err != nil {
		return err
	}
	c.signers = append(c.signers, signers...)
	return nil
}

// close ends the use of the agent.
func (c *credentials) close() {
	if c.agent == nil {
		return
	}
	c.stopWatch()
	_ = c.agent.Close()
}

// loadKey returns what the key file at path is good for: the key, and before it
// the certificate beside it.
func loadKey(ctx context.Context, path string, passphrase passphraseFunc) ([]ssh.Signer, error) {
	key, err := parseKey(ctx, path, passphrase)
	if err != nil {
		return nil, &MaterialError{Path: path, What: "private key", Err: err}
	}
	certPath := path + "-cert.pub"
	cert, err := parseCertificate(certPath, key)
	if errors.Is(err, fs.ErrNotExist) {
		return []ssh.Signer{key}, nil
	}
	if err != nil {
		return nil, &MaterialError{Path: certPath, What: "certificate", Err: err}
	}
	return []ssh.Signer{cert, key}, nil
}

type passphraseFunc = func(context.Context, string) ([]byte, error)

func parseKey(ctx context.Context, path string, passphrase passphraseFunc) (ssh.Signer, error) {
	data, err := os.ReadFile(path) //nolint:gosec // reading the configured file is the purpose
	if err != nil {
		return nil, err
	}
	key, err := ssh.ParsePrivateKey(data)
	if _, encrypted := errors.AsType[*ssh.PassphraseMissingError](err); !encrypted {
		return key, err
	}
	if passphrase == nil {
		return nil, fmt.Errorf("it is encrypted and no passphrase is configured: %w", err)
	}
	secret, err := passphrase(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("its passphrase: %w", &CallbackError{err})
	}
	return ssh.ParsePrivateKeyWithPassphrase(data, secret)
}

func parseCertificate(path string, key ssh.Signer) (ssh.Signer, error) {
	data, err := os.ReadFile(path) //nolint:gosec // reading the configured file is the purpose
	if err != nil {
		return nil, err
	}
	public, _, _, _, err := ssh.ParseAuthorizedKey(data)
	if err != nil {
		return nil, err
	}
	cert, ok := public.(*ssh.Certificate)
	if !ok {
		return nil, fmt.Errorf("it holds a plain key of type %q", public.Type())
	}
	return ssh.NewCertSigner(cert, key)
}

// next hands out one key after the other, as an ssh.ClientAuthCallback. So the
// record of what was offered is exact, and a server that does not take keys at
// all is not offered any.
func (c *credentials) next(state *ssh.ClientAuthContext) (ssh.AuthMethod, error) {
	c.started = true
	if !slices.Contains(state.AllowedMethods, "publickey") {
		return nil, fmt.Errorf("the server does not take public keys, only %q", state.AllowedMethods)
	}
	if len(c.signers) == 0 {
		return nil, nil
	}
	signer := c.signers[0]
	c.signers = c.signers[1:]
	c.offered = append(c.offered, fingerprint(signer.PublicKey()))
	return ssh.PublicKeys(signer), nil
}

// fingerprint returns the fingerprint of key as ssh-keygen -l shows it. Of a
// certificate that is the one of the key it certifies.
func fingerprint(key ssh.PublicKey) string {
	if cert, ok := key.(*ssh.Certificate); ok {
		return ssh.FingerprintSHA256(cert.Key) + " (certificate)"
	}
	return ssh.FingerprintSHA256(key)
}

// step says how far the handshake came.
func (c *credentials) step() string {
	if c.started {
		return stepAuth
	}
	return stepExchange
}

// explain makes an *AuthError of an error of the handshake that means that the
// server will not let this user in.
func (c *credentials) explain(hop Hop, err error) error {
	if !c.started || connectionLost(err) {
		return err
	}
	return &AuthError{User: hop.User, Host: hop.Host, Offered: c.offered, Err: err}
}

// connectionLost reports whether an error that occurred during authentication
// is one of the connection. The rest is the server's answer or an agent's.
func connectionLost(err error) bool {
	text := err.Error()
	if strings.Contains(text, "ssh: disconnect, reason ") {
		// OpenSSH says reason 2 when it has been offered too many keys. Reason 14 is
		// "no more auth methods available" (RFC 4253, section 11.1).
		return !strings.Contains(text, "oo many authentication failures") && !strings.Contains(text, "reason 14:")
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed)
}
