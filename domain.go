package kvm2

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"path"
	"slices"
	"time"

	"libvirt.org/go/libvirtxml"
)

// The architectures that kvm2 builds domains for, by libvirt's names.
const (
	archX86 = "x86_64"
	archARM = "aarch64"
)

// sparePorts are PCI Express root ports beyond those that the domain's own devices take, for devices that are
// plugged in later: a running guest cannot get more (https://libvirt.org/pci-hotplug.html).
const sparePorts = 4

// domainInput is all that a machine's domain XML depends on.
type domainInput struct {
	plan    plan
	pool    Pool
	created time.Time
	mutate  func(*libvirtxml.Domain)
}

// domainName is the name of a machine's domain.
func domainName(scope, name string) string { return scope + "-" + name }

// macAddress derives the MAC of a machine's interface. 52: marks it as locally administered and unicast; the other
// 40 bits make a clash within one network unlikely.
func macAddress(uuid UUID, index int) string {
	h := sha256.Sum256(binary.BigEndian.AppendUint32(uuid[:], uint32(index)))
	return fmt.Sprintf("52:%02x:%02x:%02x:%02x:%02x", h[0], h[1], h[2], h[3], h[4])
}

// domainXML builds the domain of a machine: deterministic, so that defining it twice changes nothing.
func domainXML(in domainInput) (string, error) {
	d := buildDomain(in)
	if in.mutate != nil {
		in.mutate(d)
		reassert(d, in)
	}
	md := in.plan.metadata(in.created)
	md.Interfaces = interfacesOf(d)
	element, err := md.namespaced()
	if err != nil {
		return "", fmt.Errorf("metadata: %w", err)
	}
	d.Metadata = &libvirtxml.DomainMetadata{XML: joinMetadata(d.Metadata, element)}
	return d.Marshal()
}

func buildDomain(in domainInput) *libvirtxml.Domain {
	s, c := in.plan.spec, in.plan.config
	return &libvirtxml.Domain{
		Type:       c.DomainType,
		Name:       in.plan.domain,
		UUID:       in.plan.uuid.String(),
		Memory:     &libvirtxml.DomainMemory{Value: uint(s.MemoryBytes / kib), Unit: "KiB"},
		VCPU:       &libvirtxml.DomainVCPU{Placement: "static", Value: uint(s.CPUs)},
		OS:         buildOS(c.Arch, s.Firmware),
		Features:   buildFeatures(c.Arch),
		CPU:        buildCPU(c.DomainType),
		Clock:      &libvirtxml.DomainClock{Offset: "utc"},
		OnPoweroff: "destroy",
		OnReboot:   "restart",
		OnCrash:    "destroy",
		PM: &libvirtxml.DomainPM{
			SuspendToMem:  &libvirtxml.DomainPMPolicy{Enabled: "no"},
			SuspendToDisk: &libvirtxml.DomainPMPolicy{Enabled: "no"},
		},
		Devices: buildDevices(in),
	}
}

func buildOS(arch string, firmware Firmware) *libvirtxml.DomainOS {
	machine := "q35"
	if arch == archARM {
		machine = "virt"
	}
	os := &libvirtxml.DomainOS{
		Type:        &libvirtxml.DomainOSType{Arch: arch, Machine: machine, Type: "hvm"},
		BootDevices: []libvirtxml.DomainBootDevice{{Dev: "hd"}},
	}
	if firmware == FirmwareEFI {
		os.Firmware = "efi"
	}
	return os
}

func buildFeatures(arch string) *libvirtxml.DomainFeatureList {
	f := &libvirtxml.DomainFeatureList{ACPI: &libvirtxml.DomainFeature{}}
	if arch == archX86 {
		f.APIC = &libvirtxml.DomainFeatureAPIC{}
	}
	return f
}

func buildCPU(domainType string) *libvirtxml.DomainCPU {
	if domainType == "qemu" {
		return &libvirtxml.DomainCPU{Mode: "maximum"}
	}
	return &libvirtxml.DomainCPU{Mode: "host-passthrough"}
}

func buildDevices(in domainInput) *libvirtxml.DomainDeviceList {
	devices := &libvirtxml.DomainDeviceList{
		Disks:      buildDisks(in.plan, in.pool),
		Interfaces: buildInterfaces(in.plan),
		Channels: []libvirtxml.DomainChannel{{
			Source: &libvirtxml.DomainChardevSource{UNIX: &libvirtxml.DomainChardevSourceUNIX{}},
			Target: &libvirtxml.DomainChannelTarget{VirtIO: &libvirtxml.DomainChannelTargetVirtIO{Name: "org.qemu.guest_agent.0"}},
		}},
		Serials:    []libvirtxml.DomainSerial{buildSerial(in.plan)},
		MemBalloon: &libvirtxml.DomainMemBalloon{Model: "virtio", FreePageReporting: "on"},
		RNGs: []libvirtxml.DomainRNG{{
			Model:   "virtio",
			Backend: &libvirtxml.DomainRNGBackend{Random: &libvirtxml.DomainRNGBackendRandom{Device: "/dev/urandom"}},
		}},
	}
	// The balloon, the random number generator and the serial bus take a port each.
	ports := len(devices.Disks) + len(devices.Interfaces) + 3 + sparePorts
	devices.Controllers = buildControllers(ports)
	return devices
}

// buildSerial gives the console. Its log stands beside qemu's own, where the host's log rotation finds both; a
// session daemon has no such place.
func buildSerial(p plan) libvirtxml.DomainSerial {
	serial := libvirtxml.DomainSerial{Source: &libvirtxml.DomainChardevSource{Pty: &libvirtxml.DomainChardevSourcePty{}}}
	if p.systemDaemon {
		serial.Log = &libvirtxml.DomainChardevLog{File: "/var/log/libvirt/qemu/" + p.domain + "-console.log", Append: "on"}
	}
	return serial
}

func buildControllers(ports int) []libvirtxml.DomainController {
	root := uint(0)
	controllers := []libvirtxml.DomainController{
		{Type: "usb", Index: &root, Model: "none"},
		{Type: "pci", Index: &root, Model: "pcie-root"},
	}
	for i := range ports {
		index := uint(i + 1)
		controllers = append(controllers, libvirtxml.DomainController{Type: "pci", Index: &index, Model: "pcie-root-port"})
	}
	return controllers
}

// buildDisks gives the root disk, the data disks in the order of the Spec, and the seed last. The seed is a
// read-only virtio disk: Debian's cloud kernels have no driver for a SATA cdrom.
func buildDisks(p plan, pool Pool) []libvirtxml.DomainDisk {
	disks := []libvirtxml.DomainDisk{buildDisk(pool.volumePath(p.volume(volumeRoot)), "qcow2", 0, "")}
	for i, d := range p.spec.Disks {
		disks = append(disks, buildDisk(pool.volumePath(p.dataVolume(d.Name)), "qcow2", i+1, d.Name))
	}
	seed := buildDisk(pool.volumePath(p.volume(volumeSeed)), "raw", len(disks), "")
	seed.Driver.Discard = ""
	seed.ReadOnly = &libvirtxml.DomainDiskReadOnly{}
	return append(disks, seed)
}

func buildDisk(path, format string, index int, serial string) libvirtxml.DomainDisk {
	return libvirtxml.DomainDisk{
		Device: "disk",
		Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: format, Discard: "unmap"},
		Source: &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: path}},
		Target: &libvirtxml.DomainDiskTarget{Dev: "vd" + string(rune('a'+index)), Bus: "virtio"},
		Serial: serial,
	}
}

func buildInterfaces(p plan) []libvirtxml.DomainInterface {
	var out []libvirtxml.DomainInterface
	for i, n := range p.spec.NICs {
		out = append(out, libvirtxml.DomainInterface{
			MAC:    &libvirtxml.DomainInterfaceMAC{Address: macAddress(p.uuid, i)},
			Source: &libvirtxml.DomainInterfaceSource{Network: &libvirtxml.DomainInterfaceSourceNetwork{Network: n.Network}},
			Model:  &libvirtxml.DomainInterfaceModel{Type: "virtio"},
		})
	}
	return out
}

// reassert puts back what a mutator must not change: whose domain it is, and the disks that Delete removes.
func reassert(d *libvirtxml.Domain, in domainInput) {
	d.Name, d.UUID = in.plan.domain, in.plan.uuid.String()
	if d.Devices == nil {
		d.Devices = &libvirtxml.DomainDeviceList{}
	}
	for _, own := range buildDisks(in.plan, in.pool) {
		i := indexOfDisk(d.Devices.Disks, own)
		if i < 0 {
			d.Devices.Disks = append(d.Devices.Disks, own)
			continue
		}
		d.Devices.Disks[i].Source = own.Source
		d.Devices.Disks[i].ReadOnly = own.ReadOnly
	}
}

// indexOfDisk finds the disk with the same file, which may have got another target, or else the one with the same
// target; -1 if there is none.
func indexOfDisk(disks []libvirtxml.DomainDisk, own libvirtxml.DomainDisk) int {
	sameFile := func(d libvirtxml.DomainDisk) bool {
		return d.Source != nil && d.Source.File != nil && d.Source.File.File == own.Source.File.File
	}
	if i := slices.IndexFunc(disks, sameFile); i >= 0 {
		return i
	}
	return slices.IndexFunc(disks, func(d libvirtxml.DomainDisk) bool { return d.Target != nil && d.Target.Dev == own.Target.Dev })
}

func interfacesOf(d *libvirtxml.Domain) []metadataInterface {
	var out []metadataInterface
	for _, i := range d.Devices.Interfaces {
		if i.MAC == nil {
			continue // libvirt will make one up; its addresses cannot be told from others'
		}
		m := metadataInterface{MAC: normalMAC(i.MAC.Address)}
		if i.Source != nil && i.Source.Network != nil {
			m.Network = i.Source.Network.Network
		}
		out = append(out, m)
	}
	return out
}

// joinMetadata keeps what a mutator added in namespaces of its own. Of one namespace libvirt keeps the first element.
func joinMetadata(extra *libvirtxml.DomainMetadata, element string) string {
	text := "\n    " + element
	if extra != nil && extra.XML != "" {
		text += "\n    " + extra.XML
	}
	return text + "\n  "
}

// volumePath is where the pool keeps the file of a volume.
func (p Pool) volumePath(name string) string { return path.Join(p.TargetPath, name) }
