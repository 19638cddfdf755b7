package kvm2

import (
	"cmp"
	"context"
	"slices"
)

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
	owners := p.ownersOf(volumes)
	machines, err := p.listed(domains, owners)
	if err != nil {
		return nil, err
	}
	if err := p.addLeases(ctx, conn, machines); err != nil {
		return nil, err
	}
	out := p.orphans(owners, domains)
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
func (p *Provider) listed(domains []Domain, owners map[UUID]bool) ([]listedMachine, error) {
	var out []listedMachine
	for _, d := range domains {
		md, err := guard(p.cfg.Scope, d)
		if err == nil {
			out = append(out, listedMachine{machineOf(p.id(d.UUID), d, md), md})
			continue
		}
		if owners[d.UUID] || foreignInScope(p.cfg.Scope, d, err) {
			return nil, err
		}
	}
	return out, nil
}

// ownersOf are the machines of the scope that have volumes.
func (p *Provider) ownersOf(volumes []string) map[UUID]bool {
	owners := map[UUID]bool{}
	for _, name := range volumes {
		if uuid, ok := machineOfVolume(p.cfg.Scope, name); ok {
			owners[uuid] = true
		}
	}
	return owners
}

// orphans are the machines that have volumes but no domain, in no order.
func (p *Provider) orphans(owners map[UUID]bool, domains []Domain) []Machine {
	seen := map[UUID]bool{}
	for _, d := range domains {
		seen[d.UUID] = true
	}
	out := []Machine{}
	for uuid := range owners {
		if !seen[uuid] {
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
