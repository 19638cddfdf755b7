package fake

import (
	"fmt"
	"slices"
	"strings"

	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2"
)

// A volume is what a pool knows of one file: what it found there when it last looked.
type volume struct {
	name string
	head head
}

func (h *Host) volumeNamed(pool, name string) (*pool, *volume, error) {
	p, err := h.activePool(pool)
	if err != nil {
		return nil, nil, err
	}
	v := p.volumes[name]
	if v == nil {
		return nil, nil, answer(codeNoVolume, "Storage volume not found: no storage vol with matching name '%s'", name)
	}
	return p, v, nil
}

func (p *pool) seenVolume(v *volume) (kvm2.Volume, error) {
	f := p.files[v.name]
	if f == nil {
		return kvm2.Volume{}, answer(codeNoVolume, "Storage volume not found: no storage vol with matching path '%s'", p.pathOf(v.name))
	}
	out := kvm2.Volume{
		Name: v.name, Path: f.path, Format: v.head.format,
		CapacityBytes: v.head.capacity, PhysicalBytes: f.size, AllocatedBytes: f.allocated(),
		BackingPath: v.head.backingPath, BackingFormat: v.head.backingFormat,
	}
	if v.head.format == "raw" {
		out.CapacityBytes = f.size
	}
	return out, nil
}

func (p *pool) deleteVolume(v *volume) {
	p.unlink(v.name)
	p.forget(v.name)
	p.measure()
}

// volumeSpec is what a volume's XML asks for.
type volumeSpec struct {
	name       string
	format     string
	version    uint32 // of qcow2
	capacity   int64
	allocation int64
	backing    head
}

// libvirtFormats are the formats that libvirt knows (virStorageFileFormat).
var libvirtFormats = []string{
	"raw", "dir", "bochs", "cloop", "dmg", "iso", "vpc", "vdi", "fat", "vhd", "ploop", "cow", "qcow", "qcow2", "qed", "vmdk",
}

func parseVolume(source string) (*libvirtxml.StorageVolume, error) {
	if err := checkMessage(source); err != nil {
		return nil, err
	}
	if err := checkRoot(source, "volume", "storage_volume_definition"); err != nil {
		return nil, err
	}
	var def libvirtxml.StorageVolume
	if err := def.Unmarshal(source); err != nil {
		return nil, answer(codeXMLError, "XML error: malformed volume: %v", err)
	}
	return &def, nil
}

func (h *Host) createVolume(poolName, source string) error {
	p, err := h.activePool(poolName)
	if err != nil {
		return err
	}
	def, err := parseVolume(source)
	if err != nil {
		return err
	}
	spec, err := h.readVolume(p, def)
	if err != nil {
		return err
	}
	if err := p.checkFree(spec.name); err != nil {
		return err
	}
	f := h.newFile(p.pathOf(spec.name))
	if spec.format == "qcow2" {
		err = p.fillQcow2(f, spec)
	} else {
		err = p.fillRaw(f, spec)
	}
	if err != nil {
		return err
	}
	p.link(spec.name, f)
	p.know(&volume{name: spec.name, head: probe(f)})
	p.measure()
	return nil
}

// checkFree makes sure that the name is not taken, by a volume or by a file that the pool does not know.
func (p *pool) checkFree(name string) error {
	if p.volumes[name] != nil {
		return answer(codeVolumeExists, "storage volume '%s' exists already", name)
	}
	if p.files[name] != nil || name == "." || name == ".." {
		return invalidOperation("volume target path '%s' already exists", p.path+"/"+name)
	}
	return nil
}

// readVolume checks a volume's XML as libvirt's parser does.
func (h *Host) readVolume(p *pool, def *libvirtxml.StorageVolume) (volumeSpec, error) {
	s := volumeSpec{name: def.Name, format: "raw", version: 2}
	if s.name == "" {
		return s, answer(codeXMLError, "XML error: missing volume name element")
	}
	if strings.Contains(s.name, "/") {
		return s, invalidOperation("volume name '%s' cannot contain '/'", s.name)
	}
	if err := s.readSizes(def); err != nil {
		return s, err
	}
	if def.Target != nil && def.Target.Format != nil {
		s.format = def.Target.Format.Type
	}
	if def.Target != nil && def.Target.Compat == "1.1" {
		s.version = 3
	}
	if err := checkFormat(s.format); err != nil {
		return s, err
	}
	if def.BackingStore == nil || def.BackingStore.Path == "" {
		return s, nil
	}
	return s, h.readBacking(p, def.BackingStore, &s)
}

// checkFormat accepts raw and qcow2. Another format that libvirt would make is beyond the fake.
func checkFormat(format string) error {
	if !slices.Contains(libvirtFormats, format) {
		return answer(codeUnsupported, "unsupported configuration: unknown volume format type %s", format)
	}
	if format != "raw" && format != "qcow2" {
		return unsupported(fmt.Sprintf("volume format %q", format))
	}
	return nil
}

func (s *volumeSpec) readSizes(def *libvirtxml.StorageVolume) error {
	backed := def.BackingStore != nil && def.BackingStore.Path != ""
	if def.Capacity == nil && !backed {
		return answer(codeXMLError, "XML error: missing capacity element")
	}
	var err error
	if def.Capacity != nil {
		if s.capacity, err = scaled(def.Capacity.Value, def.Capacity.Unit); err != nil {
			return err
		}
	}
	s.allocation = s.capacity
	if def.Allocation != nil {
		s.allocation, err = scaled(def.Allocation.Value, def.Allocation.Unit)
	}
	return err
}

func (h *Host) readBacking(p *pool, b *libvirtxml.StorageVolumeBackingStore, s *volumeSpec) error {
	if s.format == "raw" {
		return answer(codeNoSupport, "this function is not supported by the connection driver: backing storage not supported for raw volumes")
	}
	s.backing = head{backingPath: b.Path, backingFormat: "raw"}
	if b.Format != nil {
		s.backing.backingFormat = b.Format.Type
	}
	if !slices.Contains(libvirtFormats, s.backing.backingFormat) {
		return answer(codeUnsupported, "unsupported configuration: unknown volume format type %s", s.backing.backingFormat)
	}
	below := h.fileAt(relativeTo(p.pathOf(s.name), b.Path))
	if below == nil {
		return missingFile("inaccessible backing store volume %s", b.Path)
	}
	if s.capacity == 0 { // qemu-img takes the size of what is below
		s.capacity = probe(below).capacity
	}
	return nil
}

// maxRawBytes is the largest file of ext4, the usual file system.
const maxRawBytes = 16<<40 - blockBytes

func (p *pool) fillRaw(f *file, s volumeSpec) error {
	if s.capacity > maxRawBytes {
		return answer(codeSystem, "cannot extend file '%s': File too large", f.path)
	}
	if wholeBlocks(s.allocation) > p.free() {
		return answer(codeSystem, "cannot allocate %d bytes in file '%s': No space left on device", s.allocation, f.path)
	}
	f.size = max(s.capacity, s.allocation)
	f.store(0, s.allocation)
	return nil
}

func (p *pool) fillQcow2(f *file, s volumeSpec) error {
	const kib = 1 << 10
	s.capacity = (s.capacity + kib - 1) / kib * kib // libvirt tells qemu-img the size in KiB
	content, err := newQcow2(s.capacity, s.version, s.backing)
	if err == nil && wholeBlocks(int64(len(content))) > p.free() {
		err = fmt.Errorf("%s: Could not write qcow2 header: No space left on device", f.path)
	}
	if err != nil {
		return answer(codeInternal, "internal error: Child process (/usr/bin/qemu-img create -f qcow2 %s) unexpected exit status 1: qemu-img: %v",
			f.path, err)
	}
	f.write(content, 0)
	return nil
}

// unsupported is the error for what libvirt could do and the fake cannot.
func unsupported(what string) error { return fmt.Errorf("fake: unsupported: %s", what) }

// describeVolume summarises a volume's XML for the log.
func describeVolume(source string) (name, detail string) {
	var def libvirtxml.StorageVolume
	if err := def.Unmarshal(source); err != nil {
		return "", fmt.Sprintf("%d bytes of malformed XML", len(source))
	}
	format := "raw"
	if def.Target != nil && def.Target.Format != nil {
		format = def.Target.Format.Type
	}
	detail = "format " + format
	if def.Capacity != nil {
		detail += fmt.Sprintf(", capacity %d %s", def.Capacity.Value, def.Capacity.Unit)
	}
	if def.BackingStore != nil {
		detail += ", on " + def.BackingStore.Path
	}
	return def.Name, detail
}
