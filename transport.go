package kvm2

import (
	"context"
	"io"
	"net/netip"
	"time"
)

// Dialer opens sessions with one libvirt host. It is safe for concurrent use.
type Dialer interface {
	// Dial opens a new session. It returns when ctx ends.
	Dial(ctx context.Context) (Conn, error)
}

// Conn is one session with a libvirt host: exactly the calls that a Provider makes. Libvirt over a socket or SSH
// and the fake stand behind it.
//
// Every method returns soon after its context ends; the session is then broken. An error that libvirt reported is
// a *LibvirtError and leaves the session usable; after any other error it must be closed. Objects are addressed by
// name or UUID and nothing is kept between calls. A Conn is used by one goroutine at a time, but Close may be
// called at any time and ends a call under way.
//
// A Conn may also have a method Alive() bool, which says without asking the host whether the session has ended; one
// that has is then not taken for a further operation. With a method Ping(ctx context.Context) error, one cheap round
// trip, it is asked before it is used again after a pause.
type Conn interface {
	// Close ends the session and frees all that belongs to it. It does not wait for the host.
	Close() error

	// HostInfo describes the host.
	HostInfo(ctx context.Context) (HostInfo, error)

	// Domains returns all domains of the host with state and kvm2 metadata, sorted by name.
	Domains(ctx context.Context) ([]Domain, error)
	// DomainByName and DomainByUUID return one domain. Missing: libvirt's code 42.
	DomainByName(ctx context.Context, name string) (Domain, error)
	DomainByUUID(ctx context.Context, uuid UUID) (Domain, error)
	// DefineDomain makes a persistent, inactive domain of XML, validated against libvirt's schema. libvirt silently
	// redefines a domain of the same name and UUID, and answers code 9 where only one of them is taken.
	DefineDomain(ctx context.Context, xml string) error
	// StartDomain starts an inactive domain. Already running: code 55.
	StartDomain(ctx context.Context, uuid UUID) error
	// SetDomainMetadata replaces the domain's kvm2 metadata in its running and its persistent configuration,
	// whichever exist.
	SetDomainMetadata(ctx context.Context, uuid UUID, xml string) error
	// DestroyDomain ends a running domain at once: with grace, qemu gets SIGTERM and the time to flush, and code 9,
	// 38 or 87 says that it did not end; without, it is killed. Not running: code 55.
	DestroyDomain(ctx context.Context, uuid UUID, mode DestroyMode) error
	// UndefineDomain removes the persistent configuration with NVRAM, managed save image, snapshot and checkpoint
	// metadata, as far as the host knows these.
	UndefineDomain(ctx context.Context, uuid UUID) error
	// Addresses returns what the host knows of guests' addresses. A source that cannot answer (an inactive network,
	// an agent that is not connected, a domain that is gone) gives no records; only a broken session is an error.
	Addresses(ctx context.Context, query AddressQuery) ([]AddressRecord, error)

	// Pool returns a storage pool. Missing: code 49.
	Pool(ctx context.Context, name string) (Pool, error)
	// RefreshPool makes the pool look at its directory again.
	RefreshPool(ctx context.Context, name string) error
	// Network returns a virtual network. Missing: code 43.
	Network(ctx context.Context, name string) (Network, error)

	// VolumeNames returns the names of the pool's volumes, sorted.
	VolumeNames(ctx context.Context, pool string) ([]string, error)
	// Volumes returns all volumes of the pool, sorted by name; those that disappear meanwhile are left out.
	Volumes(ctx context.Context, pool string) ([]Volume, error)
	// Volume returns one volume, as it is at this moment: its sizes grow while another session writes. Missing: code 50.
	Volume(ctx context.Context, pool, name string) (Volume, error)
	// CreateVolume makes a volume of XML. It is atomic and exclusive: the name taken is code 90; a file of that name
	// that the pool does not know is code 55.
	CreateVolume(ctx context.Context, pool, xml string) error
	// DeleteVolume deletes a volume, in use or not. Missing: code 50.
	DeleteVolume(ctx context.Context, pool, name string) error
	// UploadVolume writes all of r into the volume, from the byte at offset on, which is not negative. What lies
	// between the end of a file and an offset beyond it is not stored and reads as zeros; nothing is cut off behind
	// what is written. libvirt may report success for an upload that did not reach the disk whole: look at
	// Volume.PhysicalBytes afterwards. An error of r is returned as it is, and breaks the session.
	UploadVolume(ctx context.Context, pool, name string, offset int64, r io.Reader) error
	// DownloadVolume writes the volume's whole content to w. An error of w is returned as it is, and breaks the
	// session.
	DownloadVolume(ctx context.Context, pool, name string, w io.Writer) error
}

// DestroyMode says how DestroyDomain ends a guest.
type DestroyMode int

// The ways to end a guest.
const (
	DestroyGraceful DestroyMode = iota
	DestroyForced
)

// HostInfo describes a host.
type HostInfo struct {
	// Hostname is the host's own name.
	Hostname string
	// Libvirt and Hypervisor are versions in libvirt's form: 1,000,000 * major + 1,000 * minor + release.
	Libvirt    uint64
	Hypervisor uint64
	// Arch is the host's architecture, for example "x86_64".
	Arch string
	// CPUs is the number of the host's CPUs, MemoryBytes its memory in bytes.
	CPUs        int
	MemoryBytes int64
	// DomainTypes are the domain types that the host offers for its own architecture ("kvm", "qemu"), sorted.
	DomainTypes []string
}

// Domain is one domain, kvm2's or not.
type Domain struct {
	Name string
	UUID UUID
	// State is libvirt's state and reason.
	State LibvirtState
	// Metadata is the kvm2 metadata element; empty when the domain has none.
	Metadata string
}

// Pool is a storage pool.
type Pool struct {
	Name   string
	Active bool
	// TargetPath is the directory that holds the pool's volumes; a device's name in a pool that is no directory.
	TargetPath string
	// CapacityBytes, AllocatedBytes and AvailableBytes are what the pool's last refresh found.
	CapacityBytes  int64
	AllocatedBytes int64
	AvailableBytes int64
}

// Network is a virtual network.
type Network struct {
	Name   string
	Active bool
}

// Volume is a storage volume.
type Volume struct {
	Name string
	// Path is the volume's path on the host.
	Path string
	// Format is the format that libvirt believes it to have: "qcow2", "raw", ...
	Format string
	// CapacityBytes is the size that a guest sees, PhysicalBytes the size of the file, AllocatedBytes what it takes
	// up on disk.
	CapacityBytes  int64
	PhysicalBytes  int64
	AllocatedBytes int64
	// BackingPath and BackingFormat are those of the backing store; empty without one.
	BackingPath   string
	BackingFormat string
}

// AddressQuery says which addresses are asked for.
type AddressQuery struct {
	// Networks whose DHCP leases are wanted.
	Networks []string
	// MACs narrow the leases down to those of these interfaces, written with colons, in upper or lower case; empty means
	// all leases. What is asked of Domains they do not narrow down.
	MACs []string
	// Domains whose guest agents and ARP entries are wanted.
	Domains []UUID
}

// AddressRecord is one address that a source reported, as it came.
type AddressRecord struct {
	Source AddressSource
	// Domain is whose agent or ARP entry it is; zero for a lease.
	Domain UUID
	MAC    string
	IP     netip.Addr
	// Expiry is when a lease ends; zero for other sources.
	Expiry time.Time
}

// Op names an operation on a host in errors and logs.
type Op string

// The operations.
const (
	OpDial              Op = "dial"
	OpPing              Op = "ping"
	OpHostInfo          Op = "host.info"
	OpDomainList        Op = "domain.list"
	OpDomainLookup      Op = "domain.lookup"
	OpDomainDefine      Op = "domain.define"
	OpDomainStart       Op = "domain.start"
	OpDomainSetMetadata Op = "domain.set-metadata"
	OpDomainDestroy     Op = "domain.destroy"
	OpDomainUndefine    Op = "domain.undefine"
	OpDomainAddresses   Op = "domain.addresses"
	OpPoolLookup        Op = "pool.lookup"
	OpPoolRefresh       Op = "pool.refresh"
	OpNetworkLookup     Op = "network.lookup"
	OpVolumeList        Op = "volume.list"
	OpVolumeLookup      Op = "volume.lookup"
	OpVolumeCreate      Op = "volume.create"
	OpVolumeDelete      Op = "volume.delete"
	OpVolumeUpload      Op = "volume.upload"
	OpVolumeDownload    Op = "volume.download"
)
