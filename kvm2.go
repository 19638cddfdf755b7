package kvm2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"golang.org/x/crypto/ssh"
	"libvirt.org/go/libvirtxml"
)

// Provider makes machines on one libvirt host. It is safe for concurrent use. Close it when it is no longer needed.
type Provider struct {
	cfg    Config // with its defaults
	host   hostIdentity
	conns  *connPool
	images *imageCache
	space  *reservations
	locks  *keyedLock
	mutate func(*libvirtxml.Domain)
}

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

// New returns a Provider for the host that cfg names. It does not connect. Errors are of class Permanent,
// ErrInvalidConfig; they name fields as kvm2.uri, kvm2.scope and so on.
func New(cfg Config, opts ...Option) (*Provider, error) {
	e, err := newEndpoint(cfg, opts)
	if err != nil {
		return nil, err
	}
	space, way := &reservations{}, &circuit{dial: e.dial.open}
	conns := newConnPool(way.open, e.cfg.MaxConnections, time.Duration(e.cfg.IdleTimeout))
	return &Provider{
		cfg:    e.cfg,
		host:   e.host,
		conns:  conns,
		images: newImageCache(e, way.open, conns, space),
		space:  space,
		locks:  newKeyedLock(),
		mutate: e.mutate,
	}, nil
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

// Close ends image transfers under way, removes what they wrote, and closes all connections; calls that wait for a
// connection, and those that come later, get ErrClosed. A call that has a connection keeps it until it returns. Close
// returns when no transfer is left running: after Config.CallTimeout or so where the host does not answer.
func (p *Provider) Close() error {
	p.conns.close() // first: transfers have connections of their own, and may take a while to clean up
	p.images.close()
	return nil
}

// Create moves the machine that spec describes one step forward and reports it: a poll, to be repeated until State is
// StateRunning. Its time is bounded; in particular it never waits for an image, but returns StateCreating with the
// transfer's progress. Calling it again with the same spec is always safe. Machine.ID is known from the first call on,
// also when the call fails, unless the spec is invalid.
//
// Errors: ErrInvalidSpec, ErrForeignOwner and ErrImage (Permanent), ErrQuotaExceeded (Quota), and what the host and
// the way to it bring about. Never NotFound.
func (p *Provider) Create(ctx context.Context, spec Spec) (Machine, error) {
	plan, err := p.plan(spec)
	if err != nil {
		return Machine{}, fmt.Errorf("create machine %q: %w", clip(spec.Name), err)
	}
	m := plan.unborn()
	err = p.exclusively(ctx, plan.uuid, func(conn Conn) error {
		c := &creation{Provider: p, conn: conn, plan: plan}
		m, err = c.run(ctx)
		return err
	})
	if err != nil {
		return m, fmt.Errorf("create machine %q: %w", plan.id, err)
	}
	return m, nil
}

// Get reports one machine. A machine that has volumes but no domain is StateCreating. Errors: ErrNotFound (NotFound)
// only when the host was asked and has neither; ErrInvalidSpec for an ID that is not this Provider's;
// ErrForeignOwner for a domain that is not a machine of this scope.
func (p *Provider) Get(ctx context.Context, id string) (Machine, error) {
	uuid, err := p.own(id)
	if err != nil {
		return Machine{}, fmt.Errorf("get machine: %w", err)
	}
	var m Machine
	err = p.conns.with(ctx, func(conn Conn) error {
		m, err = p.get(ctx, conn, id, uuid)
		return err
	})
	if err != nil {
		return Machine{}, fmt.Errorf("get machine %q: %w", id, err)
	}
	return m, nil
}

func (p *Provider) get(ctx context.Context, conn Conn, id string, uuid UUID) (Machine, error) {
	d, err := conn.DomainByUUID(ctx, uuid)
	if ClassOf(err) == ClassNotFound {
		return p.getVolumes(ctx, conn, id, uuid, err)
	}
	if err != nil {
		return Machine{}, err
	}
	md, err := guard(p.cfg.Scope, d)
	if err != nil {
		return Machine{}, err
	}
	m := machineOf(id, d, md)
	return m, p.addAddresses(ctx, conn, d, md, &m)
}

// getVolumes reports a machine without a domain by its volumes; without those it does not exist.
func (p *Provider) getVolumes(ctx context.Context, conn Conn, id string, uuid UUID, absent error) (Machine, error) {
	names, err := conn.VolumeNames(ctx, p.cfg.Pool)
	if err != nil {
		return Machine{}, err
	}
	for _, name := range names {
		if u, ok := machineOfVolume(p.cfg.Scope, name); ok && u == uuid {
			return Machine{ID: id, UUID: uuid, State: StateCreating, Addresses: []Address{}}, nil
		}
	}
	return Machine{}, absent
}

// Delete removes a machine: a poll, to be repeated until it returns nil, which means that nothing of the machine
// remains. A machine that does not exist is nil. Errors: ErrInvalidSpec for an ID that is not this Provider's,
// ErrForeignOwner (Permanent) for a domain that is not a machine of this scope, which is left untouched.
func (p *Provider) Delete(ctx context.Context, id string) error {
	uuid, err := p.own(id)
	if err != nil {
		return fmt.Errorf("delete machine: %w", err)
	}
	err = p.exclusively(ctx, uuid, func(conn Conn) error {
		d := &deletion{Provider: p, conn: conn, uuid: uuid}
		return d.run(ctx)
	})
	if err != nil {
		return fmt.Errorf("delete machine %q: %w", id, err)
	}
	p.space.release(id)
	return nil
}

// List reports every machine of the scope, sorted by name and ID, those included that have volumes but no domain
// yet or any more. It is all of them or an error.
func (p *Provider) List(ctx context.Context) ([]Machine, error) {
	var machines []Machine
	err := p.conns.with(ctx, func(conn Conn) (err error) {
		machines, err = p.list(ctx, conn)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list machines of scope %q: %w", p.cfg.Scope, err)
	}
	return machines, nil
}

func (p *Provider) list(ctx context.Context, conn Conn) ([]Machine, error) {
	// Volumes first: a machine created in between then appears with its domain, and one deleted in between may
	// appear once more, but none is missed.
	volumes, err := conn.VolumeNames(ctx, p.cfg.Pool)
	if err != nil {
		return nil, err
	}
	domains, err := conn.Domains(ctx)
	if err != nil {
		return nil, err
	}
	machines, err := p.listed(domains, volumes)
	if err != nil {
		return nil, err
	}
	if err := p.addLeases(ctx, conn, machines); err != nil {
		return nil, err
	}
	out := p.orphans(volumes, domains)
	for _, l := range machines {
		out = append(out, l.Machine)
	}
	slices.SortFunc(out, func(a, b Machine) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return out, nil
}

// listedMachine is a machine with the metadata that its addresses are found by.
type listedMachine struct {
	Machine
	md metadata
}

// listed are the machines that have a domain. A domain that has a machine's UUID and volumes, or its name, but not its
// metadata is an error: the list would not be whole without it.
func (p *Provider) listed(domains []Domain, volumes []string) ([]listedMachine, error) {
	owns := map[UUID]bool{}
	for _, name := range volumes {
		if uuid, ok := machineOfVolume(p.cfg.Scope, name); ok {
			owns[uuid] = true
		}
	}
	var out []listedMachine
	for _, d := range domains {
		md, err := guard(p.cfg.Scope, d)
		if err == nil {
			out = append(out, listedMachine{machineOf(p.id(d.UUID), d, md), md})
			continue
		}
		if owns[d.UUID] || foreignInScope(p.cfg.Scope, d, err) {
			return nil, err
		}
	}
	return out, nil
}

// orphans are the machines that have volumes but no domain.
func (p *Provider) orphans(volumes []string, domains []Domain) []Machine {
	seen := map[UUID]bool{}
	for _, d := range domains {
		seen[d.UUID] = true
	}
	out := []Machine{}
	for _, name := range volumes {
		uuid, ok := machineOfVolume(p.cfg.Scope, name)
		if ok && !seen[uuid] {
			seen[uuid] = true
			out = append(out, Machine{ID: p.id(uuid), UUID: uuid, State: StateCreating, Addresses: []Address{}})
		}
	}
	return out
}

// addLeases gives all machines the addresses of their DHCP leases, with one question to the host.
func (p *Provider) addLeases(ctx context.Context, conn Conn, machines []listedMachine) error {
	var networks []string
	for _, m := range machines {
		networks = append(networks, m.md.networks()...)
	}
	slices.Sort(networks)
	if networks = slices.Compact(networks); len(networks) == 0 {
		return nil
	}
	records, err := conn.Addresses(ctx, AddressQuery{Networks: networks})
	if err != nil {
		return err
	}
	leases := byMAC(records)
	for i, m := range machines {
		if m.Libvirt.isActive() {
			macs := m.md.macs()
			machines[i].Addresses = chooseAddresses(recordsOf(leases, macs), m.UUID, macs)
		}
	}
	return nil
}

// addAddresses gives a running machine its addresses from every source.
func (*Provider) addAddresses(ctx context.Context, conn Conn, d Domain, md metadata, m *Machine) error {
	if !d.State.isActive() {
		return nil
	}
	records, err := conn.Addresses(ctx, AddressQuery{Networks: md.networks(), MACs: md.macs(), Domains: []UUID{d.UUID}})
	if err != nil {
		return err
	}
	m.Addresses = chooseAddresses(records, d.UUID, md.macs())
	return nil
}

// machineOf is the machine of a domain, without addresses.
func machineOf(id string, d Domain, md metadata) Machine {
	state, reason := machineState(md.Phase, d.State)
	return Machine{
		ID: id, UUID: d.UUID, Name: md.Name, OwnerUID: md.OwnerUID, Labels: md.labels(), CreatedAt: md.created(),
		State: state, Reason: reason, Libvirt: d.State, Addresses: []Address{},
	}
}

// plan is newPlan, and makes sure that there is a way to the image.
func (p *Provider) plan(spec Spec) (plan, error) {
	out, err := newPlan(p.host, p.cfg, spec)
	if err != nil {
		return plan{}, err
	}
	return out, p.images.sources.check(spec.Image)
}

// own parses a provider ID of this host.
func (p *Provider) own(id string) (UUID, error) {
	parsed, err := ParseID(id)
	if err != nil {
		return UUID{}, err
	}
	if parsed.Host != p.host.name {
		return UUID{}, invalidf("provider ID %q is of host %q, this is %q", id, parsed.Host, p.host.name)
	}
	return parsed.UUID, nil
}

func (p *Provider) id(uuid UUID) string { return ID{Host: p.host.name, UUID: uuid}.String() }

// exclusively runs fn on a connection while no other Create or Delete of this Provider works on the same machine.
func (p *Provider) exclusively(ctx context.Context, uuid UUID, fn func(Conn) error) error {
	unlock, err := p.locks.lock(ctx, uuid)
	if err != nil {
		return transient(nil, "waiting for another call on this machine: %w", err)
	}
	defer unlock()
	return p.conns.with(ctx, fn)
}
