package kvm2

import (
	"regexp"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// The parts of a machine that are volumes of their own.
const (
	volumeRoot = "root"
	volumeSeed = "seed"
	volumeData = "disk-" // followed by the disk's name
)

// volumePrefix begins the names of all volumes of one machine. Other volumes may begin with it as well, if their scope
// ends in a UUID: machineOfVolume tells.
func volumePrefix(scope string, uuid UUID) string { return scope + "-" + uuid.String() + "-" }

// machineOfVolume says which machine of the scope a volume belongs to.
func machineOfVolume(scope, name string) (UUID, bool) {
	const uuidLen = 36
	rest, ok := strings.CutPrefix(name, scope+"-")
	if !ok || len(rest) < uuidLen+2 || rest[uuidLen] != '-' {
		return UUID{}, false
	}
	uuid, err := ParseUUID(rest[:uuidLen])
	return uuid, err == nil && isMachinePart(rest[uuidLen+1:])
}

// isMachinePart tells a machine's volumes from those of another scope, whose own name may end in a UUID.
// An external snapshot of a disk, which libvirt calls after the disk with a dot and the snapshot's name, goes with it.
func isMachinePart(part string) bool {
	part, _, _ = strings.Cut(part, ".")
	return part == volumeRoot || part == volumeSeed || strings.HasPrefix(part, volumeData)
}

// ownVolume is what the names of all volumes look like that kvm2 makes, in whatever scope: disks and seeds of machines,
// images and what points to them.
var ownVolume = regexp.MustCompile(`^[a-z0-9-]+-([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}-(root|seed|disk-[^.]*)([.].*)?` +
	`|image-([0-9a-f]{64}|[0-9a-f]{128})(-[0-9a-f]+)?)$`)

func isOwnVolume(name string) bool { return ownVolume.MatchString(name) }

// unfinished reports whether somebody's call is still making the volume. libvirt lists it from the beginning; as long
// as the file has no header it calls it qcow2, as it was told to make it, but takes the file's size for the disk's. A
// file that stays like that because the host died is raw for the next daemon.
func (v Volume) unfinished() bool {
	return v.Format == "qcow2" && v.CapacityBytes == v.PhysicalBytes
}

// overlayXML describes a qcow2 volume on top of another. libvirt makes version 0.10 unless it is told otherwise.
func overlayXML(name string, capacity int64, backingPath, backingFormat string) (string, error) {
	v := qcow2Volume(name, capacity)
	v.BackingStore = &libvirtxml.StorageVolumeBackingStore{
		Path:   backingPath,
		Format: &libvirtxml.StorageVolumeTargetFormat{Type: backingFormat},
	}
	return v.Marshal()
}

// emptyDiskXML describes an empty qcow2 volume.
func emptyDiskXML(name string, capacity int64) (string, error) {
	return qcow2Volume(name, capacity).Marshal()
}

func qcow2Volume(name string, capacity int64) *libvirtxml.StorageVolume {
	return &libvirtxml.StorageVolume{
		Name:     name,
		Capacity: bytesSize(capacity),
		Target: &libvirtxml.StorageVolumeTarget{
			Format: &libvirtxml.StorageVolumeTargetFormat{Type: "qcow2"},
			Compat: "1.1",
		},
	}
}

// uploadXML describes an empty file to upload into. With no capacity its physical size afterwards is the number of
// bytes that reached the disk, which is how a truncated upload shows.
func uploadXML(name string) (string, error) {
	v := &libvirtxml.StorageVolume{
		Name:       name,
		Capacity:   bytesSize(0),
		Allocation: bytesSize(0),
		Target:     &libvirtxml.StorageVolumeTarget{Format: &libvirtxml.StorageVolumeTargetFormat{Type: "raw"}},
	}
	return v.Marshal()
}

func bytesSize(n int64) *libvirtxml.StorageVolumeSize {
	return &libvirtxml.StorageVolumeSize{Unit: "bytes", Value: uint64(n)}
}
