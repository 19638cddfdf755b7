package fake

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/kvm2/kvm2"
)

// conn is one session.
type conn struct {
	host   *Host
	number int
	busy   atomic.Bool
	done   chan struct{} // closed when the session has ended

	once  sync.Once
	cause error // why the session ended; set before done is closed
}

var _ kvm2.Conn = (*conn)(nil)

func (h *Host) newConn() *conn { return &conn{host: h, done: make(chan struct{})} }

// errClosed is what a session says after Close.
var errClosed = fmt.Errorf("fake: the session is closed: %w", net.ErrClosed)

// Close ends the session.
func (c *conn) Close() error {
	c.end(errClosed)
	return nil
}

// Alive reports whether the session has not ended yet, so that a pool of sessions need not find out by a call.
func (c *conn) Alive() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

func (c *conn) end(cause error) {
	c.once.Do(func() {
		c.cause = cause
		close(c.done)
	})
	c.host.forget(c)
}

// reason returns why the session ended. It may be called once done is closed.
func (c *conn) reason() error { return c.cause }

// fail ends the session unless err is libvirt's own answer.
func (c *conn) fail(err error) error {
	if !isAnswer(err) {
		c.end(err)
	}
	return err
}

func (c *conn) enter() error {
	if !c.busy.CompareAndSwap(false, true) {
		panic("fake: a Conn is used by two goroutines at once")
	}
	select {
	case <-c.done:
		c.leave()
		return fmt.Errorf("fake: a call on a session that has ended: %w", c.reason())
	default:
		return nil
	}
}

func (c *conn) leave() { c.busy.Store(false) }

// ask runs a call whose effect needs nothing but the host's state.
func ask[T any](ctx context.Context, c *conn, call Call, effect func(*Host) (T, error)) (T, error) {
	return run(ctx, c, call, func(plan) (T, error) {
		c.host.mu.Lock()
		defer c.host.mu.Unlock()
		c.host.settle()
		return effect(c.host)
	})
}

func tell(ctx context.Context, c *conn, call Call, effect func(*Host) error) error {
	_, err := ask(ctx, c, call, func(h *Host) (struct{}, error) { return struct{}{}, effect(h) })
	return err
}

func (c *conn) HostInfo(ctx context.Context) (kvm2.HostInfo, error) {
	return ask(ctx, c, Call{Op: kvm2.OpHostInfo}, (*Host).info)
}

func (c *conn) Domains(ctx context.Context) ([]kvm2.Domain, error) {
	return ask(ctx, c, Call{Op: kvm2.OpDomainList}, func(h *Host) ([]kvm2.Domain, error) { return h.listDomains(), nil })
}

func (c *conn) DomainByName(ctx context.Context, name string) (kvm2.Domain, error) {
	return ask(ctx, c, Call{Op: kvm2.OpDomainLookup, Object: name}, func(h *Host) (kvm2.Domain, error) {
		d := h.domainNamed(name)
		if d == nil {
			return kvm2.Domain{}, answer(codeNoDomain, "Domain not found: no domain with matching name '%s'", name)
		}
		return d.seen(), nil
	})
}

func (c *conn) DomainByUUID(ctx context.Context, uuid kvm2.UUID) (kvm2.Domain, error) {
	return ask(ctx, c, Call{Op: kvm2.OpDomainLookup, UUID: uuid}, func(h *Host) (kvm2.Domain, error) {
		d := h.domains[uuid]
		if d == nil {
			return kvm2.Domain{}, answer(codeNoDomain, "Domain not found: no domain with matching uuid '%s'", uuid)
		}
		return d.seen(), nil
	})
}

func (c *conn) DefineDomain(ctx context.Context, xml string) error {
	name, detail := describeDomain(xml)
	return tell(ctx, c, Call{Op: kvm2.OpDomainDefine, Object: name, Detail: detail}, func(h *Host) error {
		return h.define(xml, validated)
	})
}

// onDomain runs a call on a domain that has to exist.
func (c *conn) onDomain(ctx context.Context, call Call, effect func(*Host, *domain) error) error {
	return tell(ctx, c, call, func(h *Host) error {
		d := h.domains[call.UUID]
		if d == nil {
			// Behind the UUID libvirt repeats the name that the client sent, and kvm2 sends none.
			return answer(codeNoDomain, "Domain not found: no domain with matching uuid '%s' ()", call.UUID)
		}
		return effect(h, d)
	})
}

func (c *conn) StartDomain(ctx context.Context, uuid kvm2.UUID) error {
	return c.onDomain(ctx, Call{Op: kvm2.OpDomainStart, UUID: uuid}, (*Host).start)
}

func (c *conn) SetDomainMetadata(ctx context.Context, uuid kvm2.UUID, xml string) error {
	call := Call{Op: kvm2.OpDomainSetMetadata, UUID: uuid, Detail: fmt.Sprintf("%d bytes", len(xml))}
	return c.onDomain(ctx, call, func(_ *Host, d *domain) error { return d.setMetadata(xml) })
}

func (c *conn) DestroyDomain(ctx context.Context, uuid kvm2.UUID, mode kvm2.DestroyMode) error {
	details := map[kvm2.DestroyMode]string{kvm2.DestroyGraceful: "graceful", kvm2.DestroyForced: "forced"}
	detail, ok := details[mode]
	if !ok {
		return c.fail(fmt.Errorf("fake: unsupported: DestroyMode %d", mode))
	}
	return c.onDomain(ctx, Call{Op: kvm2.OpDomainDestroy, UUID: uuid, Detail: detail}, (*Host).destroy)
}

func (c *conn) UndefineDomain(ctx context.Context, uuid kvm2.UUID) error {
	return c.onDomain(ctx, Call{Op: kvm2.OpDomainUndefine, UUID: uuid}, (*Host).undefine)
}

func (c *conn) Addresses(ctx context.Context, query kvm2.AddressQuery) ([]kvm2.AddressRecord, error) {
	call := Call{Op: kvm2.OpDomainAddresses, Detail: fmt.Sprintf("networks %q, MACs %q, %d domains", query.Networks, query.MACs, len(query.Domains))}
	if len(query.Domains) == 1 {
		call.UUID = query.Domains[0]
	}
	return ask(ctx, c, call, func(h *Host) ([]kvm2.AddressRecord, error) { return h.addresses(query), nil })
}

func (c *conn) Pool(ctx context.Context, name string) (kvm2.Pool, error) {
	return ask(ctx, c, Call{Op: kvm2.OpPoolLookup, Object: name}, func(h *Host) (kvm2.Pool, error) {
		p, err := h.poolNamed(name)
		if err != nil {
			return kvm2.Pool{}, err
		}
		return p.seen(), nil
	})
}

func (c *conn) RefreshPool(ctx context.Context, name string) error {
	return tell(ctx, c, Call{Op: kvm2.OpPoolRefresh, Object: name}, func(h *Host) error {
		p, err := h.activePool(name)
		if err != nil {
			return err
		}
		p.refresh()
		return nil
	})
}

func (c *conn) Network(ctx context.Context, name string) (kvm2.Network, error) {
	return ask(ctx, c, Call{Op: kvm2.OpNetworkLookup, Object: name}, func(h *Host) (kvm2.Network, error) {
		n, err := h.networkNamed(name)
		if err != nil {
			return kvm2.Network{}, err
		}
		return kvm2.Network{Name: n.name, Active: n.active}, nil
	})
}

func (c *conn) VolumeNames(ctx context.Context, pool string) ([]string, error) {
	return ask(ctx, c, Call{Op: kvm2.OpVolumeList, Pool: pool}, func(h *Host) ([]string, error) {
		p, err := h.activePool(pool)
		if err != nil {
			return nil, err
		}
		return p.volumeNames(), nil
	})
}

func (c *conn) Volumes(ctx context.Context, pool string) ([]kvm2.Volume, error) {
	return ask(ctx, c, Call{Op: kvm2.OpVolumeList, Pool: pool}, func(h *Host) ([]kvm2.Volume, error) {
		p, err := h.activePool(pool)
		if err != nil {
			return nil, err
		}
		var out []kvm2.Volume
		for _, name := range p.volumeNames() {
			if v, err := p.seenVolume(p.volumes[name]); err == nil {
				out = append(out, v)
			}
		}
		return out, nil
	})
}

func (c *conn) Volume(ctx context.Context, pool, name string) (kvm2.Volume, error) {
	return ask(ctx, c, Call{Op: kvm2.OpVolumeLookup, Pool: pool, Object: name}, func(h *Host) (kvm2.Volume, error) {
		p, v, err := h.volumeNamed(pool, name)
		if err != nil {
			return kvm2.Volume{}, err
		}
		return p.seenVolume(v)
	})
}

func (c *conn) CreateVolume(ctx context.Context, pool, xml string) error {
	name, detail := describeVolume(xml)
	return tell(ctx, c, Call{Op: kvm2.OpVolumeCreate, Pool: pool, Object: name, Detail: detail}, func(h *Host) error {
		return h.createVolume(pool, xml)
	})
}

func (c *conn) DeleteVolume(ctx context.Context, pool, name string) error {
	return tell(ctx, c, Call{Op: kvm2.OpVolumeDelete, Pool: pool, Object: name}, func(h *Host) error {
		p, v, err := h.volumeNamed(pool, name)
		if err != nil {
			return err
		}
		p.deleteVolume(v)
		return nil
	})
}

func (c *conn) UploadVolume(ctx context.Context, pool, name string, offset int64, r io.Reader) error {
	_, err := run(ctx, c, Call{Op: kvm2.OpVolumeUpload, Pool: pool, Object: name}, func(p plan) (struct{}, error) {
		return struct{}{}, c.upload(ctx, p, pool, name, offset, r)
	})
	return err
}

func (c *conn) DownloadVolume(ctx context.Context, pool, name string, w io.Writer) error {
	_, err := run(ctx, c, Call{Op: kvm2.OpVolumeDownload, Pool: pool, Object: name}, func(p plan) (struct{}, error) {
		return struct{}{}, c.download(ctx, p, pool, name, w)
	})
	return err
}
