package fake

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"

	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2"
)

// A config is one configuration of a domain: the persistent one, or the one that runs.
type config struct {
	def      libvirtxml.Domain
	xml      string
	metadata string // kvm2's element
}

// clone makes a copy that shares nothing that the fake ever changes.
func (c *config) clone() *config {
	d := *c
	return &d
}

// validation is whether XML is held against libvirt's schema.
type validation bool

const (
	validated   validation = true
	unvalidated validation = false
)

// parseDomain reads a domain's XML with the checks of libvirt's parser, in their order.
func (h *Host) parseDomain(source string, v validation) (*config, error) {
	if err := checkMessage(source); err != nil {
		return nil, err
	}
	if err := checkRoot(source, "domain", "domain_definition"); err != nil {
		return nil, err
	}
	var def libvirtxml.Domain
	if err := def.Unmarshal(source); err != nil {
		return nil, schemaError("Element domain failed to validate content")
	}
	if v == validated {
		if err := checkSchema(source, &def); err != nil {
			return nil, err
		}
	}
	if err := h.checkDomain(&def); err != nil {
		return nil, err
	}
	c := &config{def: def, xml: source}
	if def.Metadata != nil {
		var err error
		if c.metadata, err = kvm2Element(def.Metadata.XML); err != nil {
			return nil, answer(codeXMLDetail, "(domain_definition): %v", err)
		}
	}
	h.complete(c)
	return c, nil
}

// checkRoot makes sure that the source is one well-formed element of the name given.
func checkRoot(source, root, what string) error {
	d := xml.NewDecoder(strings.NewReader(source))
	name := ""
	for depth := 0; ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) && name != "" {
			break
		}
		if err != nil {
			line, _ := d.InputPos()
			return answer(codeXMLDetail, "(%s):%d: %v", what, line, err)
		}
		switch t := token.(type) {
		case xml.StartElement:
			if depth++; name == "" {
				name = t.Name.Local
			}
		case xml.EndElement:
			depth--
		}
	}
	if name != root {
		return answer(codeXMLError, "XML error: expecting root element of '%s', not '%s'", root, name)
	}
	return nil
}

func schemaError(reason string) error {
	return answer(codeSchema, "XML document failed to validate against schema: "+
		"Unable to validate doc against /usr/share/libvirt/schemas/domain.rng\n%s\n", reason)
}

// schemaTypes are the domain types that libvirt's schema knows.
var schemaTypes = []string{
	"bhyve", "hvf", "hyperv", "kvm", "lxc", "openvz", "parallels", "phyp", "qemu", "test", "uml", "vbox", "vmware", "vz", "xen",
}

// checkSchema finds what is cheap to find of what libvirt's schema refuses.
func checkSchema(source string, def *libvirtxml.Domain) error {
	content, devices := childNames(source)
	if !slices.Contains(schemaTypes, def.Type) || strings.TrimSpace(def.Name) == "" {
		return schemaError("Element domain failed to validate content")
	}
	if unknown := firstUnknown(content, reflect.TypeFor[libvirtxml.Domain]()); unknown != "" {
		return schemaError("Element domain has extra content: " + unknown)
	}
	if firstUnknown(devices, reflect.TypeFor[libvirtxml.DomainDeviceList]()) != "" || !validMACs(def) {
		return schemaError("Extra element devices in interleave\nElement domain failed to validate content")
	}
	if def.OS != nil && def.OS.Type != nil && !slices.Contains([]string{"hvm", "xen", "linux", "exe", "uml"}, def.OS.Type.Type) {
		return schemaError("Error validating value \nExtra element os in interleave\nElement domain failed to validate content")
	}
	if def.UUID != "" {
		if _, err := kvm2.ParseUUID(strings.ToLower(def.UUID)); err != nil {
			return schemaError("Extra element uuid in interleave\nElement domain failed to validate content")
		}
	}
	if def.VCPU != nil && def.VCPU.Value == 0 {
		return schemaError("Extra element vcpu in interleave\nElement domain failed to validate content")
	}
	return nil
}

// childNames returns the names of the elements right below <domain> and below its <devices>. Elements of other
// namespaces are left out: they are hypervisors' own.
func childNames(source string) (content, devices []string) {
	d := xml.NewDecoder(strings.NewReader(source))
	var path []string
	for {
		token, err := d.Token()
		if err != nil {
			return content, devices
		}
		switch t := token.(type) {
		case xml.StartElement:
			path = append(path, t.Name.Local)
			switch {
			case t.Name.Space != "":
			case len(path) == 2:
				content = append(content, t.Name.Local)
			case len(path) == 3 && path[1] == "devices":
				devices = append(devices, t.Name.Local)
			}
		case xml.EndElement:
			path = path[:len(path)-1]
		}
	}
}

// firstUnknown returns the first name that is no element of the struct that libvirtxml has for it.
func firstUnknown(names []string, of reflect.Type) string {
	for _, name := range names {
		known := false
		for f := range of.Fields() {
			tag, _, _ := strings.Cut(f.Tag.Get("xml"), ",")
			known = known || tag == name
		}
		if !known {
			return name
		}
	}
	return ""
}

func validMACs(def *libvirtxml.Domain) bool {
	for _, i := range interfaces(def) {
		if i.MAC == nil {
			continue
		}
		mac, err := net.ParseMAC(i.MAC.Address)
		if err != nil || len(mac) != 6 || mac[0]&1 == 1 {
			return false
		}
	}
	return true
}

// checkDomain does the checks that come after the schema.
func (h *Host) checkDomain(def *libvirtxml.Domain) error {
	checks := []func(*libvirtxml.Domain) error{
		checkIdentity, checkMemory, h.checkEmulator, checkTargets, checkMACs, checkFirmware, checkCPUs,
	}
	for _, check := range checks {
		if err := check(def); err != nil {
			return err
		}
	}
	return nil
}

func checkIdentity(def *libvirtxml.Domain) error {
	switch {
	case def.Name == "":
		return answer(21, "missing name information")
	case strings.Contains(def.Name, "/"):
		return answer(codeXMLError, "XML error: name %s cannot contain '/'", def.Name)
	case def.UUID == "":
		return nil
	}
	if _, err := kvm2.ParseUUID(strings.ToLower(def.UUID)); err != nil {
		return answer(codeInternal, "internal error: malformed uuid element")
	}
	return nil
}

func checkMemory(def *libvirtxml.Domain) error {
	if def.OS == nil || def.OS.Type == nil || def.OS.Type.Type == "" {
		return answer(codeXMLError, "XML error: an os <type> must be specified")
	}
	if def.Memory == nil || def.Memory.Value == 0 {
		return answer(codeXMLError, "XML error: Memory size must be specified via <memory> or in the <numa> configuration")
	}
	_, err := memoryBytes(def)
	return err
}

func (h *Host) checkEmulator(def *libvirtxml.Domain) error {
	if arch := def.OS.Type.Arch; arch != "" && arch != h.settings.arch {
		return answer(codeUnsupported, "unsupported configuration: No emulator found for arch '%s'", arch)
	}
	if !slices.Contains(h.settings.domainTypes, def.Type) {
		return answer(codeUnsupported, "unsupported configuration: Emulator '/usr/bin/qemu-system-%s' does not support virt type '%s'",
			h.settings.arch, def.Type)
	}
	return nil
}

func checkTargets(def *libvirtxml.Domain) error {
	seen := map[string]string{}
	for _, d := range disks(def) {
		if d.Target == nil {
			continue
		}
		if other, ok := seen[d.Target.Dev]; ok {
			return answer(codeXMLError, "XML error: target '%s' duplicated for disk sources '%s' and '%s'", d.Target.Dev, other, sourceFile(d))
		}
		seen[d.Target.Dev] = sourceFile(d)
	}
	return nil
}

func checkMACs(def *libvirtxml.Domain) error {
	for _, i := range interfaces(def) {
		if i.MAC == nil {
			continue
		}
		mac, err := net.ParseMAC(i.MAC.Address)
		if err != nil || len(mac) != 6 {
			return answer(codeXMLError, "XML error: unable to parse mac address '%s'", i.MAC.Address)
		}
		if mac[0]&1 == 1 {
			return answer(codeXMLError, "XML error: expected unicast mac address, found multicast '%s'", i.MAC.Address)
		}
	}
	return nil
}

func checkFirmware(def *libvirtxml.Domain) error {
	acpi := def.Features != nil && def.Features.ACPI != nil
	if wantsEFI(def) && !acpi && def.OS.Type.Arch != "aarch64" {
		return answer(codeUnsupported, "unsupported configuration: UEFI requires ACPI on this architecture")
	}
	return nil
}

// maxCPUs is what QEMU's q35 machine takes.
const maxCPUs = 288

func checkCPUs(def *libvirtxml.Domain) error {
	if def.VCPU != nil && def.VCPU.Value > maxCPUs {
		return answer(codeUnsupported, "unsupported configuration: Maximum CPUs greater than specified machine type limit %d", maxCPUs)
	}
	return nil
}

// complete fills in what libvirt adds to a configuration.
func (h *Host) complete(c *config) {
	if c.def.UUID == "" {
		c.def.UUID = h.randomUUID().String()
	}
	c.def.UUID = strings.ToLower(c.def.UUID)
	for i, nic := range interfaces(&c.def) {
		if nic.MAC == nil {
			r := h.random.Uint32()
			address := fmt.Sprintf("52:54:00:%02x:%02x:%02x", byte(r), byte(r>>8), byte(r>>16))
			c.def.Devices.Interfaces[i].MAC = &libvirtxml.DomainInterfaceMAC{Address: address}
		}
	}
}

func (h *Host) randomUUID() kvm2.UUID {
	var u kvm2.UUID
	for i := range u {
		u[i] = byte(h.random.Uint32())
	}
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// memoryBytes reads a domain's memory, which is in KiB unless it says otherwise.
func memoryBytes(def *libvirtxml.Domain) (int64, error) {
	unit := def.Memory.Unit
	if unit == "" {
		unit = "KiB"
	}
	return scaled(uint64(def.Memory.Value), unit)
}

// scaled multiplies a number with its unit, as virScaleInteger does.
func scaled(value uint64, unit string) (int64, error) {
	const suffixes = "kmgtpe"
	lower := strings.ToLower(unit)
	factor := uint64(1)
	switch {
	case lower == "" || lower == "b" || lower == "byte" || lower == "bytes":
	case strings.IndexByte(suffixes, lower[0]) >= 0 && slices.Contains([]string{"", "b", "ib"}, lower[1:]):
		base := uint64(1024)
		if lower[1:] == "b" {
			base = 1000
		}
		for range strings.IndexByte(suffixes, lower[0]) + 1 {
			factor *= base
		}
	default:
		return 0, answer(codeInvalidArg, "invalid argument: unknown suffix '%s'", unit)
	}
	const most = 1<<63 - 1
	if value > most/factor {
		return 0, answer(84, "numerical overflow: value too large: %d%s", value, unit)
	}
	return int64(value * factor), nil
}

func disks(def *libvirtxml.Domain) []libvirtxml.DomainDisk {
	if def.Devices == nil {
		return nil
	}
	return def.Devices.Disks
}

func interfaces(def *libvirtxml.Domain) []libvirtxml.DomainInterface {
	if def.Devices == nil {
		return nil
	}
	return def.Devices.Interfaces
}

func sourceFile(d libvirtxml.DomainDisk) string {
	if d.Source == nil || d.Source.File == nil {
		return ""
	}
	return d.Source.File.File
}

func wantsEFI(def *libvirtxml.Domain) bool { return def.OS != nil && def.OS.Firmware == "efi" }

// describeDomain summarises a domain's XML for the log.
func describeDomain(source string) (name, detail string) {
	var def libvirtxml.Domain
	if err := def.Unmarshal(source); err != nil {
		return "", fmt.Sprintf("%d bytes of malformed XML", len(source))
	}
	return def.Name, fmt.Sprintf("type %q, uuid %q, %d disks, %d interfaces", def.Type, def.UUID, len(disks(&def)), len(interfaces(&def)))
}
