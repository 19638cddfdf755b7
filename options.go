package kvm2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"golang.org/x/crypto/ssh"
	"libvirt.org/go/libvirtxml"
)

// Option sets what a Config cannot hold.
type Option func(*options)

type options struct {
	dialer   Dialer
	log      *slog.Logger
	http     *http.Client
	mutate   func(*libvirtxml.Domain)
	observer Observer
	progress func(ImageEvent)

	sshPassphrase func(ctx context.Context, keyFile string) ([]byte, error)
	sshSigners    func(ctx context.Context) ([]ssh.Signer, error)

	sources imageSources // without the client
	faults  []error      // Options that cannot be
}

func (o *options) fault(format string, args ...any) {
	o.faults = append(o.faults, permanent(ErrInvalidConfig, "kvm2: %w", fmt.Errorf(format, args...)))
}

// WithDialer replaces the connection that Config.URI describes: by the fake, or by one of your own. URI is still
// validated; it names the host.
func WithDialer(d Dialer) Option { return func(o *options) { o.dialer = d } }

// WithSSHPassphrase decrypts key files with passphrases that the function returns. It is asked for each such file at each
// dial, by several goroutines, and must return when ctx ends. No passphrase is kept. A wrong one is Permanent. When the function
// fails, so does the dial; its error is Transient unless it is an Error with another class, and must hold no secret.
func WithSSHPassphrase(passphrase func(ctx context.Context, keyFile string) ([]byte, error)) Option {
	return func(o *options) { o.sshPassphrase = passphrase }
}

// WithSSHSigners logs in with keys that the function returns, from a vault or a hardware token for example. It is asked
// at each dial, by several goroutines, and must return when ctx ends. Every server on the way is offered the keys, after the
// key files that are configured for it; the SSH agent is not asked then. When the function fails, so does the dial; its error is
// Transient unless it is an Error with another class, and must hold no secret.
func WithSSHSigners(signers func(ctx context.Context) ([]ssh.Signer, error)) Option {
	return func(o *options) { o.sshSigners = signers }
}

// WithLogger sets where the Provider logs. Without it nothing is logged. Payloads and secrets never are.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithHTTPClient sets the client that fetches images: for proxies or a private CA. Its Timeout
// bounds a whole transfer and should be zero.
func WithHTTPClient(c *http.Client) Option { return func(o *options) { o.http = c } }

// WithDomainMutator edits every domain before it is defined. Name, UUID, kvm2's metadata and the files of kvm2's own
// disks are put back afterwards, and libvirt validates the result against its schema. The mutator must give the same
// domain the same edits each time, and may be called by several goroutines.
func WithDomainMutator(mutate func(*libvirtxml.Domain)) Option {
	return func(o *options) { o.mutate = mutate }
}

// endpoint is a host with the way to it, as Config and Options describe them.
type endpoint struct {
	options
	cfg  Config // with its defaults
	host hostIdentity
	// hostKey says that the host shows a key or a certificate, and is shown one.
	hostKey bool
	dial    *decorator
}

func newEndpoint(cfg Config, opts []Option) (endpoint, error) {
	if err := cfg.Validate("kvm2"); err != nil {
		return endpoint{}, err
	}
	o := options{log: slog.New(slog.DiscardHandler), http: http.DefaultClient}
	for _, opt := range opts {
		opt(&o)
	}
	if err := errors.Join(o.faults...); err != nil {
		return endpoint{}, err
	}
	o.sources.client = o.http
	cfg = cfg.withDefaults()
	uri, err := parseURI(cfg.URI)
	if err != nil {
		return endpoint{}, permanent(ErrInvalidConfig, "kvm2.uri: %w", err)
	}
	hostKey := false
	if o.dialer == nil {
		o.dialer = &libvirtDialer{uri: uri, ssh: cfg.SSH, passphrase: o.sshPassphrase, signers: o.sshSigners}
		hostKey = uri.transport == "ssh" || uri.transport == "tls"
	}
	host := hostIdentity{name: cfg.hostName(uri), systemDaemon: uri.isSystem()}
	dial := &decorator{next: o.dialer, host: host.name, timeout: time.Duration(cfg.CallTimeout), log: o.log, watch: o.observer}
	return endpoint{options: o, cfg: cfg, host: host, hostKey: hostKey, dial: dial}, nil
}
