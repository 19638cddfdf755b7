// Package testhost tells tests where the libvirt host is that testhost.sh made.
//
// The script turns a Debian 12 machine into such a host and leaves a description of
// it behind; Load reads that, and Require lets a test run only where there is one.
package testhost

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

const (
	// DirVariable names the environment variable that says where the test host's
	// files are. Load and the script both follow it.
	DirVariable = "KVM2_TESTHOST_DIR"

	// RequireVariable names the environment variable which, set to "1", makes
	// Require fail a test that it would otherwise skip.
	RequireVariable = "KVM2_REQUIRE_TESTHOST"

	defaultDir  = "/var/lib/kvm2-testhost"
	description = "testhost.json"
	dialTimeout = 5 * time.Second
)

// Host describes a test host. All paths are absolute, on the machine the tests
// run on: it is the libvirt host and, over loopback, the SSH server too.
type Host struct {
	Dir string `json:"dir"` // everything below was made here

	Pool     string `json:"pool"`      // the storage pool's name
	PoolPath string `json:"pool_path"` // and directory
	Network  string `json:"network"`   // an isolated network with DHCP
	Subnet   string `json:"subnet"`    // in CIDR notation; the host has the first address

	UnixURI string `json:"unix_uri"` // libvirt connection URI over the unix socket
	SSHURI  string `json:"ssh_uri"`  // libvirt connection URI over SSH
	Socket  string `json:"socket"`   // the unix socket of libvirtd

	SSHPort      int      `json:"ssh_port"` // on 127.0.0.1
	SSHDPIDFile  string   `json:"sshd_pid_file"`
	SSHDConfig   string   `json:"sshd_config"`
	HostKeyFiles []string `json:"host_key_files"` // private halves; ".pub" beside each
	KeyFile      string   `json:"key_file"`       // logs root in; ".pub" beside it
	KnownHosts   string   `json:"known_hosts"`

	Image       string `json:"image"`        // a Debian 12 cloud image, qcow2
	ImageSHA256 string `json:"image_sha256"` // in hexadecimal
	ImageSize   int64  `json:"image_size"`   // of the file, in bytes
	VirtualSize int64  `json:"virtual_size"` // of the disk in it, in bytes
	GuestArch   string `json:"guest_arch"`   // as libvirt spells it

	LibvirtVersion  string `json:"libvirt_version"`
	QEMUVersion     string `json:"qemu_version"`
	LibvirtdPIDFile string `json:"libvirtd_pid_file"` // "" if the script did not start libvirtd
}

// Load reads the description of the test host, without looking whether it is up.
// The error says what to do when there is none.
func Load() (Host, error) {
	path := filepath.Join(dir(), description)
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return Host{}, fmt.Errorf("no test host: run internal/testhost/testhost.sh as root to make one: %w", err)
	}
	if err != nil {
		return Host{}, fmt.Errorf("reading the description of the test host: %w", err)
	}
	var h Host
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&h); err != nil {
		return Host{}, fmt.Errorf("%q is not of this version, run internal/testhost/testhost.sh again: %w", path, err)
	}
	return h, nil
}

// Require returns the test host. Where there is none, or it is down, it skips the
// test, or fails it if the environment variable KVM2_REQUIRE_TESTHOST is "1".
func Require(tb testing.TB) Host {
	tb.Helper()
	h, err := Load()
	if err == nil {
		err = h.reachable()
	}
	if err == nil {
		return h
	}
	if os.Getenv(RequireVariable) == "1" {
		tb.Fatalf("%s needs a test host: %v", tb.Name(), err)
	}
	tb.Skipf("%s needs a test host: %v", tb.Name(), err)
	return Host{}
}

// reachable reports whether libvirtd and sshd accept connections. The description
// outlives both of them when the machine restarts.
func (h Host) reachable() error {
	for network, address := range map[string]string{
		"unix": h.Socket,
		"tcp":  net.JoinHostPort("127.0.0.1", strconv.Itoa(h.SSHPort)),
	} {
		conn, err := net.DialTimeout(network, address, dialTimeout)
		if err != nil {
			return fmt.Errorf("the test host is down, run internal/testhost/testhost.sh again: %w", err)
		}
		conn.Close()
	}
	return nil
}

func dir() string {
	if d := os.Getenv(DirVariable); d != "" {
		return d
	}
	return defaultDir
}
