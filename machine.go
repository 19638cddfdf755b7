package kvm2

import (
	"net/netip"
	"time"
)

// Spec says what machine Create shall make. Name, OwnerUID, Image, CPUs, MemoryBytes and RootDiskBytes are required.
//
// +kubebuilder:object:generate=true
type Spec struct {
	// Name names the machine within its scope and becomes its host name: a DNS label (RFC 1123), lower case,
	// at most 63 characters.
	Name string `json:"name"`
	// OwnerUID is the unique ID of the object that the machine belongs to, for example the UID of a Kubernetes
	// object: printable ASCII without spaces, at most 128 characters. The machine's UUID derives from it.
	OwnerUID string `json:"ownerUID"`
	// Labels are kept with the machine and come back with it: at most 64, keys up to 128 and values up to 256 bytes.
	Labels map[string]string `json:"labels,omitempty"`

	// Image is what the root disk starts from.
	Image Image `json:"image"`
	// CPUs is the number of virtual CPUs: 1 to 255 on x86_64, to 512 on aarch64.
	CPUs int `json:"cpus"`
	// MemoryBytes is the guest's memory in bytes, 64 MiB to 16 TiB, a multiple of 1 KiB.
	MemoryBytes int64 `json:"memoryBytes"`
	// RootDiskBytes is the size of the root disk in bytes: not smaller than the image's virtual size, at most 64 TiB.
	RootDiskBytes int64 `json:"rootDiskBytes"`
	// Disks are further, empty disks, in the order in which the guest sees them (vdb, vdc, ...): at most 16.
	Disks []Disk `json:"disks,omitempty"`
	// NICs are the network interfaces, at most 8. None means one interface on Config.Network.
	NICs []NIC `json:"nics,omitempty"`
	// Firmware chooses how the guest boots.
	Firmware Firmware `json:"firmware,omitempty"`

	// UserData is cloud-init's user-data, at most MaxUserDataBytes. It may hold secrets: it is never logged.
	UserData []byte `json:"userData,omitempty"`
	// VendorData is cloud-init's vendor-data, at most MaxUserDataBytes.
	VendorData []byte `json:"vendorData,omitempty"`
	// NetworkConfig replaces the network-config that kvm2 composes (DHCP on every interface, matched by MAC).
	NetworkConfig []byte `json:"networkConfig,omitempty"`
}

// Image names a disk image: by URL, with either Checksum or ChecksumURL, or by Volume alone.
//
// +kubebuilder:object:generate=true
type Image struct {
	// URL is where the image is: http, https, file with an absolute path on the machine that runs kvm2, or a scheme
	// added by WithImageScheme. The file may be compressed: by gzip or bzip2, or as WithDecompressor can read it.
	// +optional
	URL string `json:"url"`
	// Checksum is "sha256:<hex>" or "sha512:<hex>" of the file at URL as it lies there, compressed or not. It
	// identifies the image in the cache.
	// +optional
	Checksum string `json:"checksum"`
	// ChecksumURL is a file of checksums, as distributions publish them beside their images (SHA256SUMS, SHA512SUMS):
	// lines of sha256sum or sha512sum, plain or with --tag, at most 1 MiB, clear-signed or not. The one for the base
	// name of URL counts. A signature is not verified, so plain http is refused. The file is read when a machine is
	// begun, at most every 10 minutes; a machine whose root disk exists keeps its image when it changes.
	ChecksumURL string `json:"checksumURL,omitempty"`
	// Volume is a volume in Config.Pool, qcow2 or raw, that root disks are to stand on as it is: kvm2 neither changes
	// nor removes it, and it must not change or go as long as machines stand on it. Volumes that kvm2 itself made are
	// refused.
	Volume string `json:"volume,omitempty"`
}

// Disk is an empty data disk.
//
// +kubebuilder:object:generate=true
type Disk struct {
	// Name is unique within the machine: a DNS label of at most 32 characters. It is also the disk's serial number,
	// so that Linux guests find it under /dev/disk/by-id/virtio-<name>; only the first 20 characters show there.
	Name string `json:"name"`
	// SizeBytes is the size in bytes, 1 MiB to 64 TiB, a multiple of 512.
	SizeBytes int64 `json:"sizeBytes"`
}

// NIC is a virtio network interface on a libvirt network.
//
// +kubebuilder:object:generate=true
type NIC struct {
	// Network is the libvirt network's name. Empty means Config.Network.
	Network string `json:"network,omitempty"`
}

// Firmware is how a guest boots.
type Firmware string

// The firmwares. The zero value is the architecture's usual one: BIOS on x86_64, EFI on aarch64.
const (
	FirmwareDefault Firmware = ""
	FirmwareBIOS    Firmware = "bios"
	FirmwareEFI     Firmware = "efi"
)

// Machine is what kvm2 knows of one machine at one moment.
type Machine struct {
	// ID is the provider ID, kvm2://<host>/<uuid>. It is known from the first Create on and never changes.
	ID string
	// UUID is the domain's UUID.
	UUID UUID
	// Name, OwnerUID, Labels and CreatedAt come from the domain's metadata. They are empty in what Get and List
	// report of a machine that has volumes but no domain: volumes carry no metadata.
	Name      string
	OwnerUID  string
	Labels    map[string]string
	CreatedAt time.Time

	// State is the machine's state, Reason says why in one word (for example "IOError"); Libvirt is the pair of
	// numbers it was mapped from.
	State   State
	Reason  string
	Libvirt LibvirtState

	// Addresses are the guest's addresses without loopback and link-local ones, sorted; empty while none is known.
	// List knows those from DHCP leases only; Get and Create also ask the guest agent and the host's ARP table.
	Addresses []Address
	// Drifted is set by Create when the hardware that Spec asks for differs from what the machine was created with.
	// Get and List have no Spec to compare with and leave it false.
	Drifted bool
	// Image is the progress of the image transfer that the machine waits for; nil when it waits for none.
	Image *ImageProgress
}

// LibvirtState is a domain's state and reason as libvirt numbers them (virDomainState and the reason enumeration
// of that state). Both are zero when there is no domain.
type LibvirtState struct {
	State  int
	Reason int
}

// Address is one address of a guest.
type Address struct {
	IP netip.Addr
	// MAC is the interface's hardware address, lower case with colons.
	MAC string
	// Source says who reported the address.
	Source AddressSource
}

// AddressSource is where an address is known from.
type AddressSource string

// The sources of addresses, in the order in which they are believed.
const (
	SourceAgent AddressSource = "agent"
	SourceLease AddressSource = "lease"
	SourceARP   AddressSource = "arp"
)

// ImageProgress is how far an image transfer is.
type ImageProgress struct {
	// Phase is what is being done.
	Phase ImagePhase
	// DoneBytes of the file are done in this attempt: read, and sent on to the host or left out as a hole. In phase
	// ImageWaiting they have been sent by the other process.
	DoneBytes int64
	// TotalBytes is the file's size, compressed if it is; 0 while it is unknown.
	TotalBytes int64
	// BytesPerSecond is how fast DoneBytes grew in the last 5 seconds; 0 in the first second.
	BytesPerSecond int64
	// Attempt counts this process's attempts at the image from 1.
	Attempt int
}

// ImagePhase is a step of an image transfer.
type ImagePhase string

// The phases of an image transfer, in order. One that finds another process at the image begins with ImageWaiting.
const (
	ImageWaiting      ImagePhase = "waiting"
	ImageOpening      ImagePhase = "opening"
	ImageTransferring ImagePhase = "transferring"
	ImageVerifying    ImagePhase = "verifying"
	ImagePublishing   ImagePhase = "publishing"
)
