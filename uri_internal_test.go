package kvm2

import (
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseURI_Accepts(t *testing.T) {
	const system, session = "qemu:///system", "qemu:///session"
	tests := []struct {
		uri  string
		want hostURI
		why  string
	}{
		{uri: "qemu:///system", want: hostURI{transport: "unix", driver: system}},
		{uri: "qemu:///session", want: hostURI{transport: "unix", driver: session}},
		{uri: "qemu:/system", want: hostURI{transport: "unix", driver: system}, why: "libvirt takes it too"},
		{uri: "QEMU:///system", want: hostURI{transport: "unix", driver: system}, why: "schemes are not case-sensitive (RFC 3986)"},
		{uri: "qemu+unix:///system", want: hostURI{transport: "unix", driver: system}},
		{
			uri:  "qemu+unix:///session?socket=/tmp/a%20b/sock",
			want: hostURI{transport: "unix", driver: session, sockets: []string{"/tmp/a b/sock"}},
		},
		{uri: "qemu:///system?socket=/run/s", want: hostURI{transport: "unix", driver: system, sockets: []string{"/run/s"}}},
		{uri: "qemu+ssh://host/system", want: hostURI{transport: "ssh", driver: system, host: "host"}},
		{uri: "qemu+ssh://admin@host:2222/system", want: hostURI{transport: "ssh", driver: system, user: "admin", host: "host", port: 2222}},
		{uri: "qemu+ssh://@host/system", want: hostURI{transport: "ssh", driver: system, host: "host"}},
		{uri: "qemu+ssh://host:/system", want: hostURI{transport: "ssh", driver: system, host: "host"}},
		{uri: "qemu+ssh://DOM%5Cadmin@host/system", want: hostURI{transport: "ssh", driver: system, user: `DOM\admin`, host: "host"}},
		{uri: "qemu+ssh://[2001:db8::1]:65535/system", want: hostURI{transport: "ssh", driver: system, host: "2001:db8::1", port: 65535}},
		{
			uri: "qemu+ssh://u@h/system?keyfile=/k/id&known_hosts=/k/hosts&socket=/run/s",
			want: hostURI{
				transport: "ssh", driver: system, user: "u", host: "h",
				sockets: []string{"/run/s"}, keyFiles: []string{"/k/id"}, knownHosts: []string{"/k/hosts"},
			},
		},
		{
			uri:  "qemu+ssh://u@h/session?socket=/run/user/1000/libvirt/libvirt-sock",
			want: hostURI{transport: "ssh", driver: session, user: "u", host: "h", sockets: []string{"/run/user/1000/libvirt/libvirt-sock"}},
		},
		{uri: "qemu+ssh://h/system?proxy=auto&netcat=/opt/nc", want: hostURI{transport: "ssh", driver: system, host: "h", proxy: "auto", netcat: "/opt/nc"}},
		{uri: "qemu+ssh://h/session?proxy=native", want: hostURI{transport: "ssh", driver: session, host: "h", proxy: "native"}, why: "the helper finds the socket"},
		{uri: "qemu+ssh://h/session?proxy=auto&socket=/s", want: hostURI{transport: "ssh", driver: session, host: "h", proxy: "auto", sockets: []string{"/s"}}},
		{uri: "qemu+tls://kvm1.example/system", want: hostURI{transport: "tls", driver: system, host: "kvm1.example"}},
		{uri: "qemu+tls://kvm1.example:1/system?pkipath=/pki", want: hostURI{transport: "tls", driver: system, host: "kvm1.example", port: 1, pkiPath: "/pki"}},
		{uri: "qemu+tcp://localhost/system", want: hostURI{transport: "tcp", driver: system, host: "localhost"}},
		{uri: "qemu+tcp://127.9.9.9:1/system", want: hostURI{transport: "tcp", driver: system, host: "127.9.9.9", port: 1}},
		{uri: "qemu+tcp://[::1]/system", want: hostURI{transport: "tcp", driver: system, host: "::1"}},
	}
	for _, tt := range tests {
		t.Run(tt.uri, func(t *testing.T) {
			got, err := parseURI(tt.uri)
			if err != nil {
				t.Fatalf("parseURI: %v; %s", err, tt.why)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(hostURI{})); diff != "" {
				t.Errorf("parsed it differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseURI_Refuses(t *testing.T) {
	tests := []struct{ uri, says, why string }{
		{uri: "", says: "missing"},
		{uri: "qemu:///sys tem%", says: "not a URI"},
		{uri: "qemu+ssh://ho st/system", says: "not a URI"},
		{uri: "qemu+ssh://host:port/system", says: "not a URI"},
		{uri: "/run/libvirt/libvirt-sock", says: `scheme ""`},
		{uri: "localhost", says: `scheme ""`},
		{uri: "xen:///system", says: `scheme "xen"`},
		{uri: "test:///default", says: `scheme "test"`, why: "libvirt's test driver behaves unlike qemu"},
		{uri: "qemu+tcp://host/system", says: "loopback", why: "not encrypted"},
		{uri: "qemu+tcp://192.0.2.1/system", says: "loopback", why: "not encrypted"},
		{uri: "qemu+tcp://localhost.example/system", says: "loopback"},
		{uri: "qemu+tcp://127.0.0.1/session", says: "session"},
		{uri: "qemu+tcp://127.0.0.1/system?socket=/s", says: "takes none"},
		{uri: "qemu+tls://host/session", says: "session"},
		{uri: "qemu+tls://user@host/system", says: "names a user", why: "it would be for SASL, which kvm2 does not know"},
		{uri: "qemu+tls:///system", says: "names no host"},
		{uri: "qemu+tls://host/system?no_verify=1", says: "always verified"},
		{uri: "qemu+tls://host/system?pkipath=pki", says: "absolute path"},
		{uri: "qemu+ssh://h/system?proxy=none", says: "auto, native, netcat"},
		{uri: "qemu+ssh://h/system?proxy=auto&proxy=native", says: "auto, native, netcat"},
		{uri: "qemu+ssh://h/system?netcat=nc%20-e%20sh", says: "program", why: "libvirt would run it"},
		{uri: "qemu+ssh://h/system?netcat=-e", says: "program"},
		{uri: "qemu+ssh://h/system?netcat=", says: "program"},
		{uri: "qemu+ssh://h/system?netcat=$(x)", says: "program"},
		{uri: "qemu+ssh://h/system?proxy=native&socket=/s", says: "by itself", why: "the helper ignores it"},
		{uri: "qemu+ssh://h/system?proxy=native&netcat=nc", says: "by itself"},
		{uri: "qemu+ssh://h/session?proxy=auto", says: "socket", why: "netcat would not find it"},
		{uri: "qemu+ssh://h/system?socket=/s%00", says: "absolute path", why: "a shell would see another path"},
		{uri: "qemu+libssh2://host/system", says: `scheme "qemu+libssh2"`},
		{uri: "qemu:system", says: "/system or /session"},
		{uri: "qemu://", says: "/system or /session"},
		{uri: "qemu:///", says: "/system or /session"},
		{uri: "qemu:///System", says: "/system or /session"},
		{uri: "qemu:///system/", says: "/system or /session"},
		{uri: "qemu:///embed?root=/x", says: "/system or /session"},
		{uri: "qemu:///system#x", says: "does not have"},
		{uri: "qemu://host/system", says: "names a host but no way to reach it", why: "libvirt would use TLS"},
		{uri: "qemu+unix://host/system", says: "names a host"},
		{uri: "qemu+unix://user@/system", says: "names a host"},
		{uri: "qemu+ssh:///system", says: "names no host"},
		{uri: "qemu+ssh://user@/system", says: "names no host"},
		{uri: "qemu+ssh://:22/system", says: "names no host"},
		{uri: "qemu+ssh://user:pw@host/system", says: "password"},
		{uri: "qemu+ssh://user:@host/system", says: "password"},
		{uri: "qemu+ssh://host:0/system", says: "port"},
		{uri: "qemu+ssh://host:65536/system", says: "port"},
		{uri: "qemu:///system?keyfile=/k", says: `parameter "keyfile" is unknown`, why: "there is no SSH"},
		{uri: "qemu+ssh://h/system?key_file=/k", says: `parameter "key_file" is unknown`},
		{uri: "qemu+ssh://h/system?no_verify=0", says: "always verified"},
		{uri: "qemu+ssh://h/system?known_hosts_verify=ignore", says: "always verified"},
		{uri: "qemu+ssh://h/system?command=/bin/sh", says: `parameter "command" is unknown`, why: "libvirt would run it"},
		{uri: "qemu+ssh://h/system?keyfile=~/.ssh/id", says: "absolute path", why: "a controller has no home directory to speak of"},
		{uri: "qemu+ssh://h/system?keyfile=", says: "absolute path"},
		{uri: "qemu+ssh://h/system?keyfile", says: "absolute path"},
		{uri: "qemu+ssh://h/system?keyfile=/a&keyfile=/b", says: "absolute path", why: "one of the two would be ignored"},
		{uri: "qemu+ssh://h/system?keyfile=/a;socket=/b", says: "parameters"},
		{uri: "qemu+ssh://h/system?socket=%zz", says: "parameters"},
		{uri: "qemu+ssh://h/session", says: "socket", why: "where a session's socket is depends on who logs in"},
	}
	for _, tt := range tests {
		t.Run(tt.uri, func(t *testing.T) {
			_, err := parseURI(tt.uri)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("parseURI = %v, want an error that says %q; %s", err, tt.says, tt.why)
			}
		})
	}
}

func TestParseURI_PasswordsStayOut(t *testing.T) {
	for _, password := range []string{"hunter2hunter2", "4711/hunter2", "4711?hunter2", "4711#hunter2", "hun/ter2hunter2", "%zzhunter2", "hunter2 hunter2", "hunter2\nhunter2"} {
		for _, form := range []string{
			"qemu+ssh://user:PW@host/system", "qemu+ssh://user:PW@host/system?keyfile=x", "qemu://user:PW@host/system", "xen+ssh://user:PW@host/",
			"qemu+ssh://user:PW@host:99999/system", "qemu+ssh://user:PW@/system", "qemu+ssh:user:PW@host/system", "qemu+ssh://user:PW@host/sys",
		} {
			uri := strings.Replace(form, "PW", password, 1)
			err := Config{URI: uri, Scope: "prod"}.Validate("")
			if err == nil {
				t.Errorf("%q was accepted", uri)
				continue
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error for %q tells the password: %v", uri, err)
			}
		}
	}
}

func FuzzParseURI(f *testing.F) {
	f.Add("qemu+ssh://u@h:22/system?keyfile=/k/id&known_hosts=/k/hosts&socket=/run/s")
	f.Add("qemu:///session?socket=/run/s")
	f.Add("qemu+ssh://user:hunter2hunter2@[::1]:22/system")
	f.Add("qemu:system")
	f.Add("qemu+ssh://h/system?proxy=auto&netcat=nc")
	f.Add("qemu+tls://h:1/system?pkipath=/pki")
	f.Add("qemu+tcp://127.0.0.1/system")
	f.Fuzz(func(t *testing.T, text string) {
		h, err := parseURI(text)
		if err != nil {
			if u, parseErr := url.Parse(text); parseErr == nil {
				if pw, ok := u.User.Password(); ok && len(pw) > 12 && strings.Contains(err.Error(), pw) {
					t.Errorf("parseURI(%q) tells the password: %v", text, err)
				}
			}
			return
		}
		if h.driver != "qemu:///system" && h.driver != "qemu:///session" {
			t.Errorf("parseURI(%q) has driver %q", text, h.driver)
		}
		if local := h.transport == "unix"; local != (h.host == "") || local && h.port != 0 || h.port < 0 || h.port > 65535 {
			t.Errorf("parseURI(%q) = %+v: host and port belong to a network", text, h)
		}
		if h.transport != "ssh" && (h.user != "" || h.proxy != "" || h.netcat != "") {
			t.Errorf("parseURI(%q) = %+v: user and proxy belong to ssh", text, h)
		}
		if h.transport == "tcp" && !isLoopback(h.host) {
			t.Errorf("parseURI(%q) = %+v: unprotected", text, h)
		}
		for _, path := range slices.Concat(h.sockets, h.keyFiles, h.knownHosts) {
			if !filepath.IsAbs(path) {
				t.Errorf("parseURI(%q) has the relative path %q", text, path)
			}
		}
	})
}

func TestHostURI_LocalSockets(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	tests := []struct {
		uri  string
		want []string
		why  string
	}{
		{uri: "qemu:///system?socket=/s", want: []string{"/s"}},
		{uri: "qemu:///system", want: systemSockets, why: "libvirtd's, then virtqemud's"},
		{uri: "qemu:///session", want: []string{"/run/user/7/libvirt/libvirt-sock", "/run/user/7/libvirt/virtqemud-sock"}},
	}
	for _, tt := range tests {
		h, err := parseURI(tt.uri)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, h.localSockets()); diff != "" {
			t.Errorf("sockets of %q differ (-want +got):\n%s%s", tt.uri, diff, tt.why)
		}
	}
}

func TestConfig_Defaults(t *testing.T) {
	want := Config{
		URI: "qemu:///system", Scope: "prod", Pool: "default", Network: "default", DomainType: "kvm", Arch: "x86_64", OvercommitPercent: 100,
		CallTimeout: Duration(30 * time.Second), MaxConnections: 4, IdleTimeout: Duration(time.Minute),
		Images: ImagesConfig{StallTimeout: Duration(time.Minute), Timeout: Duration(time.Hour), MaxTransfers: 2, MaxRetries: 5, MaxExpandedBytes: 64 * gib},
	}
	if diff := cmp.Diff(want, Config{URI: "qemu:///system", Scope: "prod"}.withDefaults()); diff != "" {
		t.Errorf("defaults differ (-want +got):\n%s", diff)
	}
	set := Config{
		Pool: "p", Network: "n", DomainType: "qemu", Arch: "aarch64", OvercommitPercent: 1, CallTimeout: 1, MaxConnections: 1, IdleTimeout: 1,
		Images: ImagesConfig{StallTimeout: 1, Timeout: 1, MaxTransfers: 1, MaxRetries: 1, MaxExpandedBytes: 1},
	}
	if diff := cmp.Diff(set, set.withDefaults()); diff != "" {
		t.Errorf("what was set was changed (-want +got):\n%s", diff)
	}
}

func TestConfig_HostName(t *testing.T) {
	for _, tt := range []struct{ host, uri, want string }{
		{"", "qemu:///system", "localhost"},
		{"", "qemu+ssh://u@kvm-1:22/system", "kvm-1"},
		{"name", "qemu+ssh://u@kvm-1/system", "name"},
		{"name", "qemu:///system", "name"},
	} {
		uri, err := parseURI(tt.uri)
		if err != nil {
			t.Fatal(err)
		}
		if got := (Config{Host: tt.host}).hostName(uri); got != tt.want {
			t.Errorf("host name of %q with Host %q = %q, want %q", tt.uri, tt.host, got, tt.want)
		}
	}
}
