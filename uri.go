package kvm2

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// hostURI is a parsed libvirt URI (https://libvirt.org/uri.html).
type hostURI struct {
	transport  string // "unix", "ssh", "tls" or "tcp"
	user, host string // user: of ssh, empty if none is named
	port       int    // 0 if none is named
	driver     string // what the daemon is asked to open: qemu:///system or qemu:///session
	sockets    []string
	keyFiles   []string
	knownHosts []string
	proxy      string // of ssh: how the socket is reached there; empty, "auto", "native" or "netcat"
	netcat     string // of ssh: the program for it
	pkiPath    string // of tls: the directory of the certificates
}

// uriParameters are the parameters that each transport takes, by libvirt's own names.
var uriParameters = map[string][]string{
	"unix": {"socket"},
	"ssh":  {"keyfile", "known_hosts", "netcat", "proxy", "socket"},
	"tls":  {"pkipath"},
	"tcp":  {},
}

var uriTransports = map[string]string{"qemu": "unix", "qemu+unix": "unix", "qemu+ssh": "ssh", "qemu+tls": "tls", "qemu+tcp": "tcp"}

// systemSockets are where libvirtd, and where it is split into daemons virtqemud, listen.
var systemSockets = []string{"/var/run/libvirt/libvirt-sock", "/var/run/libvirt/virtqemud-sock"}

// parseURI reads a libvirt URI. Errors never quote what may be a password.
func parseURI(s string) (hostURI, error) {
	if s == "" {
		return hostURI{}, errors.New("is missing: want a libvirt URI such as qemu:///system or qemu+ssh://user@host/system?keyfile=PATH")
	}
	u, err := url.Parse(s)
	if err != nil {
		return hostURI{}, errors.New("is not a URI") // url's own message quotes it all
	}
	h := hostURI{host: u.Hostname(), driver: "qemu://" + u.Path}
	if h.transport = uriTransports[u.Scheme]; h.transport == "" {
		return hostURI{}, fmt.Errorf("scheme %q: want qemu, qemu+unix, qemu+ssh, qemu+tls or qemu+tcp", clip(u.Scheme))
	}
	if u.Path != "/system" && u.Path != "/session" {
		return hostURI{}, errors.New("path: want /system or /session") // of a password with a slash, the rest would be quoted
	}
	if u.Fragment != "" || u.Opaque != "" {
		return hostURI{}, errors.New("has parts that a libvirt URI does not have")
	}
	if err := h.authority(u); err != nil {
		return hostURI{}, err
	}
	return h, h.parameters(u)
}

func (h *hostURI) authority(u *url.URL) error {
	if _, ok := u.User.Password(); ok {
		return errors.New("holds a password: kvm2 logs in with keys; name one with keyfile")
	}
	if h.transport == "unix" {
		if u.Host != "" || u.User != nil {
			return errors.New("names a host but no way to reach it: want qemu+ssh://, or qemu:/// for this machine")
		}
		return nil
	}
	if h.host == "" {
		return fmt.Errorf("names no host: want %s://host/system", u.Scheme)
	}
	if err := h.listening(u); err != nil {
		return err
	}
	h.user = u.User.Username()
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("port %q: want 1 to 65535", clip(p))
		}
		h.port = int(n)
	}
	return nil
}

// listening checks what only holds for a daemon that listens to the network itself.
func (h *hostURI) listening(u *url.URL) error {
	if h.transport == "ssh" {
		return nil
	}
	if u.User != nil {
		return fmt.Errorf("names a user: %s has none", u.Scheme)
	}
	if u.Path != "/system" {
		return errors.New("path: a session daemon does not listen to the network; want /system")
	}
	if h.transport == "tcp" && !isLoopback(h.host) {
		return errors.New("qemu+tcp is neither encrypted nor authenticated: want a loopback address, or qemu+tls or qemu+ssh")
	}
	return nil
}

func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

func (h *hostURI) parameters(u *url.URL) error {
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return errors.New("has parameters that cannot be read")
	}
	known := uriParameters[h.transport]
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if name == "no_verify" || name == "known_hosts_verify" {
			return fmt.Errorf("parameter %q: the host is always verified; name the file that holds the key with known_hosts", name)
		}
		if !slices.Contains(known, name) {
			return fmt.Errorf("parameter %q is unknown: %s takes %s", clip(name), u.Scheme, cmp.Or(strings.Join(known, ", "), "none"))
		}
		if form := parameterForm(name); len(values[name]) != 1 || !form.matches(values.Get(name)) {
			return fmt.Errorf("parameter %q: want one %s", name, form.what)
		}
	}
	h.sockets = single(values, "socket")
	h.keyFiles = single(values, "keyfile")
	h.knownHosts = single(values, "known_hosts")
	h.proxy, h.netcat, h.pkiPath = values.Get("proxy"), values.Get("netcat"), values.Get("pkipath")
	if h.transport == "ssh" {
		return h.remoteSocket()
	}
	return nil
}

// remoteSocket checks that the socket on the other host can be found.
func (h *hostURI) remoteSocket() error {
	if h.proxy == "native" && (h.sockets != nil || h.netcat != "") {
		return errors.New("proxy=native finds the socket by itself: leave out socket and netcat")
	}
	if !h.isSystem() && h.sockets == nil && h.proxy != "native" {
		return errors.New("a session daemon's socket on another host must be named with socket, or be found by proxy=native")
	}
	return nil
}

// valueForm is what the value of a parameter must look like.
type valueForm struct {
	what    string
	matches func(string) bool
}

var netcatForm = regexp.MustCompile(`^[A-Za-z0-9._/][A-Za-z0-9._/+-]*$`)

func parameterForm(name string) valueForm {
	switch name {
	case "proxy":
		return valueForm{"of auto, native, netcat", func(v string) bool { return v == "auto" || v == "native" || v == "netcat" }}
	case "netcat":
		return valueForm{"program, by name or path", netcatForm.MatchString}
	}
	return valueForm{"absolute path", func(v string) bool { return filepath.IsAbs(v) && !strings.ContainsRune(v, 0) }}
}

func single(values url.Values, name string) []string {
	if v := values.Get(name); v != "" {
		return []string{v}
	}
	return nil
}
