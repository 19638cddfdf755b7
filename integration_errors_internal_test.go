//go:build integration

package kvm2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2/internal/testhost"
)

// leastProvoked is how many of the observed errors the test host must still give.
const leastProvoked = 25

// TestRealHost_ErrorsAreClassified provokes the errors of testdata/libvirt-observed.tsv anew, through the seam, and
// holds what kvm2 makes of them against testdata/classes.tsv.
func TestRealHost_ErrorsAreClassified(t *testing.T) {
	host := newErrorHost(t)
	provoke, reasons := provocations(), maps.Clone(unprovoked)
	provoked := 0
	rows := readTable(t, "testdata/classes.tsv", 5)
	for _, row := range rows {
		key := row[0] + " " + row[1]
		do, ok := provoke[key]
		if !ok {
			if reasons[key] == "" {
				t.Errorf("nothing provokes %q, and nothing says why", key)
			}
			delete(reasons, key)
			continue
		}
		delete(provoke, key)
		t.Run(strings.ReplaceAll(key, "/", " "), func(t *testing.T) {
			err := do(host.during(t))
			if errors.Is(err, errNotOnThisHost) {
				t.Log(err)
				return
			}
			wantObserved(t, err, row)
			provoked++
		})
	}
	for key := range provoke {
		t.Errorf("%q is provoked, but testdata/classes.tsv has no such row", key)
	}
	for key := range reasons {
		t.Errorf("%q has a reason not to be provoked, but testdata/classes.tsv has no such row, or it is provoked", key)
	}
	t.Logf("provoked %d of %d", provoked, len(rows))
	if provoked < leastProvoked {
		t.Errorf("provoked %d errors, want at least %d", provoked, leastProvoked)
	}
}

// wantObserved checks an error against a row of code, operation observed, kvm2's operation, class and sentinel.
func wantObserved(t *testing.T, err error, row []string) {
	t.Helper()
	answer, ok := errors.AsType[*LibvirtError](err)
	if !ok || fmt.Sprint(answer.Code) != row[0] {
		t.Fatalf("error = %v, want libvirt's code %s", err, row[0])
	}
	e, ok := errors.AsType[*Error](err)
	if !ok || string(e.Op) != row[2] {
		t.Errorf("error = %+v, want one of operation %s", err, row[2])
	}
	if got := ClassOf(err); got != classNamed(t, row[3]) {
		t.Errorf("class of %v is %s, want %s", err, got, row[3])
	}
	wantIs(t, err, sentinels[row[4]])
}

// errNotOnThisHost says that a host is too capable, or may do too little, for an error to occur.
var errNotOnThisHost = errors.New("not on this host")

// unprovoked says why the seam never meets the other errors.
var unprovoked = map[string]string{
	"8 DomainCapabilities kvm":                  "no call of the seam asks for domain capabilities",
	"8 Undefine unknown flag":                   "the seam tries other flags then",
	"8 VolResize shrink":                        "no call of the seam resizes",
	"9 CreateXML same name running":             "no call of the seam makes transient domains",
	"9 PoolDefine same name no uuid":            "no call of the seam defines pools",
	"21 Define empty name":                      "the seam validates: the schema refuses it first",
	"21 Define no name":                         "likewise",
	"27 Define bad mac":                         "likewise",
	"27 Define multicast mac":                   "likewise",
	"38 PoolCreate missing dir":                 "no call of the seam starts pools",
	"38 Start overlay w/o backing fmt":          "the same as a missing disk: the file itself is not there",
	"38 upload 16M zeros to 2M pool":            "the same as with data, once the file is not sparse",
	"42 GetState gone":                          "one call asks for name, state and metadata",
	"42 XMLDesc gone":                           "no call of the seam asks for a domain's XML",
	"50 VolLookupByKey missing":                 "the seam finds volumes by pool and name",
	"50 VolLookupByPath missing":                "likewise",
	"55 GetMetadata LIVE not running":           "the seam asks for what is current",
	"55 InterfaceAddresses agent not running":   "a source that cannot answer gives no records",
	"55 InterfaceAddresses lease not running":   "likewise",
	"55 PoolCreate again (active)":              "no call of the seam starts pools",
	"55 Shutdown not running":                   "no call of the seam shuts down",
	"55 undefine flags 0":                       "the seam gives all flags",
	"55 undefine no flags":                      "likewise",
	"55 undefine with managed save":             "likewise",
	"55 undefine with snapshot":                 "likewise",
	"67 Define kvm w/o /dev/kvm perms":          "it takes a host without KVM",
	"67 Start bad cpu (define)":                 "the same as the one before",
	"74 InterfaceAddresses bad source":          "the seam names no such source",
	"80 GetMetadata missing":                    "no metadata are no error of the seam",
	"80 metadata after redefine":                "likewise",
	"86 InterfaceAddresses agent not connected": "a source that cannot answer gives no records",
	"90 create same vol during build":           "it is the same answer as after the build",
}

// errorHost is the test host with pools and a network for mishaps.
type errorHost struct {
	testhost.Host
	dial *decorator

	pool     string // active, at dir
	dir      string
	inactive string // a pool
	small    string // an active pool of 2 MiB; empty where nothing can be mounted
	network  string // inactive
}

const errorPrefix = "kvm2-it-errors"

func newErrorHost(t *testing.T) *errorHost {
	t.Helper()
	h := &errorHost{Host: testhost.Require(t), pool: errorPrefix + "-pool", inactive: errorPrefix + "-inactive", network: errorPrefix + "-net"}
	uri, err := parseURI(h.UnixURI)
	if err != nil {
		t.Fatal(err)
	}
	h.dial = h.dialer(uri)
	h.removeDomains(t)

	h.dir = h.definePool(t, h.pool)
	manage(t, "pool-start", h.pool)
	h.definePool(t, h.inactive)
	h.mountSmall(t)

	attempt("net-undefine", h.network) // what an interrupted run left
	manage(t, "net-define", h.file(t, "net.xml", "<network><name>"+h.network+"</name></network>"))
	t.Cleanup(func() { manage(t, "net-undefine", h.network) })
	t.Cleanup(func() { h.removeDomains(t) })
	return h
}

func (h *errorHost) dialer(uri hostURI) *decorator {
	return &decorator{next: &libvirtDialer{uri: uri}, host: "test-host", timeout: 30 * time.Second, log: slog.New(slog.DiscardHandler)}
}

// definePool makes a pool in a directory of its own, inactive.
func (h *errorHost) definePool(t *testing.T, name string) (dir string) {
	t.Helper()
	dir = filepath.Join(h.Dir, name)
	remove := func() {
		attempt("pool-destroy", name)
		attempt("pool-undefine", name)
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	}
	remove()
	t.Cleanup(remove)
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	manage(t, "pool-define-as", name, "dir", "--target", dir)
	return dir
}

// mountSmall makes a pool on a file system of 2 MiB, where the host lets us mount one.
func (h *errorHost) mountSmall(t *testing.T) {
	t.Helper()
	name := errorPrefix + "-small"
	_ = exec.Command("umount", filepath.Join(h.Dir, name)).Run() // what an interrupted run left
	dir := h.definePool(t, name)
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=2m,mode=0711", "none", dir).CombinedOutput(); err != nil {
		t.Logf("no small pool: %v: %s", err, out)
		return
	}
	t.Cleanup(func() {
		attempt("pool-destroy", name)
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount %q: %v: %s", dir, err, out)
		}
	})
	manage(t, "pool-start", name)
	h.small = name
}

func (h *errorHost) removeDomains(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(manage(t, "list", "--all", "--name")) {
		if name := strings.TrimSpace(line); strings.HasPrefix(name, errorPrefix+"-") {
			attempt("destroy", name)
			manage(t, "undefine", name, "--nvram")
		}
	}
	logs, err := filepath.Glob("/var/log/libvirt/qemu/" + errorPrefix + "-*.log")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range logs {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// file writes a file for virsh to read.
func (*errorHost) file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// manage uses libvirt's own client, so that kvm2 does not prepare its own tests.
func manage(t *testing.T, args ...string) string {
	t.Helper()
	out, err := testhost.Virsh(args...)
	if err != nil {
		t.Error(err)
	}
	return out
}

// attempt does what may fail: there may be nothing to undo.
func attempt(args ...string) {
	_, _ = testhost.Virsh(args...)
}

// mishap is the host during one provocation, on a connection of its own.
type mishap struct {
	*errorHost
	t    *testing.T
	ctx  context.Context
	conn Conn
	uuid UUID
	name string // of a domain
}

func (h *errorHost) during(t *testing.T) *mishap {
	t.Helper()
	conn, err := h.dial.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.removeDomains(t)
		if err := conn.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return &mishap{errorHost: h, t: t, ctx: t.Context(), conn: conn, uuid: MachineUUID(errorPrefix, t.Name()), name: errorPrefix + "-vm"}
}

// must ends a provocation whose preparation failed.
func (m *mishap) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("preparing: %v", err)
	}
}

// draft is a domain that can be made; each provocation spoils one thing.
type draft struct {
	kind, name, machine, arch, os, attributes, features string
	memory                                              string
	uuid                                                UUID
	devices                                             string
}

func (m *mishap) xml(edits ...func(*draft)) string {
	d := draft{
		kind: "qemu", name: m.name, uuid: m.uuid, machine: "q35", arch: "x86_64", memory: "32 MiB",
		features: "<features><acpi/></features>",
	}
	for _, edit := range edits {
		edit(&d)
	}
	size, unit, _ := strings.Cut(d.memory, " ")
	uuid := ""
	if !d.uuid.IsZero() {
		uuid = "<uuid>" + d.uuid.String() + "</uuid>"
	}
	return fmt.Sprintf(`<domain type='%s'><name>%s</name>%s<memory unit='%s'>%s</memory><os%s><type arch='%s' machine='%s'>hvm</type>%s</os>%s
<devices><controller type='usb' model='none'/><memballoon model='none'/>%s</devices></domain>`,
		d.kind, d.name, uuid, unit, size, d.attributes, d.arch, d.machine, d.os, d.features, d.devices)
}

func (m *mishap) define(edits ...func(*draft)) error {
	return m.conn.DefineDomain(m.ctx, m.xml(edits...))
}

// start defines a domain and starts it.
func (m *mishap) start(edits ...func(*draft)) error {
	m.t.Helper()
	m.must(m.define(edits...))
	return m.conn.StartDomain(m.ctx, m.uuid)
}

func withDevices(xml string) func(*draft) { return func(d *draft) { d.devices = xml } }

func withDiskFile(path, format string) func(*draft) {
	return withDevices(fmt.Sprintf(`<disk type='file' device='disk'><driver name='qemu' type='%s'/><source file='%s'/><target dev='vda' bus='virtio'/></disk>`, format, path))
}

func withDiskVolume(pool, volume string) func(*draft) {
	return withDevices(fmt.Sprintf(`<disk type='volume' device='disk'><driver name='qemu' type='raw'/><source pool='%s' volume='%s'/><target dev='vda' bus='virtio'/></disk>`, pool, volume))
}

func withNIC(name string) func(*draft) {
	return withDevices(fmt.Sprintf(`<interface type='network'><source network='%s'/><model type='virtio'/></interface>`, name))
}

func (m *mishap) create(pool, xml string) error { return m.conn.CreateVolume(m.ctx, pool, xml) }

func volumeXML(name, format string, capacity, allocation int64, extra string) string {
	return fmt.Sprintf(`<volume><name>%s</name><capacity>%d</capacity><allocation>%d</allocation><target><format type='%s'/></target>%s</volume>`,
		name, capacity, allocation, format, extra)
}

func backing(path, format string) string {
	return fmt.Sprintf(`<backingStore><path>%s</path><format type='%s'/></backingStore>`, path, format)
}

// path is where a volume of the active pool is.
func (m *mishap) path(volume string) string { return filepath.Join(m.dir, volume) }

func (m *mishap) inSmallPool(do func() error) error {
	if m.small == "" {
		return fmt.Errorf("%w: no file system could be mounted", errNotOnThisHost)
	}
	return do()
}

// unless turns success into an excuse: some hosts can do what others cannot.
func unless(able string, err error) error {
	if err == nil {
		return fmt.Errorf("%w: %s", errNotOnThisHost, able)
	}
	return err
}

// provocations do again what led to the errors, by code and name in the tables.
func provocations() map[string]func(*mishap) error {
	all := domainProvocations()
	maps.Copy(all, startProvocations())
	maps.Copy(all, volumeProvocations())
	maps.Copy(all, prerequisiteProvocations())
	return all
}

// domainProvocations go wrong before a domain runs, or after.
func domainProvocations() map[string]func(*mishap) error {
	other := MachineUUID(errorPrefix, "other")
	return map[string]func(*mishap) error{
		"9 Define other name same uuid": func(m *mishap) error {
			m.must(m.define())
			return m.define(func(d *draft) { d.name += "-2" })
		},
		"9 Define same name no uuid": func(m *mishap) error {
			m.must(m.define())
			return m.define(func(d *draft) { d.uuid = UUID{} })
		},
		"9 Define same name other uuid": func(m *mishap) error {
			m.must(m.define())
			return m.define(func(d *draft) { d.uuid = other })
		},
		"27 Define bad machine": func(m *mishap) error {
			return m.define(func(d *draft) { d.machine, d.features = "isapc", "" }, withNIC(m.Network))
		},
		"27 Define dup target": func(m *mishap) error {
			disk := `<disk type='file' device='disk'><source file='%s'/><target dev='vda' bus='virtio'/></disk>`
			return m.define(withDevices(fmt.Sprintf(disk+disk, "/x", "/y")))
		},
		"27 Define name slash": func(m *mishap) error { return m.define(func(d *draft) { d.name += "/b" }) },
		"35 Define bad xml":    func(m *mishap) error { return m.conn.DefineDomain(m.ctx, "<domain type='qemu'><name>x") },
		"35 SetMetadata bad xml": func(m *mishap) error {
			m.must(m.define())
			return m.conn.SetDomainMetadata(m.ctx, m.uuid, "<a")
		},
		"42 Destroy web1 again":         func(m *mishap) error { return m.conn.DestroyDomain(m.ctx, other, DestroyForced) },
		"42 DomainLookupByName missing": func(m *mishap) error { return second(m.conn.DomainByName(m.ctx, errorPrefix+"-nobody")) },
		"42 DomainLookupByUUID missing": func(m *mishap) error { return second(m.conn.DomainByUUID(m.ctx, other)) },
		"42 Undefine gone":              func(m *mishap) error { return m.conn.UndefineDomain(m.ctx, other) },
		"55 Destroy not running": func(m *mishap) error {
			m.must(m.define())
			return m.conn.DestroyDomain(m.ctx, m.uuid, DestroyForced)
		},
		"67 Define arch w/o emulator": func(m *mishap) error {
			return unless("it emulates aarch64", m.define(func(d *draft) { d.arch, d.machine, d.features = "aarch64", "virt", "" }))
		},
		"67 Start firmware missing (define)": func(m *mishap) error {
			return m.define(func(d *draft) { d.attributes, d.features = " firmware='efi'", "" })
		},
		"67 Start loader missing (define)": func(m *mishap) error {
			return m.define(func(d *draft) {
				d.os, d.features = "<loader readonly='yes' type='pflash'>/srv/none.fd</loader>", ""
			})
		},
		"92 Define unknown element VALIDATE": func(m *mishap) error { return m.define(withDevices("<bogus/>")) },
	}
}

// startProvocations go wrong when a domain starts.
func startProvocations() map[string]func(*mishap) error {
	return map[string]func(*mishap) error{
		"1 Start huge memory": func(m *mishap) error {
			return unless("it promises any memory", m.start(func(d *draft) { d.machine, d.memory = "pc", "60 TiB" }))
		},
		"1 Start not-a-qcow2": func(m *mishap) error {
			m.must(m.create(m.pool, volumeXML("zeros", "raw", mib, mib, "")))
			return m.start(withDiskFile(m.path("zeros"), "qcow2"))
		},
		"9 Start firmware missing": func(m *mishap) error {
			return unless("it has EFI firmware", m.start(func(d *draft) { d.attributes = " firmware='efi'" }))
		},
		"38 Start missing disk": func(m *mishap) error { return m.start(withDiskFile(m.path("none.img"), "raw")) },
		"38 Start overlay whose base was deleted": func(m *mishap) error {
			m.must(m.create(m.pool, volumeXML("base", "qcow2", mib, 0, "")))
			m.must(m.create(m.pool, volumeXML("overlay", "qcow2", mib, 0, backing(m.path("base"), "qcow2"))))
			m.must(m.conn.DeleteVolume(m.ctx, m.pool, "base"))
			return m.start(withDiskFile(m.path("overlay"), "qcow2"))
		},
		"43 Start missing network":          func(m *mishap) error { return m.start(withNIC(errorPrefix + "-nonet")) },
		"49 Start volume-disk missing pool": func(m *mishap) error { return m.start(withDiskVolume(errorPrefix+"-nopool", "none")) },
		"50 Start volume-disk missing vol":  func(m *mishap) error { return m.start(withDiskVolume(m.pool, "none")) },
		"67 Start volume-disk missing vol":  func(m *mishap) error { return m.start(withDiskVolume(m.inactive, "none")) },
		"55 start with inactive network":    func(m *mishap) error { return m.start(withNIC(m.network)) },
		"55 Create web1 again": func(m *mishap) error {
			m.must(m.start())
			return m.conn.StartDomain(m.ctx, m.uuid)
		},
	}
}

// volumeProvocations go wrong with volumes of a pool that can be used.
func volumeProvocations() map[string]func(*mishap) error {
	return map[string]func(*mishap) error{
		"3 VolCreate raw with backing": func(m *mishap) error {
			m.must(m.create(m.pool, volumeXML("below", "raw", mib, 0, "")))
			return m.create(m.pool, volumeXML("above", "raw", mib, 0, backing(m.path("below"), "raw")))
		},
		"35 VolCreate bad xml": func(m *mishap) error { return m.create(m.pool, "<volume><name>q") },
		"38 VolCreate huge raw (sparse default alloc?)": func(m *mishap) error {
			return m.create(m.pool, volumeXML("huge", "raw", 1<<62, 0, ""))
		},
		"38 VolCreate overlay missing base": func(m *mishap) error {
			return m.create(m.pool, volumeXML("orphan", "qcow2", mib, 0, backing(m.path("none.qcow2"), "qcow2")))
		},
		"38 full-alloc raw 100M on 2M pool": func(m *mishap) error {
			return m.inSmallPool(func() error { return m.create(m.small, volumeXML("full", "raw", 100*mib, 100*mib, "")) })
		},
		"38 upload 16M data to 2M pool": func(m *mishap) error {
			return m.inSmallPool(func() error {
				m.must(m.create(m.small, volumeXML("sparse", "raw", 16*mib, 0, "")))
				return m.conn.UploadVolume(m.ctx, m.small, "sparse", 0, bytes.NewReader(bytes.Repeat([]byte{1}, int(16*mib))))
			})
		},
		"50 VolGetInfo deleted": func(m *mishap) error {
			m.must(m.create(m.pool, volumeXML("brief", "raw", mib, 0, "")))
			m.must(m.conn.DeleteVolume(m.ctx, m.pool, "brief"))
			return second(m.conn.Volume(m.ctx, m.pool, "brief"))
		},
		"50 VolLookup file not refreshed": func(m *mishap) error {
			m.must(os.WriteFile(m.path("unknown"), make([]byte, mib), 0o600))
			return second(m.conn.Volume(m.ctx, m.pool, "unknown"))
		},
		"50 VolLookupByName missing": func(m *mishap) error { return second(m.conn.Volume(m.ctx, m.pool, "none")) },
		"55 VolCreate file exists but unknown to pool": func(m *mishap) error {
			m.must(os.WriteFile(m.path("taken"), make([]byte, mib), 0o600))
			return m.create(m.pool, volumeXML("taken", "qcow2", mib, 0, ""))
		},
		"55 VolCreate name with slash": func(m *mishap) error { return m.create(m.pool, volumeXML("a/b", "raw", mib, 0, "")) },
		"67 VolCreate unknown format":  func(m *mishap) error { return m.create(m.pool, volumeXML("odd", "bogusfmt", mib, 0, "")) },
		"90 VolCreate duplicate": func(m *mishap) error {
			m.must(m.create(m.pool, volumeXML("twice", "raw", mib, 0, "")))
			return m.create(m.pool, volumeXML("twice", "raw", mib, 0, ""))
		},
	}
}

// prerequisiteProvocations miss what everything else needs.
func prerequisiteProvocations() map[string]func(*mishap) error {
	return map[string]func(*mishap) error{
		"5 connect bad uri": func(m *mishap) error {
			uri, err := parseURI(m.UnixURI)
			m.must(err)
			uri.driver = "bogus:///system"
			_, err = m.dialer(uri).open(m.ctx)
			return err
		},
		"43 NetworkLookupByName missing":       func(m *mishap) error { return second(m.conn.Network(m.ctx, errorPrefix+"-nonet")) },
		"49 StoragePoolLookupByName missing":   func(m *mishap) error { return second(m.conn.Pool(m.ctx, errorPrefix+"-nopool")) },
		"49 VolDelete file removed under pool": func(m *mishap) error { return m.conn.DeleteVolume(m.ctx, "", "none") },
		"55 PoolRefresh inactive":              func(m *mishap) error { return m.conn.RefreshPool(m.ctx, m.inactive) },
		"55 VolCreateXML on inactive pool":     func(m *mishap) error { return m.create(m.inactive, volumeXML("v", "raw", mib, 0, "")) },
		"55 VolLookupByName on inactive pool":  func(m *mishap) error { return second(m.conn.Volume(m.ctx, m.inactive, "v")) },
	}
}

// second is the error of a call that returns a value as well.
func second[T any](_ T, err error) error { return err }
