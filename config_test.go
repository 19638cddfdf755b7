package kvm2_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2"
)

func validConfig() kvm2.Config { return kvm2.Config{URI: "qemu:///system", Scope: "prod"} }

func TestConfigValidate_Accepts(t *testing.T) {
	tests := []struct {
		name string
		edit func(*kvm2.Config)
		why  string
	}{
		{name: "URI and scope", edit: func(*kvm2.Config) {}, why: "everything else has a default"},
		{name: "shortest scope", edit: func(c *kvm2.Config) { c.Scope = "a" }},
		{name: "longest scope", edit: func(c *kvm2.Config) { c.Scope = strings.Repeat("a", 40) }},
		{name: "host", edit: func(c *kvm2.Config) { c.Host = "kvm-1.example.com" }},
		{name: "IPv4 host", edit: func(c *kvm2.Config) { c.Host = "192.0.2.1" }},
		{name: "IPv6 host", edit: func(c *kvm2.Config) { c.Host = "2001:db8::1" }},
		{name: "IPv6 host in the URI", edit: func(c *kvm2.Config) { c.URI = "qemu+ssh://[2001:db8::1]/system" }},
		{name: "loopback in the URI", edit: func(c *kvm2.Config) { c.URI = "qemu+ssh://[::1]/system" }, why: "a tunnel ends there"},
		{name: "jump hosts and a configuration file", edit: func(c *kvm2.Config) {
			c.URI, c.SSH = "qemu+ssh://host/system", kvm2.SSHConfig{ConfigFile: "/etc/kvm2/ssh_config", ProxyJump: "op@a:2222,[2001:db8::1]"}
		}},
		{name: "aarch64", edit: func(c *kvm2.Config) { c.Arch = "aarch64" }},
		{name: "emulation", edit: func(c *kvm2.Config) { c.DomainType = "qemu" }},
		{name: "pool and network with signs", edit: func(c *kvm2.Config) { c.Pool, c.Network = "Pool_1.a:b+c-d", "lan.0" }},
		{name: "least", edit: func(c *kvm2.Config) {
			c.OvercommitPercent, c.MaxConnections, c.Images.MaxTransfers = 1, 1, 1
			c.Images.MaxRetries, c.Images.MaxExpandedBytes = -1, 1
			c.CallTimeout, c.IdleTimeout = kvm2.Duration(time.Millisecond), kvm2.Duration(time.Millisecond)
		}},
		{name: "most", edit: func(c *kvm2.Config) {
			c.OvercommitPercent, c.MaxConnections, c.Images.MaxTransfers = 10_000, 100, 100
			c.Images.MaxRetries, c.Images.MaxExpandedBytes = 100, 64<<40
			c.Images.StallTimeout, c.Images.Timeout = kvm2.Duration(168*time.Hour), kvm2.Duration(168*time.Hour)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := validConfig()
			tt.edit(&c)
			if err := c.Validate("spec.kvm2"); err != nil {
				t.Errorf("Validate() = %v, want nil; %s", err, tt.why)
			}
		})
	}
}

func TestConfigValidate_RefusesAndNamesTheField(t *testing.T) {
	tests := []struct {
		field string
		edit  func(*kvm2.Config)
		why   string
	}{
		{field: "uri", edit: func(c *kvm2.Config) { c.URI = "" }},
		{field: "uri", edit: func(c *kvm2.Config) { c.URI = "xen:///system" }},
		{field: "uri", edit: func(c *kvm2.Config) { c.URI = "qemu+ssh://host/system?no_verify=1" }},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "" }, why: "without a scope two controllers would share machines"},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = strings.Repeat("a", 41) }},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "Prod" }},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "a/b" }, why: "a slash parts scope and owner in what the UUID is made of"},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "-a" }},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "a-" }},
		{field: "scope", edit: func(c *kvm2.Config) { c.Scope = "a\n" }},
		{field: "host", edit: func(c *kvm2.Config) { c.Host = "a/b" }},
		{field: "host", edit: func(c *kvm2.Config) { c.Host = "a b" }},
		{field: "host", edit: func(c *kvm2.Config) { c.Host = strings.Repeat("h", 254) }},
		{field: "host", edit: func(c *kvm2.Config) { c.URI = "qemu+ssh://h%C3%B6st/system" }, why: "a host in the URI must fit into an ID too"},
		{field: "pool", edit: func(c *kvm2.Config) { c.Pool = "a/b" }},
		{field: "pool", edit: func(c *kvm2.Config) { c.Pool = "a'b" }},
		{field: "network", edit: func(c *kvm2.Config) { c.Network = "a b" }},
		{field: "network", edit: func(c *kvm2.Config) { c.Network = strings.Repeat("n", 129) }},
		{field: "domainType", edit: func(c *kvm2.Config) { c.DomainType = "xen" }},
		{field: "arch", edit: func(c *kvm2.Config) { c.Arch = "arm64" }, why: "libvirt's name is aarch64"},
		{field: "overcommitPercent", edit: func(c *kvm2.Config) { c.OvercommitPercent = -1 }},
		{field: "overcommitPercent", edit: func(c *kvm2.Config) { c.OvercommitPercent = 10_001 }},
		{field: "maxConnections", edit: func(c *kvm2.Config) { c.MaxConnections = -1 }},
		{field: "maxConnections", edit: func(c *kvm2.Config) { c.MaxConnections = math.MaxInt }},
		{field: "ssh.configFile", edit: func(c *kvm2.Config) { c.SSH.ConfigFile = "~/.ssh/config" }, why: "a controller has no home directory to speak of"},
		{field: "ssh.proxyJump", edit: func(c *kvm2.Config) { c.SSH.ProxyJump = "a,b:0" }},
		{field: "images.maxTransfers", edit: func(c *kvm2.Config) { c.Images.MaxTransfers = -1 }},
		{field: "images.maxRetries", edit: func(c *kvm2.Config) { c.Images.MaxRetries = -2 }},
		{field: "images.maxRetries", edit: func(c *kvm2.Config) { c.Images.MaxRetries = 101 }},
		{field: "images.maxExpandedBytes", edit: func(c *kvm2.Config) { c.Images.MaxExpandedBytes = -1 }},
		{field: "images.maxExpandedBytes", edit: func(c *kvm2.Config) { c.Images.MaxExpandedBytes = 64<<40 + 1 }},
		{field: "callTimeout", edit: func(c *kvm2.Config) { c.CallTimeout = -1 }},
		{field: "callTimeout", edit: func(c *kvm2.Config) { c.CallTimeout = 30 }, why: "30 nanoseconds: somebody meant seconds"},
		{field: "idleTimeout", edit: func(c *kvm2.Config) { c.IdleTimeout = kvm2.Duration(169 * time.Hour) }},
		{field: "images.stallTimeout", edit: func(c *kvm2.Config) { c.Images.StallTimeout = -1 }},
		{field: "images.timeout", edit: func(c *kvm2.Config) { c.Images.Timeout = kvm2.Duration(math.MaxInt64) }},
	}
	for _, tt := range tests {
		c := validConfig()
		tt.edit(&c)
		for block, prefix := range map[string]string{"": "", "spec.provider.kvm2": "spec.provider.kvm2."} {
			err := c.Validate(block)
			if !errors.Is(err, kvm2.ErrInvalidConfig) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
				t.Errorf("Validate(%q) with bad %s = %v, want a Permanent ErrInvalidConfig; %s", block, tt.field, err, tt.why)
				continue
			}
			if want := "invalid configuration: " + prefix + tt.field + ": "; !strings.HasPrefix(err.Error(), want) {
				t.Errorf("Validate(%q) = %q, want it to begin with %q", block, err, want)
			}
			wantCleanText(t, err)
		}
	}
}

func TestConfigValidate_AllFaultsAtOnce(t *testing.T) {
	c := kvm2.Config{
		URI: "xen:///", Scope: "A", Host: "a/b", Pool: "/", Network: "/", DomainType: "xen", Arch: "x86", OvercommitPercent: -1,
		CallTimeout: -1, MaxConnections: -1, IdleTimeout: -1,
		Images: kvm2.ImagesConfig{StallTimeout: -1, Timeout: -1, MaxTransfers: -1, MaxRetries: -2, MaxExpandedBytes: -1},
	}
	err := c.Validate("spec.provider.kvm2")
	if err == nil {
		t.Fatal("Validate() = nil")
	}
	for _, field := range []string{
		"uri", "scope", "host", "pool", "network", "domainType", "arch", "overcommitPercent", "callTimeout", "maxConnections", "idleTimeout",
		"images.stallTimeout", "images.timeout", "images.maxTransfers", "images.maxRetries", "images.maxExpandedBytes",
	} {
		if want := "spec.provider.kvm2." + field + ": "; !strings.Contains(err.Error(), want) {
			t.Errorf("Validate() does not say %q:\n%v", want, err)
		}
	}
}

func TestConfigValidate_DoesNotFillDefaults(t *testing.T) {
	c := validConfig()
	if err := c.Validate(""); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(validConfig(), c); diff != "" {
		t.Errorf("Validate changed the Config (-want +got):\n%s", diff)
	}
}

func TestNew_RefusesWhatValidateRefuses(t *testing.T) {
	p, err := kvm2.New(kvm2.Config{})
	if p != nil || !errors.Is(err, kvm2.ErrInvalidConfig) || !strings.Contains(err.Error(), "kvm2.uri: ") {
		t.Errorf("New(Config{}) = %v, %v; want ErrInvalidConfig that names kvm2.uri", p, err)
	}
}

func TestConfig_JSONRoundTrip(t *testing.T) {
	tests := []struct {
		name   string
		config kvm2.Config
		text   string
	}{
		{name: "least", config: validConfig(), text: `{"uri":"qemu:///system","scope":"prod"}`},
		{
			name: "full",
			config: kvm2.Config{
				URI: "qemu:///system", Scope: "prod", Host: "kvm-1", Pool: "p", Network: "n", DomainType: "qemu", Arch: "aarch64",
				OvercommitPercent: 150, CallTimeout: kvm2.Duration(90 * time.Second), MaxConnections: 8, IdleTimeout: kvm2.Duration(time.Minute),
				Images: kvm2.ImagesConfig{StallTimeout: kvm2.Duration(1500 * time.Millisecond), Timeout: kvm2.Duration(2 * time.Hour), MaxTransfers: 3, MaxRetries: -1, MaxExpandedBytes: 8 << 30},
			},
			text: `{"uri":"qemu:///system","scope":"prod","host":"kvm-1","pool":"p","network":"n","domainType":"qemu","arch":"aarch64",` +
				`"overcommitPercent":150,"callTimeout":"1m30s","maxConnections":8,"idleTimeout":"1m0s",` +
				`"images":{"stallTimeout":"1.5s","timeout":"2h0m0s","maxTransfers":3,"maxRetries":-1,"maxExpandedBytes":8589934592}}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text, err := json.Marshal(tt.config)
			if err != nil || string(text) != tt.text {
				t.Errorf("Marshal = %s, %v; want %s", text, err, tt.text)
			}
			got, err := kvm2.DecodeConfig(text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.config, got); diff != "" {
				t.Errorf("decoded it differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeConfig_IsStrict(t *testing.T) {
	tests := []struct{ name, text, says, why string }{
		{name: "nothing", text: ""},
		{name: "no JSON", text: "uri: qemu:///system"},
		{name: "an array", text: "[]"},
		{name: "cut off", text: `{"uri":"qemu:///system"`},
		{name: "unknown field", text: `{"uri":"qemu:///system","poool":"x"}`, says: `"poool"`, why: "a misspelt field would be its default"},
		{name: "unknown field below", text: `{"images":{"retries":3}}`, says: `"retries"`},
		{name: "two values", text: `{} {}`},
		{name: "text behind it", text: `{} x`},
		{name: "duration as a number", text: `{"callTimeout":30}`, says: "callTimeout", why: "30 of what?"},
		{name: "duration without a unit", text: `{"callTimeout":"30"}`},
		{name: "number as text", text: `{"maxConnections":"4"}`, says: "maxConnections"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := kvm2.DecodeConfig([]byte(tt.text))
			if !errors.Is(err, kvm2.ErrInvalidConfig) || kvm2.ClassOf(err) != kvm2.ClassPermanent || c != (kvm2.Config{}) {
				t.Fatalf("DecodeConfig = %+v, %v; want a Permanent ErrInvalidConfig; %s", c, err, tt.why)
			}
			if !strings.Contains(err.Error(), tt.says) {
				t.Errorf("DecodeConfig = %q, want it to say %q", err, tt.says)
			}
		})
	}
}

func TestDecodeConfig_WhiteSpaceAround(t *testing.T) {
	c, err := kvm2.DecodeConfig([]byte("\n {\"scope\": \"prod\"} \n"))
	if err != nil || c.Scope != "prod" {
		t.Errorf("DecodeConfig = %+v, %v", c, err)
	}
}

func TestDuration_TextRoundTrip(t *testing.T) {
	for _, d := range []time.Duration{0, 1, time.Millisecond, 90 * time.Second, 168 * time.Hour, -time.Second} {
		text, err := kvm2.Duration(d).MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var back kvm2.Duration
		if err := back.UnmarshalText(text); err != nil || time.Duration(back) != d {
			t.Errorf("%v is written %q and read as %v, %v", d, text, time.Duration(back), err)
		}
	}
	var d kvm2.Duration
	for _, text := range []string{"", "30", "1 minute", "s"} {
		if err := d.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("UnmarshalText(%q) = %v, want an error", text, time.Duration(d))
		}
	}
}
