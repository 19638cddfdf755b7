package kvm2

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// hostURI is a parsed libvirt URI (https://libvirt.org/uri.html).
type hostURI struct {
	transport  string // "unix" or "ssh"
	user, host string // of ssh
	port       int    // of ssh
	driver     string // what the daemon is asked to open: qemu:///system or qemu:///session
	sockets    []string
	keyFiles   []string
	knownHosts []string
}

// uriParameters are the parameters that each transport takes, by libvirt's own names.
var uriParameters = map[string][]string{
	"unix": {"socket"},
	"ssh":  {"keyfile", "known_hosts", "socket"},
}

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
	switch u.Scheme {
	case "qemu", "qemu+unix":
		h.transport = "unix"
	case "qemu+ssh":
		h.transport = "ssh"
	default:
		return hostURI{}, fmt.Errorf("scheme %q: want qemu, qemu+unix or qemu+ssh", clip(u.Scheme))
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
		return errors.New("names no host: want qemu+ssh://user@host/system")
	}
	h.user, h.port = "root", 22
	if u.User != nil && u.User.Username() != "" {
		h.user = u.User.Username()
	}
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("port %q: want 1 to 65535", clip(p))
		}
		h.port = int(n)
	}
	return nil
}

func (h *hostURI) parameters(u *url.URL) error {
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return errors.New("has parameters that cannot be read")
	}
	known := uriParameters[h.transport]
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if name == "no_verify" || name == "known_hosts_verify" {
			return fmt.Errorf("parameter %q: host keys are always verified; name the file that holds the key with known_hosts", name)
		}
		if !slices.Contains(known, name) {
			return fmt.Errorf("parameter %q is unknown: %s takes %s", clip(name), u.Scheme, strings.Join(known, ", "))
		}
		if len(values[name]) != 1 || !filepath.IsAbs(values.Get(name)) {
			return fmt.Errorf("parameter %q: want one absolute path", name)
		}
	}
	h.sockets = single(values, "socket")
	h.keyFiles = single(values, "keyfile")
	h.knownHosts = single(values, "known_hosts")
	if h.transport == "ssh" && u.Path == "/session" && h.sockets == nil {
		return errors.New("a session daemon's socket on another host must be named with socket")
	}
	return nil
}

func single(values url.Values, name string) []string {
	if v := values.Get(name); v != "" {
		return []string{v}
	}
	return nil
}
