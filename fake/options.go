package fake

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Option changes a Host as it is made.
type Option func(*settings)

type settings struct {
	hostname    string
	arch        string
	libvirt     uint64
	hypervisor  uint64
	cpus        int
	memory      int64
	domainTypes []string
	efi         bool
	pools       []poolSetting
	networks    []networkSetting
	latency     time.Duration
	boot        time.Duration
	packet      int
	seed        uint64
}

type poolSetting struct {
	name     string
	capacity int64
}

type networkSetting struct {
	name   string
	subnet netip.Prefix
}

func defaults() settings {
	return settings{
		hostname:    "fake",
		arch:        "x86_64",
		libvirt:     9_000_000,
		hypervisor:  7_002_022,
		cpus:        16,
		memory:      64 << 30,
		domainTypes: []string{"kvm", "qemu"},
		efi:         true,
		pools:       []poolSetting{{"default", 1 << 40}},
		networks:    []networkSetting{{"default", netip.MustParsePrefix("192.168.122.0/24")}},
		packet:      256 << 10,
		seed:        1,
	}
}

// WithPool adds an active storage pool of the given capacity in bytes, or changes that of the pool "default".
func WithPool(name string, capacity int64) Option {
	return func(s *settings) {
		s.pools = slices.DeleteFunc(s.pools, func(p poolSetting) bool { return p.name == name })
		s.pools = append(s.pools, poolSetting{name, capacity})
	}
}

// WithNetwork adds an active network that hands out addresses of an IPv4 subnet, at most a /29, or changes that of the
// network "default".
func WithNetwork(name string, subnet netip.Prefix) Option {
	if !subnet.Addr().Is4() || subnet.Bits() > 29 {
		panic(fmt.Sprintf("fake: unsupported: subnet %v", subnet))
	}
	return func(s *settings) {
		s.networks = slices.DeleteFunc(s.networks, func(n networkSetting) bool { return n.name == name })
		s.networks = append(s.networks, networkSetting{name, subnet.Masked()})
	}
}

// WithHostname sets the host's name.
func WithHostname(name string) Option { return func(s *settings) { s.hostname = name } }

// WithArch sets the host's architecture, "x86_64" by default.
func WithArch(arch string) Option { return func(s *settings) { s.arch = arch } }

// WithVersions sets the versions of libvirt and of the hypervisor, in libvirt's form: 1,000,000 * major +
// 1,000 * minor + release.
func WithVersions(libvirt, hypervisor uint64) Option {
	return func(s *settings) { s.libvirt, s.hypervisor = libvirt, hypervisor }
}

// WithCPUs sets the number of the host's CPUs.
func WithCPUs(n int) Option { return func(s *settings) { s.cpus = n } }

// WithMemory sets the host's memory in bytes. A domain with more does not start.
func WithMemory(bytes int64) Option { return func(s *settings) { s.memory = bytes } }

// WithDomainTypes sets the domain types that the host can run: "kvm" and "qemu" by default.
func WithDomainTypes(types ...string) Option {
	return func(s *settings) { s.domainTypes = slices.Sorted(slices.Values(types)) }
}

// WithoutEFI makes a host that has no EFI firmware: domains that ask for it can be defined and do not start.
func WithoutEFI() Option { return func(s *settings) { s.efi = false } }

// WithLatency makes every call take so long.
func WithLatency(d time.Duration) Option { return func(s *settings) { s.latency = d } }

// WithBootTime sets how long after its start a guest asks for DHCP leases: at once by default.
func WithBootTime(d time.Duration) Option { return func(s *settings) { s.boot = d } }

// WithPacketSize sets how many bytes an upload sends at once: 256 KiB by default. A write that fails in the last
// packet goes unnoticed, as it does with libvirt.
func WithPacketSize(bytes int) Option { return func(s *settings) { s.packet = bytes } }

// WithSeed sets what the host's random choices start from: UUIDs and MACs that a domain's XML leaves out.
func WithSeed(seed uint64) Option { return func(s *settings) { s.seed = seed } }
