//go:build integration

package kvm2_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

// Most of what can happen to a machine happens to one that runs nothing as well: these guests are a boot sector, which
// starts under emulation in a second. SeaBIOS loads it to 0:7c00 and jumps there in real mode.

// idleSector waits for interrupts.
var idleSector = []byte{
	0xf4,       // hlt
	0xeb, 0xfd, // jmp to the hlt
}

// powerOffSector asks the BIOS to switch the machine off, by way of APM 1.2.
var powerOffSector = []byte{
	0xb8, 0x01, 0x53, // mov ax, 5301h: connect the real mode interface
	0x31, 0xdb, //       xor bx, bx: of the APM BIOS itself
	0xcd, 0x15, //       int 15h
	0xb8, 0x0e, 0x53, // mov ax, 530eh: speak version
	0x31, 0xdb, //       xor bx, bx
	0xb9, 0x02, 0x01, // mov cx, 0102h: 1.2
	0xcd, 0x15, //       int 15h
	0xb8, 0x07, 0x53, // mov ax, 5307h: set the power state
	0xbb, 0x01, 0x00, // mov bx, 1: of all devices
	0xb9, 0x03, 0x00, // mov cx, 3: to off
	0xcd, 0x15, //       int 15h
	0xf4,       //       hlt
	0xeb, 0xfd, //       jmp to the hlt
}

// fillSector writes 32 KiB of memory to every 32 KiB of the first disk, from sector 64 on and without end.
var fillSector = []byte{
	0x31, 0xc0, //                   xor ax, ax
	0x8e, 0xd8, //                   mov ds, ax
	0xbe, 0x18, 0x7c, //             mov si, 7c18h: the packet below
	0xb8, 0x00, 0x43, //             mov ax, 4300h: extended write, unverified
	0xb2, 0x80, //                   mov dl, 80h: the first disk
	0xcd, 0x13, //                   int 13h
	0x66, 0x83, 0x06, 0x20, 0x7c, 0x40, // add dword [7c20h], 64: the next sectors
	0xeb, 0xf1, //                   jmp to the mov ax
	0x90, 0x90, //                   up to 7c18h
	0x10, 0x00, 0x40, 0x00, //       packet of 16 bytes; 64 sectors
	0x00, 0x7c, 0x00, 0x00, //       from memory at 0:7c00
	0x40, 0, 0, 0, 0, 0, 0, 0, //    to this sector of the disk
}

// tinyImage makes a raw image of 1 MiB that begins with the code of a boot sector.
func tinyImage(t *testing.T, code []byte) kvm2.Image {
	t.Helper()
	disk := make([]byte, mib)
	copy(disk, code)
	disk[510], disk[511] = 0x55, 0xaa // what makes it a boot sector
	path := filepath.Join(t.TempDir(), "disk.raw")
	if err := os.WriteFile(path, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(disk)
	return kvm2.Image{URL: "file://" + path, Checksum: "sha256:" + hex.EncodeToString(sum[:])}
}

// tinySpec is a machine that needs next to nothing of the host. The owner's UID is its name.
func tinySpec(image kvm2.Image, name string) kvm2.Spec {
	return kvm2.Spec{
		Name: name, OwnerUID: name, Image: image, CPUs: 1, MemoryBytes: 64 * mib, RootDiskBytes: 2 * mib,
		Disks: []kvm2.Disk{{Name: "data", SizeBytes: mib}},
	}
}

const libvirtState = "/var/lib/libvirt/qemu/" // where libvirt keeps what belongs to a domain besides its disks

// anIntervention is what somebody does to a machine with libvirt's own tools, and what becomes of it.
type anIntervention struct {
	name   string
	do     func(t *testing.T, domain string)
	state  kvm2.State
	reason string
	leaves string // a file that belongs to the domain: there before Delete, gone after it
	why    string
}

func TestRealHost_WhatHappensBehindOurBack(t *testing.T) {
	interventions(t, "kvm2-it-states", []anIntervention{
		{
			name: "killed", state: kvm2.StateFailed, reason: "Crashed",
			do: func(t *testing.T, domain string) { t.Helper(); killQEMU(t, domain) },
		},
		{
			name: "destroyed", state: kvm2.StateStopped, reason: "Destroyed",
			do: func(t *testing.T, domain string) { t.Helper(); virsh(t, "destroy", domain) },
		},
		{
			name: "suspended", state: kvm2.StatePaused, reason: "User",
			do: func(t *testing.T, domain string) { t.Helper(); virsh(t, "suspend", domain) },
		},
		{
			name: "resumed", state: kvm2.StateRunning, reason: "Unpaused",
			do: func(t *testing.T, domain string) {
				t.Helper()
				virsh(t, "suspend", domain)
				virsh(t, "resume", domain)
			},
		},
		{
			name: "undefined while running", state: kvm2.StateRunning, reason: "Booted",
			do:  func(t *testing.T, domain string) { t.Helper(); virsh(t, "undefine", domain) },
			why: "it runs on as a transient domain, whose metadata can only be set live",
		},
		{
			name: "undefined and destroyed", state: kvm2.StateCreating,
			do: func(t *testing.T, domain string) {
				t.Helper()
				virsh(t, "undefine", domain)
				virsh(t, "destroy", domain)
			},
			why: "volumes without a domain are a machine that Create makes anew",
		},
	})
}

func TestRealHost_SavedStatesAndSnapshots(t *testing.T) {
	interventions(t, "kvm2-it-saved", []anIntervention{
		{
			name: "saved", state: kvm2.StateStopped, reason: "Saved", leaves: libvirtState + "save/DOMAIN.save",
			do:  func(t *testing.T, domain string) { t.Helper(); virsh(t, "managedsave", domain) },
			why: "a managed save image makes libvirt refuse to undefine",
		},
		{
			name: "restored", state: kvm2.StateRunning, reason: "Restored",
			do: func(t *testing.T, domain string) {
				t.Helper()
				virsh(t, "managedsave", domain)
				virsh(t, "start", domain)
			},
		},
		{
			name: "snapshot of a running machine", state: kvm2.StateRunning, reason: "Unpaused", leaves: libvirtState + "snapshot/DOMAIN/one.xml",
			do:  func(t *testing.T, domain string) { t.Helper(); virsh(t, "snapshot-create-as", domain, "one") },
			why: "snapshot metadata make libvirt refuse to undefine",
		},
		{
			name: "reverted to a snapshot", state: kvm2.StateRunning, reason: "FromSnapshot", leaves: libvirtState + "snapshot/DOMAIN/one.xml",
			do: func(t *testing.T, domain string) {
				t.Helper()
				virsh(t, "snapshot-create-as", domain, "one")
				virsh(t, "destroy", domain)
				virsh(t, "snapshot-revert", domain, "one")
			},
		},
		{
			name: "snapshot of a stopped machine", state: kvm2.StateStopped, reason: "Destroyed", leaves: libvirtState + "snapshot/DOMAIN/one.xml",
			do: func(t *testing.T, domain string) {
				t.Helper()
				virsh(t, "destroy", domain)
				virsh(t, "snapshot-create-as", domain, "one")
			},
		},
	})
}

// interventions has each done to a machine of its own, and checks that kvm2 sees it and can still remove everything.
func interventions(t *testing.T, scope string, tests []anIntervention) {
	t.Helper()
	h := withOwnPool(t, testhost.Require(t), scope)
	p := realProvider(t, h, h.UnixURI, scope)
	image := tinyImage(t, idleSector)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			spec := tinySpec(image, strings.ReplaceAll(tt.name, " ", "-"))
			domain := scope + "-" + spec.Name
			m := pollUntilRunning(t, p, spec)
			tt.do(t, domain)
			pollUntilState(t, p, m.ID, tt.state, tt.reason)
			wantListed(t, p, m.ID)
			belongings := strings.ReplaceAll(tt.leaves, "DOMAIN", domain)
			if belongings != "" && !fileExists(t, belongings) {
				t.Errorf("%s is not there: this tests nothing", belongings)
			}
			pollUntilDeleted(t, p, m.ID)
			wantNothingLeft(t, h, scope, domain, m.UUID)
			if t.Failed() && tt.why != "" {
				t.Log(tt.why)
			}
		})
	}
}

func TestRealHost_GuestThatSwitchesItselfOffIsStopped(t *testing.T) {
	const scope = "kvm2-it-poweroff"
	h := withOwnPool(t, testhost.Require(t), scope)
	p := realProvider(t, h, h.UnixURI, scope)
	spec := tinySpec(tinyImage(t, powerOffSector), "short-lived")
	var id string
	poll(t, time.Minute, func() bool { // it may be off before Create has seen it running
		m, err := p.Create(t.Context(), spec)
		if err != nil {
			t.Fatalf("Create() = %v", err)
		}
		id = m.ID
		return m.State != kvm2.StateCreating
	})
	m := pollUntilState(t, p, id, kvm2.StateStopped, "Shutdown")
	wantListed(t, p, id)

	again, err := p.Create(t.Context(), spec)
	if err != nil || again.State != kvm2.StateStopped {
		t.Errorf("Create() again = %s, %v; want it left Stopped: it did its work", again.State, err)
	}
	pollUntilDeleted(t, p, id)
	wantNothingLeft(t, h, scope, scope+"-"+spec.Name, m.UUID)
}

func TestRealHost_FullPoolPausesAndSpaceResumes(t *testing.T) {
	const scope = "kvm2-it-full"
	h := testhost.Require(t)
	t.Cleanup(func() { removeLogs(t, scope) })
	h.Pool, h.PoolPath = smallPool(t, h, scope+"-pool", "12m")
	p, err := kvm2.New(kvm2.Config{
		URI: h.UnixURI, Scope: scope, Pool: h.Pool, Network: h.Network, DomainType: "qemu", OvercommitPercent: 10_000,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
		removeScope(t, h.Pool, scope)
	})
	spec := tinySpec(tinyImage(t, fillSector), "writer")
	spec.RootDiskBytes = 64 * mib
	var id string
	poll(t, time.Minute, func() bool { // the pool may be full before Create has seen it running
		m, err := p.Create(t.Context(), spec)
		if err != nil {
			t.Fatalf("Create() = %v", err)
		}
		id = m.ID
		return m.State != kvm2.StateCreating
	})
	m := pollUntilState(t, p, id, kvm2.StatePaused, "IOError")
	wantListed(t, p, id)

	command(t, "mount", "-o", "remount,size=128m", h.PoolPath)
	virsh(t, "resume", scope+"-writer")
	pollUntilState(t, p, id, kvm2.StateRunning, "Unpaused")
	pollUntilDeleted(t, p, id)
	wantNothingLeft(t, h, scope, scope+"-writer", m.UUID)
}

func TestRealHost_DeleteTakesTheNVRAM(t *testing.T) {
	const scope = "kvm2-it-nvram"
	h := withOwnPool(t, testhost.Require(t), scope)
	// Any firmware does that fits in a flash chip: what counts is the file that libvirt makes of the template.
	dir := ownDir(t, h, scope+"-flash")
	code, variables := flashFile(t, dir, "code.fd"), flashFile(t, dir, "vars.fd")
	removeScope(t, h.Pool, scope)
	p, err := kvm2.New(kvm2.Config{URI: h.UnixURI, Scope: scope, Pool: h.Pool, Network: h.Network, DomainType: "qemu"},
		kvm2.WithDomainMutator(func(d *libvirtxml.Domain) {
			d.OS.Loader = &libvirtxml.DomainLoader{Path: code, Readonly: "yes", Type: "pflash"}
			d.OS.NVRam = &libvirtxml.DomainNVRam{Template: variables}
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
		removeScope(t, h.Pool, scope)
	})
	spec := tinySpec(tinyImage(t, idleSector), "flashed")
	m := pollUntilRunning(t, p, spec)
	nvram := libvirtState + "nvram/" + scope + "-flashed_VARS.fd"
	if !fileExists(t, nvram) {
		t.Errorf("%s is not there: this tests nothing", nvram)
	}
	pollUntilDeleted(t, p, m.ID)
	wantNothingLeft(t, h, scope, scope+"-flashed", m.UUID)
}

// An external snapshot puts a file into the pool's directory that libvirt does not tell the pool about.
func TestRealHost_ExternalSnapshotIsFoundWhenThePoolIsRefreshed(t *testing.T) {
	const scope = "kvm2-it-external"
	h := withOwnPool(t, testhost.Require(t), scope)
	p := realProvider(t, h, h.UnixURI, scope)
	spec := tinySpec(tinyImage(t, idleSector), "external")
	m := pollUntilRunning(t, p, spec)
	virsh(t, "snapshot-create-as", scope+"-external", "one", "--disk-only", "--diskspec", "vda", "--diskspec", "vdb,snapshot=no")
	pollUntilDeleted(t, p, m.ID)

	virsh(t, "pool-refresh", h.Pool)
	wantListed(t, p, m.ID)
	pollUntilDeleted(t, p, m.ID)
	wantNothingLeft(t, h, scope, scope+"-external", m.UUID)
}

// pollUntilState waits for a state: libvirt learns what becomes of a guest from events.
func pollUntilState(t *testing.T, p *kvm2.Provider, id string, state kvm2.State, reason string) kvm2.Machine {
	t.Helper()
	var m kvm2.Machine
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the machine was last seen %s %q (%+v)", m.State, m.Reason, m.Libvirt)
		}
	})
	poll(t, time.Minute, func() bool {
		var err error
		m, err = p.Get(t.Context(), id)
		if err != nil {
			t.Fatalf("Get() = %v", err)
		}
		return m.State == state && m.Reason == reason
	})
	return m
}

// wantListed checks that List says of a machine what Get says.
func wantListed(t *testing.T, p *kvm2.Provider, id string) {
	t.Helper()
	want, err := p.Get(t.Context(), id)
	if err != nil {
		t.Fatalf("Get() = %v", err)
	}
	listed, err := p.List(t.Context())
	if err != nil {
		t.Fatalf("List() = %v", err)
	}
	i := slices.IndexFunc(listed, func(m kvm2.Machine) bool { return m.ID == id })
	if i < 0 {
		t.Fatalf("List() has no %s", id)
	}
	// Get asks more sources for addresses.
	if diff := cmp.Diff(want, listed[i], cmpopts.IgnoreFields(kvm2.Machine{}, "Addresses")); diff != "" {
		t.Errorf("Get and List differ (-Get +List):\n%s", diff)
	}
}

// wantNothingLeft looks for whatever may remain of a machine: libvirt's objects, and its own files about a domain.
func wantNothingLeft(t *testing.T, h testhost.Host, scope, domain string, uuid kvm2.UUID) {
	t.Helper()
	if slices.Contains(domainsOf(t, scope), domain) {
		t.Errorf("domain %q is left", domain)
	}
	for _, v := range volumesOf(t, h.Pool, scope+"-"+uuid.String()) {
		t.Errorf("volume %q is left", v)
	}
	for _, place := range []string{
		libvirtState + "save/DOMAIN.save", libvirtState + "snapshot/DOMAIN", libvirtState + "checkpoint/DOMAIN",
		libvirtState + "nvram/DOMAIN_VARS.fd", "/etc/libvirt/qemu/DOMAIN.xml", "/run/libvirt/qemu/DOMAIN.pid", "/run/libvirt/qemu/DOMAIN.xml",
	} {
		if path := strings.ReplaceAll(place, "DOMAIN", domain); fileExists(t, path) {
			t.Errorf("%s is left", path)
		}
	}
}

func fileExists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Stat(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return err == nil
}

// qemuPID is the process that libvirtd started for a domain.
func qemuPID(t *testing.T, domain string) int {
	t.Helper()
	text, err := os.ReadFile("/run/libvirt/qemu/" + domain + ".pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	// A number is reused sooner or later; the process must say itself that it is this domain's.
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(line), "guest="+domain+",") {
		t.Fatalf("process %d is not the one of %q", pid, domain)
	}
	return pid
}

func killQEMU(t *testing.T, domain string) {
	t.Helper()
	if err := syscall.Kill(qemuPID(t, domain), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// command runs one of the host's own tools.
func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

// ownDir makes a directory that qemu can reach, beside the test host's own.
func ownDir(t *testing.T, h testhost.Host, name string) string {
	t.Helper()
	path := filepath.Join(h.Dir, name)
	remove := func() {
		if err := os.RemoveAll(path); err != nil {
			t.Error(err)
		}
	}
	remove() // what an interrupted run left
	t.Cleanup(remove)
	if err := os.Mkdir(path, 0o711); err != nil {
		t.Fatal(err)
	}
	return path
}

// withOwnPool returns the test host with an active pool for the test alone: libvirt refuses to refresh a pool while
// somebody uploads into it.
func withOwnPool(t *testing.T, h testhost.Host, scope string) testhost.Host {
	t.Helper()
	h.Pool = scope + "-pool"
	h.PoolPath = dirPool(t, h, h.Pool)
	virsh(t, "pool-start", h.Pool)
	t.Cleanup(func() { removeLogs(t, scope) })
	return h
}

// removeLogs removes the logs of domains that are gone: libvirt keeps them.
func removeLogs(t *testing.T, scope string) {
	t.Helper()
	logs, err := filepath.Glob("/var/log/libvirt/qemu/" + scope + "-*.log")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range logs {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// dirPool defines a directory pool, inactive, and removes it when the test ends.
func dirPool(t *testing.T, h testhost.Host, name string) (path string) {
	t.Helper()
	removePool(name) // what an interrupted run left
	path = ownDir(t, h, name)
	t.Cleanup(func() { removePool(name) })
	virsh(t, "pool-define-as", name, "dir", "--target", path)
	return path
}

// removePool fails where there is nothing to remove, which is what it is for.
func removePool(name string) {
	_, _ = testhost.Virsh("pool-destroy", name)
	_, _ = testhost.Virsh("pool-undefine", name)
}

// smallPool starts a pool on a file system of its own, of a size in the form of mount.
func smallPool(t *testing.T, h testhost.Host, name, size string) (pool, path string) {
	t.Helper()
	_ = exec.Command("umount", filepath.Join(h.Dir, name)).Run() // what an interrupted run left
	path = dirPool(t, h, name)
	command(t, "mount", "-t", "tmpfs", "-o", "size="+size+",mode=0711", "none", path)
	t.Cleanup(func() {
		removePool(name)
		command(t, "umount", path)
	})
	virsh(t, "pool-start", name)
	return name, path
}

// flashFile makes the content of a flash chip, of a size that q35 takes.
func flashFile(t *testing.T, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, make([]byte, 256<<10), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
