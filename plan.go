package kvm2

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"
)

// plan is a validated Spec with all that follows from it: identity, names, defaults.
type plan struct {
	config Config // with its defaults
	spec   Spec   // with its defaults
	uuid   UUID
	id     string // the provider ID
	domain string // the domain's name
	hash   string // of the hardware

	systemDaemon bool
}

func newPlan(h hostIdentity, c Config, s Spec) (plan, error) {
	if err := s.Validate(); err != nil {
		return plan{}, err
	}
	s = s.withDefaults(c)
	if s.Firmware == FirmwareBIOS && c.Arch == archARM {
		return plan{}, invalidf("firmware: %q: %s has no BIOS; want %q", s.Firmware, c.Arch, FirmwareEFI)
	}
	if s.CPUs > maxX86CPUs && c.Arch == archX86 {
		return plan{}, invalidf("cpus: %d: want at most %d on %s", s.CPUs, maxX86CPUs, c.Arch)
	}
	hash, err := specHash(s)
	if err != nil {
		return plan{}, err
	}
	uuid := MachineUUID(c.Scope, s.OwnerUID)
	return plan{
		config: c, spec: s, uuid: uuid, hash: hash,
		id:           ID{Host: h.name, UUID: uuid}.String(),
		domain:       domainName(c.Scope, s.Name),
		systemDaemon: h.systemDaemon,
	}, nil
}

// maxX86CPUs is how many CPUs an x86 guest can have without an IOMMU that extends interrupt IDs beyond 8 bits, which
// kvm2's domains do not have (https://libvirt.org/formatdomain.html#iommu-devices).
const maxX86CPUs = 255

// hostIdentity is what a Provider knows of its host from the Config alone.
type hostIdentity struct {
	name         string
	systemDaemon bool
}

func (p plan) volume(part string) string     { return volumePrefix(p.config.Scope, p.uuid) + part }
func (p plan) dataVolume(disk string) string { return p.volume(volumeData + disk) }

// volumes are the names of all volumes of the machine.
func (p plan) volumes() []string {
	names := []string{p.volume(volumeRoot), p.volume(volumeSeed)}
	for _, d := range p.spec.Disks {
		names = append(names, p.dataVolume(d.Name))
	}
	return names
}

func (p plan) metadata(created time.Time) metadata {
	return metadata{
		Version: metadataVersion, Scope: p.config.Scope, OwnerUID: p.spec.OwnerUID, Name: p.spec.Name,
		Phase: phaseDefined, Created: created.UTC().Format(time.RFC3339), SpecHash: p.hash, Pool: p.config.Pool,
		Labels: sortedLabels(p.spec.Labels),
	}
}

// unborn is the machine as long as it has no domain.
func (p plan) unborn() Machine {
	return Machine{
		ID: p.id, UUID: p.uuid, Name: p.spec.Name, OwnerUID: p.spec.OwnerUID, Labels: maps.Clone(p.spec.Labels),
		State: StateCreating, Addresses: []Address{},
	}
}

// guard decides whether a domain is a machine of this scope, and returns its metadata. What is not ours is
// ErrForeignOwner.
func guard(scope string, d Domain) (metadata, error) {
	if d.Metadata == "" {
		return metadata{}, permanent(ErrForeignOwner, "domain %q has no kvm2 metadata", d.Name)
	}
	m, err := parseMetadata(d.Metadata)
	if err != nil {
		return metadata{}, fmt.Errorf("domain %q: %w", d.Name, err)
	}
	if m.Scope != scope {
		return metadata{}, permanent(ErrForeignOwner, "domain %q belongs to scope %q, not %q", d.Name, clip(m.Scope), scope)
	}
	if MachineUUID(m.Scope, m.OwnerUID) != d.UUID {
		return metadata{}, permanent(ErrForeignOwner, "domain %q has metadata that belong to another machine", d.Name)
	}
	return m, nil
}

// adopt decides whether a domain is the very machine that is planned.
func (p plan) adopt(d Domain) (metadata, error) {
	m, err := guard(p.config.Scope, d)
	if err != nil {
		return metadata{}, err
	}
	if m.OwnerUID != p.spec.OwnerUID {
		return metadata{}, permanent(ErrForeignOwner, "domain %q belongs to owner %q, not %q", d.Name, clip(m.OwnerUID), p.spec.OwnerUID)
	}
	if d.Name != p.domain {
		return metadata{}, invalidf("name: %q: the machine of owner %q is called %q; a name cannot be changed", p.spec.Name, p.spec.OwnerUID, clip(m.Name))
	}
	return m, nil
}

// foreignInScope reports whether a domain that guard refuses looks as if it might still be of the scope: List must
// not pass over it in silence.
func foreignInScope(scope string, d Domain, err error) bool {
	return d.Metadata != "" && errors.Is(err, ErrForeignOwner) && strings.HasPrefix(d.Name, scope+"-") && !isOtherScope(scope, d)
}

// isOtherScope reports whether readable metadata name another scope.
func isOtherScope(scope string, d Domain) bool {
	m, err := parseMetadata(d.Metadata)
	return err == nil && m.Scope != scope
}
