package kvm2

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2/internal/rpcguard"
)

// libvirtConn is a Conn over go-libvirt. The client knows no contexts, and its Disconnect may hang, so each call runs
// in a goroutine of its own, and the way out is to close the network connection under it. A client is connected once
// and thrown away.
type libvirtConn struct {
	net    *rpcguard.Conn
	client *libvirt.Libvirt

	mu       sync.Mutex
	pools    map[string]libvirt.StoragePool // by name; libvirt finds them by UUID
	networks map[string]libvirt.Network     // likewise
}

var _ Conn = (*libvirtConn)(nil)

// oneConn gives go-libvirt the connection that is there.
type oneConn struct{ net.Conn }

func (c oneConn) Dial() (net.Conn, error) { return c.Conn, nil }

// openLibvirt starts a session of the driver over a network connection, which it takes over.
func openLibvirt(ctx context.Context, raw net.Conn, driver string) (*libvirtConn, error) {
	guarded := rpcguard.New(raw)
	client := libvirt.NewWithDialer(oneConn{rpcguard.BoundReplies(guarded)})
	c := &libvirtConn{net: guarded, client: client, pools: map[string]libvirt.StoragePool{}, networks: map[string]libvirt.Network{}}
	err := c.do(ctx, func() error { return client.ConnectToURI(libvirt.ConnectURI(driver)) })
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the network connection, which ends every goroutine of the client.
func (c *libvirtConn) Close() error { return c.net.Close() }

// Alive reports whether the connection has not ended yet. The client's own Disconnected may never say so.
func (c *libvirtConn) Alive() bool { return c.net.Err() == nil }

// Ping makes one round trip that costs the daemon nothing.
func (c *libvirtConn) Ping(ctx context.Context) error {
	_, err := fetch(ctx, c, c.client.ConnectGetLibVersion)
	return err
}

// fetch runs one call of the client and returns what it returned, or the context's error as soon as that ends.
func fetch[T any](ctx context.Context, c *libvirtConn, call func() (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	var zero T
	if err := ctx.Err(); err != nil {
		return zero, err
	}
	answer := make(chan outcome, 1)
	go func() {
		var o outcome
		defer func() {
			if p := recover(); p != nil { // the decoder met something that libvirt does not send
				o = outcome{err: fmt.Errorf("the reply cannot be decoded: %v", p)}
			}
			answer <- o
		}()
		o.value, o.err = call()
	}()
	select {
	case o := <-answer:
		return o.value, c.translate(o.err)
	case <-ctx.Done():
		_ = c.Close()
		return zero, ctx.Err()
	}
}

func (c *libvirtConn) do(ctx context.Context, call func() error) error {
	_, err := fetch(ctx, c, func() (struct{}, error) { return struct{}{}, call() })
	return err
}

// translate turns the client's errors into the seam's. After anything but an answer of libvirt the connection is
// closed: nobody knows what its other end still means to say.
func (c *libvirtConn) translate(err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[libvirt.Error](err); ok {
		return &LibvirtError{Code: int(e.Code), Message: e.Message}
	}
	if errors.Is(err, libvirt.ErrUnsupported) {
		return &LibvirtError{Code: int(libvirt.ErrNoSupport), Message: err.Error()}
	}
	cause := c.net.Err()
	_ = c.Close()
	if cause == nil || errors.Is(cause, net.ErrClosed) {
		return fmt.Errorf("libvirt connection: %w", err)
	}
	return fmt.Errorf("libvirt connection: %w: %w", err, cause)
}

// together runs calls at the same time, so that they share a round trip, and returns the first error in their order.
func together(calls ...func() error) error {
	errs := make([]error, len(calls))
	var wg sync.WaitGroup
	for i, call := range calls {
		wg.Go(func() { errs[i] = call() })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// isCode reports whether the client's error is libvirt's answer with that code.
func isCode(err error, code libvirt.ErrorNumber) bool {
	e, ok := errors.AsType[libvirt.Error](err)
	return ok && libvirt.ErrorNumber(e.Code) == code
}

func isAnswer(err error) bool {
	_, ok := errors.AsType[libvirt.Error](err)
	return ok
}

func (c *libvirtConn) HostInfo(ctx context.Context) (HostInfo, error) {
	return fetch(ctx, c, func() (HostInfo, error) {
		var info HostInfo
		var caps string
		err := together(
			func() (err error) { info.Hostname, err = c.client.ConnectGetHostname(); return err },
			func() (err error) { info.Libvirt, err = c.client.ConnectGetLibVersion(); return err },
			func() (err error) { info.Hypervisor, err = c.client.ConnectGetVersion(); return err },
			func() (err error) { caps, err = c.client.ConnectGetCapabilities(); return err },
			func() error {
				_, memory, cpus, _, _, _, _, _, err := c.client.NodeGetInfo()
				info.CPUs, info.MemoryBytes = max(int(cpus), 0), min(size(memory), math.MaxInt64/kib)*kib
				return err
			},
		)
		if err != nil {
			return HostInfo{}, err
		}
		return info, readCapabilities(caps, &info)
	})
}

// readCapabilities fills in what a host's capabilities XML tells.
func readCapabilities(xml string, info *HostInfo) error {
	var caps libvirtxml.Caps
	if err := caps.Unmarshal(xml); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	if caps.Host.CPU != nil {
		info.Arch = caps.Host.CPU.Arch
	}
	for _, g := range caps.Guests {
		if g.Arch.Name != info.Arch {
			continue
		}
		for _, d := range g.Arch.Domains {
			info.DomainTypes = append(info.DomainTypes, d.Type)
		}
	}
	slices.Sort(info.DomainTypes)
	info.DomainTypes = slices.Compact(info.DomainTypes)
	return nil
}

// metadataReaders bounds how many domains' metadata are asked for at once.
const metadataReaders = 64

func (c *libvirtConn) Domains(ctx context.Context) ([]Domain, error) {
	return fetch(ctx, c, func() ([]Domain, error) {
		records, err := c.client.ConnectGetAllDomainStats(nil, uint32(libvirt.DomainStatsState), 0)
		if err != nil {
			return nil, err
		}
		domains := make([]Domain, len(records))
		present := make([]bool, len(records))
		var calls []func() error
		for i, r := range records {
			calls = append(calls, func() (err error) {
				domains[i] = Domain{Name: r.Dom.Name, UUID: UUID(r.Dom.UUID), State: statsState(r.Params)}
				domains[i].Metadata, err = c.metadata(r.Dom)
				if isCode(err, libvirt.ErrNoDomain) {
					return nil // it has gone meanwhile
				}
				present[i] = true
				return err
			})
		}
		for batch := range slices.Chunk(calls, metadataReaders) {
			if err := together(batch...); err != nil {
				return nil, err
			}
		}
		var out []Domain
		for i, d := range domains {
			if present[i] {
				out = append(out, d)
			}
		}
		slices.SortFunc(out, func(a, b Domain) int { return strings.Compare(a.Name, b.Name) })
		return out, nil
	})
}

func statsState(params []libvirt.TypedParam) LibvirtState {
	var s LibvirtState
	for _, p := range params {
		v, ok := p.Value.I.(int32)
		if !ok {
			continue
		}
		switch p.Field {
		case "state.state":
			s.State = int(v)
		case "state.reason":
			s.Reason = int(v)
		}
	}
	return s
}

// metadata reads a domain's kvm2 metadata; empty when it has none.
func (c *libvirtConn) metadata(d libvirt.Domain) (string, error) {
	xml, err := c.client.DomainGetMetadata(d, int32(libvirt.DomainMetadataElement), libvirt.OptString{MetadataNamespace}, libvirt.DomainAffectCurrent)
	if isCode(err, libvirt.ErrNoDomainMetadata) {
		return "", nil
	}
	return xml, err
}

func (c *libvirtConn) DomainByName(ctx context.Context, name string) (Domain, error) {
	return fetch(ctx, c, func() (Domain, error) {
		d, err := c.client.DomainLookupByName(name)
		if err != nil {
			return Domain{}, err
		}
		return c.domain(d.UUID)
	})
}

func (c *libvirtConn) DomainByUUID(ctx context.Context, uuid UUID) (Domain, error) {
	return fetch(ctx, c, func() (Domain, error) { return c.domain(libvirt.UUID(uuid)) })
}

// domain asks for all of a domain in one round trip. libvirt finds domains by UUID alone. The answers may be of
// different moments: a domain that only one of them does not find is just being defined or has just gone, and counts
// as absent; it must not look like one without metadata.
func (c *libvirtConn) domain(uuid libvirt.UUID) (Domain, error) {
	ref := libvirt.Domain{UUID: uuid}
	out := Domain{UUID: UUID(uuid)}
	err := together(
		func() error {
			d, err := c.client.DomainLookupByUUID(uuid)
			out.Name = d.Name
			return err
		},
		func() error {
			state, reason, err := c.client.DomainGetState(ref, 0)
			out.State = LibvirtState{State: int(state), Reason: int(reason)}
			return err
		},
		func() (err error) {
			out.Metadata, err = c.metadata(ref)
			return err
		},
	)
	return out, err
}

func (c *libvirtConn) DefineDomain(ctx context.Context, xml string) error {
	return c.do(ctx, func() error {
		_, err := c.client.DomainDefineXMLFlags(xml, libvirt.DomainDefineValidate)
		return err
	})
}

func (c *libvirtConn) StartDomain(ctx context.Context, uuid UUID) error {
	return c.do(ctx, func() error { return c.client.DomainCreate(libvirt.Domain{UUID: libvirt.UUID(uuid)}) })
}

func (c *libvirtConn) SetDomainMetadata(ctx context.Context, uuid UUID, xml string) error {
	const both = libvirt.DomainAffectLive | libvirt.DomainAffectConfig
	return c.do(ctx, func() error {
		var err error
		// A stopped domain has no running configuration, a transient one no persistent: libvirt answers 55.
		for _, where := range []libvirt.DomainModificationImpact{both, libvirt.DomainAffectConfig, libvirt.DomainAffectLive} {
			err = c.client.DomainSetMetadata(libvirt.Domain{UUID: libvirt.UUID(uuid)}, int32(libvirt.DomainMetadataElement),
				libvirt.OptString{xml}, libvirt.OptString{"kvm2"}, libvirt.OptString{MetadataNamespace}, where)
			if !isCode(err, libvirt.ErrOperationInvalid) {
				return err
			}
		}
		return err
	})
}

func (c *libvirtConn) DestroyDomain(ctx context.Context, uuid UUID, mode DestroyMode) error {
	var flags libvirt.DomainDestroyFlagsValues
	if mode == DestroyGraceful {
		flags = libvirt.DomainDestroyGraceful
	}
	return c.do(ctx, func() error { return c.client.DomainDestroyFlags(libvirt.Domain{UUID: libvirt.UUID(uuid)}, flags) })
}

// undefineFlags name what goes with a domain, newest first: a daemon that does not know a flag answers 8, and is
// asked again without it.
var undefineFlags = []libvirt.DomainUndefineFlagsValues{
	libvirt.DomainUndefineTpm,
	libvirt.DomainUndefineCheckpointsMetadata,
	libvirt.DomainUndefineNvram,
	libvirt.DomainUndefineSnapshotsMetadata,
	libvirt.DomainUndefineManagedSave,
}

func (c *libvirtConn) UndefineDomain(ctx context.Context, uuid UUID) error {
	return c.do(ctx, func() error {
		var err error
		for known := range len(undefineFlags) + 1 {
			var flags libvirt.DomainUndefineFlagsValues
			for _, f := range undefineFlags[known:] {
				flags |= f
			}
			err = c.client.DomainUndefineFlags(libvirt.Domain{UUID: libvirt.UUID(uuid)}, flags)
			if !isCode(err, libvirt.ErrInvalidArg) {
				return err
			}
		}
		return err
	})
}

func (c *libvirtConn) Addresses(ctx context.Context, query AddressQuery) ([]AddressRecord, error) {
	return fetch(ctx, c, func() ([]AddressRecord, error) {
		var mu sync.Mutex
		var out []AddressRecord
		// keep takes what a source says; a source that cannot answer says nothing.
		keep := func(records []AddressRecord, err error) error {
			mu.Lock()
			defer mu.Unlock()
			out = append(out, records...)
			if isAnswer(err) || errors.Is(err, libvirt.ErrUnsupported) {
				return nil
			}
			return err
		}
		var calls []func() error
		for _, network := range query.Networks {
			for _, mac := range leaseFilters(query.MACs) {
				calls = append(calls, func() error { return keep(c.leases(network, mac)) })
			}
		}
		for _, uuid := range query.Domains {
			calls = append(calls,
				func() error {
					return keep(c.interfaceAddresses(uuid, libvirt.DomainInterfaceAddressesSrcAgent, SourceAgent))
				},
				func() error {
					return keep(c.interfaceAddresses(uuid, libvirt.DomainInterfaceAddressesSrcArp, SourceARP))
				})
		}
		return out, together(calls...)
	})
}

// leaseFilters are the MACs by which a network's leases are asked for, one question each: libvirt takes one MAC, or none
// for all leases.
func leaseFilters(macs []string) []libvirt.OptString {
	if len(macs) == 0 {
		return []libvirt.OptString{nil}
	}
	var out []libvirt.OptString
	for _, mac := range macs {
		out = append(out, libvirt.OptString{mac})
	}
	return out
}

func (c *libvirtConn) leases(network string, mac libvirt.OptString) ([]AddressRecord, error) {
	leases, err := withNetwork(c, network, func(n libvirt.Network) ([]libvirt.NetworkDhcpLease, error) {
		leases, _, err := c.client.NetworkGetDhcpLeases(n, mac, 1, 0)
		return leases, err
	})
	var out []AddressRecord
	for _, l := range leases {
		ip, parseErr := netip.ParseAddr(l.Ipaddr)
		if parseErr != nil || len(l.Mac) == 0 {
			continue
		}
		r := AddressRecord{Source: SourceLease, MAC: l.Mac[0], IP: ip}
		if l.Expirytime > 0 {
			r.Expiry = time.Unix(l.Expirytime, 0)
		}
		out = append(out, r)
	}
	return out, err
}

func (c *libvirtConn) interfaceAddresses(uuid UUID, from libvirt.DomainInterfaceAddressesSource, source AddressSource) ([]AddressRecord, error) {
	interfaces, err := c.client.DomainInterfaceAddresses(libvirt.Domain{UUID: libvirt.UUID(uuid)}, uint32(from), 0)
	var out []AddressRecord
	for _, i := range interfaces {
		if len(i.Hwaddr) == 0 {
			continue
		}
		for _, a := range i.Addrs {
			if ip, parseErr := netip.ParseAddr(a.Addr); parseErr == nil {
				out = append(out, AddressRecord{Source: source, Domain: uuid, MAC: i.Hwaddr[0], IP: ip})
			}
		}
	}
	return out, err
}

func (c *libvirtConn) Pool(ctx context.Context, name string) (Pool, error) {
	return fetch(ctx, c, func() (Pool, error) {
		return withPool(c, name, func(p libvirt.StoragePool) (Pool, error) {
			out := Pool{Name: name}
			var xml string
			err := together(
				func() error {
					state, capacity, allocated, available, err := c.client.StoragePoolGetInfo(p)
					out.Active = libvirt.StoragePoolState(state) == libvirt.StoragePoolRunning
					out.CapacityBytes, out.AllocatedBytes, out.AvailableBytes = size(capacity), size(allocated), size(available)
					return err
				},
				func() (err error) { xml, err = c.client.StoragePoolGetXMLDesc(p, 0); return err },
			)
			if err != nil {
				return Pool{}, err
			}
			out.TargetPath, err = readPoolTarget(xml)
			return out, err
		})
	})
}

// readPoolTarget reads where a pool has its volumes from its XML.
func readPoolTarget(xml string) (string, error) {
	var pool libvirtxml.StoragePool
	if err := pool.Unmarshal(xml); err != nil {
		return "", fmt.Errorf("storage pool: %w", err)
	}
	if pool.Target == nil {
		return "", nil
	}
	return pool.Target.Path, nil
}

func (c *libvirtConn) RefreshPool(ctx context.Context, name string) error {
	_, err := fetch(ctx, c, func() (struct{}, error) {
		return withPool(c, name, func(p libvirt.StoragePool) (struct{}, error) { return struct{}{}, c.client.StoragePoolRefresh(p, 0) })
	})
	return err
}

func (c *libvirtConn) Network(ctx context.Context, name string) (Network, error) {
	return fetch(ctx, c, func() (Network, error) {
		return withNetwork(c, name, func(n libvirt.Network) (Network, error) {
			active, err := c.client.NetworkIsActive(n)
			return Network{Name: name, Active: active == 1}, err
		})
	})
}

func (c *libvirtConn) VolumeNames(ctx context.Context, pool string) ([]string, error) {
	return fetch(ctx, c, func() ([]string, error) {
		return withPool(c, pool, func(p libvirt.StoragePool) ([]string, error) {
			volumes, _, err := c.client.StoragePoolListAllVolumes(p, 1, 0)
			var names []string
			for _, v := range volumes {
				names = append(names, v.Name)
			}
			slices.Sort(names)
			return names, err
		})
	})
}

// volumeReaders bounds how many volumes are asked for at once.
const volumeReaders = 64

func (c *libvirtConn) Volumes(ctx context.Context, pool string) ([]Volume, error) {
	names, err := c.VolumeNames(ctx, pool)
	if err != nil {
		return nil, err
	}
	return fetch(ctx, c, func() ([]Volume, error) {
		volumes := make([]Volume, len(names))
		var calls []func() error
		for i, name := range names {
			calls = append(calls, func() (err error) {
				volumes[i], err = c.volume(pool, name)
				if isCode(err, libvirt.ErrNoStorageVol) {
					return nil // it has gone meanwhile
				}
				return err
			})
		}
		for batch := range slices.Chunk(calls, volumeReaders) {
			if err := together(batch...); err != nil {
				return nil, err
			}
		}
		return slices.DeleteFunc(volumes, func(v Volume) bool { return v.Name == "" }), nil
	})
}

// volumeRef names a volume. libvirt finds volumes by pool and name alone.
func volumeRef(pool, name string) libvirt.StorageVol {
	return libvirt.StorageVol{Pool: pool, Name: name}
}

func (c *libvirtConn) Volume(ctx context.Context, pool, name string) (Volume, error) {
	return fetch(ctx, c, func() (Volume, error) { return c.volume(pool, name) })
}

func (c *libvirtConn) volume(pool, name string) (Volume, error) {
	xml, err := c.client.StorageVolGetXMLDesc(volumeRef(pool, name), 0)
	if err != nil {
		return Volume{}, err
	}
	return readVolume(xml)
}

// readVolume reads a volume's XML.
func readVolume(xml string) (Volume, error) {
	var v libvirtxml.StorageVolume
	if err := v.Unmarshal(xml); err != nil {
		return Volume{}, fmt.Errorf("storage volume: %w", err)
	}
	out := Volume{Name: v.Name, CapacityBytes: sizeOf(v.Capacity), PhysicalBytes: sizeOf(v.Physical), AllocatedBytes: sizeOf(v.Allocation)}
	if v.Target != nil {
		out.Path, out.Format = v.Target.Path, formatOf(v.Target.Format)
	}
	if v.BackingStore != nil {
		out.BackingPath, out.BackingFormat = v.BackingStore.Path, formatOf(v.BackingStore.Format)
	}
	return out, nil
}

func formatOf(f *libvirtxml.StorageVolumeTargetFormat) string {
	if f == nil {
		return ""
	}
	return f.Type
}

// sizeOf returns a size in bytes, the only unit in which libvirt describes a volume.
func sizeOf(s *libvirtxml.StorageVolumeSize) int64 {
	if s == nil {
		return 0
	}
	return size(s.Value)
}

// size returns a number of bytes that a host tells, which may be more than there are.
func size(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

func (c *libvirtConn) CreateVolume(ctx context.Context, pool, xml string) error {
	_, err := fetch(ctx, c, func() (libvirt.StorageVol, error) {
		return withPool(c, pool, func(p libvirt.StoragePool) (libvirt.StorageVol, error) {
			return c.client.StorageVolCreateXML(p, xml, 0)
		})
	})
	return err
}

func (c *libvirtConn) DeleteVolume(ctx context.Context, pool, name string) error {
	return c.do(ctx, func() error { return c.client.StorageVolDelete(volumeRef(pool, name), 0) })
}

// withPool runs a call on a pool by its name. The UUID, by which libvirt finds it, is remembered; when it no longer
// holds, the pool was made anew, and is looked up again.
func withPool[T any](c *libvirtConn, name string, call func(libvirt.StoragePool) (T, error)) (T, error) {
	return remembering(&c.mu, c.pools, name, libvirt.ErrNoStoragePool, c.client.StoragePoolLookupByName, call)
}

func withNetwork[T any](c *libvirtConn, name string, call func(libvirt.Network) (T, error)) (T, error) {
	return remembering(&c.mu, c.networks, name, libvirt.ErrNoNetwork, c.client.NetworkLookupByName, call)
}

func remembering[R, T any](mu *sync.Mutex, known map[string]R, name string, absent libvirt.ErrorNumber, lookup func(string) (R, error), call func(R) (T, error)) (T, error) {
	mu.Lock()
	ref, ok := known[name]
	mu.Unlock()
	if ok {
		v, err := call(ref)
		if !isCode(err, absent) {
			return v, err
		}
	}
	ref, err := lookup(name)
	if err != nil {
		var zero T
		return zero, err
	}
	mu.Lock()
	known[name] = ref
	mu.Unlock()
	return call(ref)
}
