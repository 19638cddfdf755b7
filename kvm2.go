package kvm2

import (
	"context"
	"fmt"
	"time"

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
