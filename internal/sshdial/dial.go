package sshdial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"golang.org/x/crypto/ssh"
)

// Hop is an SSH server: the host itself, or a jump host on the way to it.
type Hop struct {
	// User is the account on the server.
	User string
	// Host is a name or an IP address, IPv6 without brackets. It is looked up in
	// known_hosts in lower case. Behind a jump host it is resolved there.
	Host string
	// Port is the TCP port; zero means 22.
	Port int

	// KeyFiles are private keys, offered in this order before anything else. A
	// certificate beside a key, in the file of the same name with "-cert.pub"
	// added, is offered before the key.
	KeyFiles []string
	// AgentSocket is the unix socket of an SSH agent whose keys are offered last;
	// empty means that no agent is asked. A server counts every key it is offered
	// and gives up after a few, so an agent with many keys is best left out when a
	// key file is configured.
	AgentSocket string
	// KnownHostsFiles are the files that the host key must be in. All of them must
	// exist. Without any, every host is unknown.
	KnownHostsFiles []string
}

// Config says where to connect to and with what. User, Host, and Sockets or
// Commands are required.
type Config struct {
	// Hop is the host.
	Hop
	// Jumps are the servers that the connection leads through, the nearest first.
	// Each is verified and logged in to before the next is contacted.
	Jumps []Hop

	// Signers, if not nil, returns keys to be offered after the key files, to each
	// server. It is called once at every Dial, and must return when ctx ends.
	Signers func(ctx context.Context) ([]ssh.Signer, error)
	// Passphrase, if not nil, returns the passphrase of the encrypted key file at
	// path. It is called once for each such file at every Dial, and must return when
	// ctx ends.
	Passphrase func(ctx context.Context, path string) ([]byte, error)

	// Sockets are paths of unix sockets on the host, tried in order: the first one
	// that opens wins.
	Sockets []string
	// Commands are programs on the host that connect their standard input and
	// output to the daemon. They are tried in order where the server opens none of
	// the sockets.
	Commands []Command

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

	// DialTCP opens the connection that SSH runs over, to the first jump host if
	// there is one, and must return when its context ends; nil means a net.Dialer.
	DialTCP func(ctx context.Context, network, addr string) (net.Conn, error)
}

const (
	defaultPort           = 22
	defaultKeepaliveCount = 3 // OpenSSH's ServerAliveCountMax
)

// withDefaults returns the configuration with its zero values replaced, or says
// what is missing.
func (cfg Config) withDefaults() (Config, error) {
	if len(cfg.Sockets) == 0 && len(cfg.Commands) == 0 {
		return cfg, errors.New("ssh: no socket to connect to and no command to run")
	}
	jumps := slices.Clone(cfg.Jumps)
	for i := range jumps {
		if err := jumps[i].complete(); err != nil {
			return cfg, fmt.Errorf("jump host %d: %w", i+1, err)
		}
	}
	cfg.Jumps = jumps
	if cfg.KeepaliveCount <= 0 {
		cfg.KeepaliveCount = defaultKeepaliveCount
	}
	if cfg.DialTCP == nil {
		cfg.DialTCP = new(net.Dialer).DialContext
	}
	return cfg, cfg.complete()
}

// complete replaces the zero values of the hop, or says what is missing.
func (h *Hop) complete() error {
	switch {
	case h.User == "":
		return errors.New("ssh: no user")
	case h.Host == "":
		return errors.New("ssh: no host")
	case h.Port < 0 || h.Port > 65535:
		return fmt.Errorf("ssh: port %d is out of range", h.Port)
	}
	if h.Port == 0 {
		h.Port = defaultPort
	}
	return nil
}

// addr returns the TCP address of the server.
func (h Hop) addr() string {
	return net.JoinHostPort(h.Host, strconv.Itoa(h.Port))
}

// Dial connects to the first socket of cfg that opens, else through the first of
// its commands that runs. The connection lives until it is closed, whatever
// becomes of ctx. Closing it closes the SSH channels, the SSH clients and the TCP
// connection; it does not wait for the host.
//
// The connection has no deadlines (os.ErrNoDeadline), because an SSH channel has
// none: close it to get out of a blocked call. Its remote address is the socket
// that opened, or the name of the command. When the host falls silent, Read and
// Write fail with a *KeepaliveError; when the command ends in error, with a
// *CommandError.
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
	j := &journey{cfg: cfg, at: cfg.Hop, step: stepMaterials}
	conn, err := j.run(ctx)
	if err != nil {
		return nil, j.describe(ctx, err)
	}
	return conn, nil
}
