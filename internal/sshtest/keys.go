package sshtest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"fmt"
	"time"

	"golang.org/x/crypto/ssh"
)

// Key is a key pair.
type Key struct {
	ssh.MultiAlgorithmSigner
	private crypto.PrivateKey
}

// NewKey makes a key of the type "ssh-ed25519", "ssh-rsa" or
// "ecdsa-sha2-nistp256".
func NewKey(keyType string) (*Key, error) {
	var private crypto.Signer
	var err error
	switch keyType {
	case ssh.KeyAlgoED25519:
		_, private, err = ed25519.GenerateKey(rand.Reader)
	case ssh.KeyAlgoRSA:
		private, err = rsa.GenerateKey(rand.Reader, 2048)
	case ssh.KeyAlgoECDSA256:
		private, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	default:
		err = fmt.Errorf("no key of type %q can be made", keyType)
	}
	if err != nil {
		return nil, err
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		return nil, err
	}
	return &Key{MultiAlgorithmSigner: signer.(ssh.MultiAlgorithmSigner), private: private}, nil
}

// Private returns the private key as the crypto packages know it.
func (k *Key) Private() crypto.PrivateKey { return k.private }

// PEM returns the content of a private key file, encrypted if there is a
// passphrase.
func (k *Key) PEM(passphrase string) ([]byte, error) {
	var block *pem.Block
	var err error
	if passphrase == "" {
		block, err = ssh.MarshalPrivateKey(k.private, "")
	} else {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(k.private, "", []byte(passphrase))
	}
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(block), nil
}

// SignHost returns a host certificate for key with these names, good until
// expiry.
func (k *Key) SignHost(key ssh.Signer, expiry time.Time, names ...string) (ssh.Signer, error) {
	return k.sign(key, ssh.HostCert, expiry, names)
}

// SignUser returns a user certificate for key with these names, good until
// expiry.
func (k *Key) SignUser(key ssh.Signer, expiry time.Time, names ...string) (ssh.Signer, error) {
	return k.sign(key, ssh.UserCert, expiry, names)
}

func (k *Key) sign(key ssh.Signer, certType uint32, expiry time.Time, names []string) (ssh.Signer, error) {
	cert := &ssh.Certificate{
		Key:             key.PublicKey(),
		CertType:        certType,
		ValidPrincipals: names,
		ValidBefore:     uint64(expiry.Unix()),
	}
	if err := cert.SignCert(rand.Reader, k); err != nil {
		return nil, err
	}
	return ssh.NewCertSigner(cert, key)
}
