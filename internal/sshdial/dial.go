package sshdial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"golang.org/x/crypto/ssh"
)

// Config says where to connect to and with what. User, Host and Sockets are
// required.
type Config struct {
	// User is the account on the host.
	User string
	// Host is a name or an IP address, IPv6 without brackets. It is looked up in
	// known_hosts in lower case.
	Host string
	// Port is the TCP port; zero means 22.
	Port int

	// KeyFiles are private keys, offered in this order before anything else. A
	// certificate beside a key, in the file of the same name with "-cert.pub"
	// added, is offered before the key.
	KeyFiles []string
	// Signers, if not nil, returns further keys. It is called at every Dial and
	// not interrupted by the context.
	Signers func() ([]ssh.Signer, error)
	// AgentSocket is the unix socket of an SSH agent whose keys are offered last;
	// empty means that no agent is asked. A server counts every key it is offered
	// and gives up after a few, so an agent with many keys is best left out when a
	// key file is configured.
	AgentSocket string
	// KnownHostsFiles are the files that the host key must be in. All of them must
	// exist. Without any, every host is unknown.
	KnownHostsFiles []string
	// Passphrase, if not nil, returns the passphrase of the encrypted key file at
	// path. It is called at every Dial and not interrupted by the context.
	Passphrase func(path string) ([]byte, error)

	// Sockets are paths of unix sockets on the host, tried in order: the first one
	// that opens wins.
	Sockets []string

	// HandshakeTimeout bounds the whole of Dial, in addition to its context; zero
	// means no bound of its own.
	HandshakeTimeout time.Duration
	// KeepaliveInterval is the time between keepalive requests on the open
	// connection; zero means none are sent, and a host that has frozen is not
	// noticed.
	KeepaliveInterval time.Duration
	// KeepaliveCount is how many requests in a row may stay unanswered for an
	// interval each, with nothing else heard from the host either, before the
	// connection is given up. Zero means 3.
	KeepaliveCount int

	// DialTCP opens the connection that SSH runs over, and must return when its
	// context ends; nil means a net.Dialer.
	DialTCP func(ctx context.Context, network, addr string) (net.Conn, error)
}

const (
	defaultPort           = 22
	defaultKeepaliveCount = 3 // OpenSSH's ServerAliveCountMax
)

// withDefaults returns the configuration with its zero values replaced, or says
// what is missing.
func (cfg Config) withDefaults() (Config, error) {
	switch {
	case cfg.User == "":
		return cfg, errors.New("ssh: no user")
	case cfg.Host == "":
		return cfg, errors.New("ssh: no host")
	case len(cfg.Sockets) == 0:
		return cfg, errors.New("ssh: no socket to connect to")
	case cfg.Port < 0 || cfg.Port > 65535:
		return cfg, fmt.Errorf("ssh: port %d is out of range", cfg.Port)
	}
	if cfg.Port == 0 {
		cfg.Port = defaultPort
	}
	if cfg.KeepaliveCount <= 0 {
		cfg.KeepaliveCount = defaultKeepaliveCount
	}
	if cfg.DialTCP == nil {
		cfg.DialTCP = new(net.Dialer).DialContext
	}
	return cfg, nil
}

// addr returns the TCP address of the server.
func (cfg Config) addr() string {
	return net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))
}

// Dial connects to the first socket of cfg that opens. The connection lives
// until it is closed, whatever becomes of ctx. Closing it closes the SSH channel,
// the SSH client and the TCP connection; it does not wait for the host.
//
// The connection has no deadlines (os.ErrNoDeadline), because an SSH channel has
// none: close it to get out of a blocked call. Its remote address is the socket
// that opened. When the host falls silent, Read and Write fail with a
// *KeepaliveError.
func Dial(ctx context.Context, cfg Config) (net.Conn, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if cfg.HandshakeTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.HandshakeTimeout)
		defer cancel()
	}
	conn, step, err := dial(ctx, cfg)
	if err != nil {
		return nil, describe(ctx, cfg, step, err)
	}
	return conn, nil
}

// The steps of a dial, as they appear in a DialError.
const (
	stepMaterials = "reading keys"
	stepConnect   = "TCP connection"
	stepExchange  = "key exchange"
	stepAuth      = "authentication"
	stepOpen      = "opening the socket"
)

// dial does the work of Dial and says how far it came.
func dial(ctx context.Context, cfg Config) (_ net.Conn, step string, _ error) {
	hosts, err := loadHostKeys(cfg.KnownHostsFiles, cfg.Host, cfg.Port)
	if err != nil {
		return nil, stepMaterials, err
	}
	creds, err := loadCredentials(ctx, cfg)
	if err != nil {
		return nil, stepMaterials, err
	}
	defer creds.close()

	tcp, err := cfg.DialTCP(ctx, "tcp", cfg.addr())
	if err != nil {
		return nil, stepConnect, err
	}
	metered := &meteredConn{Conn: tcp}

	// Nothing in x/crypto/ssh takes a context: closing the connection under it is
	// the way out, at every step.
	stop := context.AfterFunc(ctx, func() { _ = tcp.Close() })
	client, err := handshake(metered, cfg, hosts, creds)
	if err != nil {
		stop()
		return nil, creds.step(), err
	}
	channel, err := openFirst(client, cfg.Sockets)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		stop()
		_ = client.Close()
		return nil, stepOpen, err
	}
	return newConn(channel, client, metered, cfg), stepOpen, nil
}

// handshake makes an SSH client of tcp, which it closes when it fails.
func handshake(tcp net.Conn, cfg Config, hosts *hostKeys, creds *credentials) (*ssh.Client, error) {
	config := &ssh.ClientConfig{
		User:              cfg.User,
		HostKeyCallback:   hosts.verify,
		HostKeyAlgorithms: hosts.algorithms,
		AuthCallback:      creds.next,
	}
	conn, channels, requests, err := ssh.NewClientConn(tcp, cfg.addr(), config)
	if err != nil {
		return nil, hosts.explainNegotiation(creds.explain(cfg, err))
	}
	return ssh.NewClient(conn, channels, requests), nil
}

// openFirst opens a channel to the first socket that the server connects to. If
// it refuses all of them, the last refusal is reported.
func openFirst(client *ssh.Client, sockets []string) (net.Conn, error) {
	var refused *ssh.OpenChannelError
	for _, socket := range sockets {
		conn, err := client.Dial("unix", socket)
		if err == nil {
			return conn, nil
		}
		if !errors.As(err, &refused) {
			return nil, err
		}
	}
	return nil, &ForwardError{Sockets: sockets, Reason: refused.Reason, Message: refused.Message}
}

// describe turns an error of dial into the one that Dial returns. An error with
// a type of this package explains itself.
func describe(ctx context.Context, cfg Config, step string, err error) error {
	var (
		material *MaterialError
		hostKey  *HostKeyError
		auth     *AuthError
		forward  *ForwardError
	)
	switch {
	case errors.As(err, &hostKey):
		return hostKey
	case ctx.Err() != nil:
		// What the closed connections led to says nothing.
		err = ctx.Err()
	case errors.As(err, &material):
		return material
	case errors.As(err, &auth):
		return auth
	case errors.As(err, &forward):
		return forward
	}
	return &DialError{User: cfg.User, Addr: cfg.addr(), Step: step, Err: err}
}
