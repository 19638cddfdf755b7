package kvm2

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"
)

// Config names a host and says how a Provider uses it. It holds no secrets: keys are named by their paths, and
// what is secret comes in through an Option. The zero value of every field but URI and Scope means its default.
//
// It can stand in a custom resource: the validation markers say what Validate says, except for what is wrong inside a
// URI or a list of jump hosts.
//
// +kubebuilder:object:generate=true
type Config struct {
	// URI names the libvirt host, in the form of https://libvirt.org/uri.html: qemu:///system, qemu:///session,
	// qemu+unix:///system?socket=PATH; over SSH
	// qemu+ssh://USER@HOST:PORT/system?keyfile=PATH&known_hosts=PATH&socket=PATH&proxy=HOW&netcat=PROGRAM; with client
	// certificates qemu+tls://HOST:PORT/system?pkipath=PATH; and without any protection, for loopback addresses only,
	// qemu+tcp://HOST:PORT/system. Host keys and certificates are always verified.
	// +kubebuilder:validation:MinLength=1
	URI string `json:"uri"`
	// Scope names the owner of a set of machines, one for each controller or cluster: lower-case letters, digits and
	// dashes, at most 40 characters. Machines of another scope are never touched.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`
	Scope string `json:"scope"`
	// Host is the host's name in provider IDs, errors and logs. Default: the host in URI, or "localhost".
	// It must not change while machines exist.
	// +kubebuilder:validation:Pattern=`^(::)?[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?$`
	Host string `json:"host,omitempty"`

	// Pool is the storage pool for volumes and images. Default "default".
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,127}$`
	Pool string `json:"pool,omitempty"`
	// Network is the libvirt network of interfaces that name none. Default "default".
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,127}$`
	Network string `json:"network,omitempty"`
	// DomainType is libvirt's domain type: "kvm", or "qemu" for plain emulation. Default "kvm".
	// +kubebuilder:validation:Enum=kvm;qemu
	DomainType string `json:"domainType,omitempty"`
	// Arch is the guests' architecture: "x86_64" or "aarch64". Default "x86_64".
	// +kubebuilder:validation:Enum=x86_64;aarch64
	Arch string `json:"arch,omitempty"`
	// OvercommitPercent is how much of a pool's available space may be promised: 100 is what there is, 200 twice
	// that. Default 100.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	OvercommitPercent int `json:"overcommitPercent,omitempty"`

	// CallTimeout bounds each call to the host except transfers. Default 30s.
	CallTimeout Duration `json:"callTimeout,omitempty"`
	// MaxConnections bounds the connections that calls share; image transfers have their own. Default 4.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	MaxConnections int `json:"maxConnections,omitempty"`
	// IdleTimeout is how long an unused connection is kept. Default 1m.
	IdleTimeout Duration `json:"idleTimeout,omitempty"`

	// Images says how images are fetched.
	Images ImagesConfig `json:"images,omitzero"`
	// SSH adds to what a qemu+ssh URI says.
	SSH SSHConfig `json:"ssh,omitzero"`
}

// SSHConfig says what a qemu+ssh URI cannot. It has no meaning for other URIs.
//
// +kubebuilder:object:generate=true
type SSHConfig struct {
	// ConfigFile is the absolute path of an OpenSSH client configuration, in which the host of the URI is looked up; it
	// is read anew for each connection. What the URI says wins over the file, and the file over defaults. Of
	// ssh_config(5) it may have Host, "Match all", Include, HostName, User, Port, IdentityFile, IdentityAgent,
	// UserKnownHostsFile and ProxyJump; the tokens %%, %d, %h, %n, %p, %r and ~. StrictHostKeyChecking and its like
	// are ignored: host keys are always verified. Another keyword that applies to the host and would change the way
	// or its security is an error of class Permanent.
	// +kubebuilder:validation:Pattern=`^/[^\x00]*$`
	ConfigFile string `json:"configFile,omitempty"`
	// ProxyJump names servers to go through, the nearest first, as ssh_config(5) does: [USER@]HOST[:PORT], several
	// separated by commas. It wins over ConfigFile, where "none" means no such server. Each is looked up in ConfigFile and
	// verified on its own. What neither says is as for the host: its user, key files and known_hosts.
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_.,:@%+\\\[\] -]+$`
	ProxyJump string `json:"proxyJump,omitempty"`
}

// ImagesConfig says how images are fetched.
//
// +kubebuilder:object:generate=true
type ImagesConfig struct {
	// StallTimeout ends a transfer in which nothing moved for so long. An attempt of another process that has not grown
	// for so long is taken for dead. Default 1m.
	StallTimeout Duration `json:"stallTimeout,omitempty"`
	// Timeout bounds the whole transfer of one image, all attempts together. Default 1h.
	Timeout Duration `json:"timeout,omitempty"`
	// MaxTransfers bounds the images that are transferred at once. Default 2.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	MaxTransfers int `json:"maxTransfers,omitempty"`
	// MaxRetries is how many times one transfer may resume or start over: after its connection broke off or came to an
	// end too early, and once for a wrong checksum. -1 is none. A local file that cannot be read is not tried again, and a
	// transfer in which nothing moved for StallTimeout is given up. Default 5.
	// +kubebuilder:validation:Minimum=-1
	// +kubebuilder:validation:Maximum=100
	MaxRetries int `json:"maxRetries,omitempty"`
	// MaxExpandedBytes bounds the bytes that a compressed image file may hold. Default 64 GiB, at most 64 TiB.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=70368744177664
	MaxExpandedBytes int64 `json:"maxExpandedBytes,omitempty"`
}

// Duration is a time.Duration that JSON holds as text, such as "1m30s".
//
// +kubebuilder:validation:Type=string
// +kubebuilder:validation:Format=duration
// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$`
// +kubebuilder:validation:XValidation:rule="self >= duration('1ms') && self <= duration('168h')",message="want 1ms to 168h"
type Duration time.Duration

// MarshalText writes the form that time.ParseDuration reads.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

// DecodeConfig reads a Config from JSON and refuses unknown fields, so that a misspelt one is not silently ignored.
// It does not validate.
func DecodeConfig(data []byte) (Config, error) {
	var c Config
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Config{}, permanent(ErrInvalidConfig, "%w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Config{}, permanent(ErrInvalidConfig, "there is more than one JSON value")
	}
	return c, nil
}

var (
	scopeForm        = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	objectForm       = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,127}$`) // a pool or network that XML and URIs carry as it is
	absolutePathForm = regexp.MustCompile(`^/[^\x00]*$`)
)

// Validate reports everything that is wrong with c, joined. Each fault begins with the path of its field in the
// block where c stands: Validate("spec.kvm2") says `spec.kvm2.uri: ...`, Validate("") says `uri: ...`. Each is of
// class Permanent, ErrInvalidConfig.
func (c Config) Validate(block string) error {
	if block != "" {
		block += "."
	}
	var faults []error
	fault := func(field, format string, args ...any) {
		faults = append(faults, permanent(ErrInvalidConfig, "%s%s: %w", block, field, fmt.Errorf(format, args...)))
	}
	uri, err := parseURI(c.URI)
	if err != nil {
		fault("uri", "%w", err)
	}
	if !scopeForm.MatchString(c.Scope) {
		fault("scope", "%q: want 1 to 40 lower-case letters, digits and dashes, a letter or digit at both ends", clip(c.Scope))
	}
	if host := c.hostName(uri); !hostForm.MatchString(host) {
		fault("host", "%q cannot stand in a provider ID: want a host name or an address", clip(host))
	}
	if c.SSH.ConfigFile != "" && !absolutePathForm.MatchString(c.SSH.ConfigFile) {
		fault("ssh.configFile", "%q: want an absolute path", clip(c.SSH.ConfigFile))
	}
	if _, err := c.SSH.jumps(); err != nil {
		fault("ssh.proxyJump", "%w", err)
	}
	c = c.withDefaults()
	if !objectForm.MatchString(c.Pool) {
		fault("pool", "%q: want letters, digits and _.:+-", clip(c.Pool))
	}
	if !objectForm.MatchString(c.Network) {
		fault("network", "%q: want letters, digits and _.:+-", clip(c.Network))
	}
	if c.DomainType != "kvm" && c.DomainType != "qemu" {
		fault("domainType", "%q: want \"kvm\", or \"qemu\" for plain emulation", clip(c.DomainType))
	}
	if c.Arch != archX86 && c.Arch != archARM {
		fault("arch", "%q: want %q or %q", clip(c.Arch), archX86, archARM)
	}
	for _, n := range []struct {
		field       string
		value       int64
		least, most int64
	}{
		{"overcommitPercent", int64(c.OvercommitPercent), 1, 10_000},
		{"maxConnections", int64(c.MaxConnections), 1, 100},
		{"images.maxTransfers", int64(c.Images.MaxTransfers), 1, 100},
		{"images.maxRetries", int64(c.Images.MaxRetries), -1, 100},
		{"images.maxExpandedBytes", c.Images.MaxExpandedBytes, 1, 64 * tib},
	} {
		if n.value < n.least || n.value > n.most {
			fault(n.field, "%d: want %d to %d", n.value, n.least, n.most)
		}
	}
	for _, d := range []struct {
		field string
		value Duration
	}{
		{"callTimeout", c.CallTimeout},
		{"idleTimeout", c.IdleTimeout},
		{"images.stallTimeout", c.Images.StallTimeout},
		{"images.timeout", c.Images.Timeout},
	} {
		if d.value < Duration(time.Millisecond) || d.value > Duration(7*24*time.Hour) {
			fault(d.field, "%s: want 1ms to 168h", time.Duration(d.value))
		}
	}
	return errors.Join(faults...)
}

// withDefaults fills the fields that are zero.
func (c Config) withDefaults() Config {
	fill(&c.Pool, "default")
	fill(&c.Network, "default")
	fill(&c.DomainType, "kvm")
	fill(&c.Arch, archX86)
	fill(&c.OvercommitPercent, 100)
	fill(&c.CallTimeout, Duration(30*time.Second))
	fill(&c.MaxConnections, 4)
	fill(&c.IdleTimeout, Duration(time.Minute))
	fill(&c.Images.StallTimeout, Duration(time.Minute))
	fill(&c.Images.Timeout, Duration(time.Hour))
	fill(&c.Images.MaxTransfers, 2)
	fill(&c.Images.MaxRetries, 5)
	fill(&c.Images.MaxExpandedBytes, 64*gib)
	return c
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// hostName is the host's name in provider IDs.
func (c Config) hostName(uri hostURI) string {
	if c.Host != "" {
		return c.Host
	}
	if uri.host != "" {
		return uri.host
	}
	return "localhost"
}
