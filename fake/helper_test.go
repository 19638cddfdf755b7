package fake_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// harness is a host with one session.
type harness struct {
	*testing.T
	host *fake.Host
	conn kvm2.Conn
}

func newHarness(t *testing.T, opts ...fake.Option) *harness {
	t.Helper()
	h := &harness{T: t, host: fake.NewHost(opts...)}
	t.Cleanup(func() { _ = h.host.Close() })
	h.conn = h.dial()
	return h
}

func (h *harness) dial() kvm2.Conn {
	h.Helper()
	conn, err := h.host.Dial(context.Background())
	h.must(err)
	return conn
}

func (h *harness) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatalf("unexpected error: %v", err)
	}
}

// wantAnswer checks libvirt's code, and that the message contains the text.
func (h *harness) wantAnswer(err error, code int, text string) {
	h.Helper()
	e, ok := errors.AsType[*kvm2.LibvirtError](err)
	if !ok || e.Code != code || !strings.Contains(e.Message, text) {
		h.Fatalf("got error %v, want code %d with %q", err, code, text)
	}
}

// wantLost checks for an error that is not libvirt's, and that the session is of no use any more.
func (h *harness) wantLost(conn kvm2.Conn, err error) {
	h.Helper()
	if _, answered := errors.AsType[*kvm2.LibvirtError](err); err == nil || answered {
		h.Fatalf("got %v, want an error that is not libvirt's", err)
	}
	if _, err := conn.HostInfo(context.Background()); err == nil {
		h.Fatal("the session still answers")
	}
}

func uuidOf(name string) kvm2.UUID { return kvm2.MachineUUID("fake", name) }

// domainXML is a domain with a q35 machine and the devices given.
func domainXML(name, devices string) string {
	return fmt.Sprintf("<domain type='qemu'><name>%s</name><uuid>%s</uuid><memory unit='MiB'>64</memory><os><type>hvm</type></os>"+
		"<features><acpi/></features><devices>%s</devices></domain>", name, uuidOf(name), devices)
}

func diskXML(path, format string) string {
	return fmt.Sprintf("<disk type='file'><driver name='qemu' type='%s'/><source file='%s'/><target dev='vda' bus='virtio'/></disk>", format, path)
}

const defaultNIC = "<interface type='network'><mac address='52:54:00:00:00:01'/><source network='default'/></interface>"

func (h *harness) define(name, devices string) {
	h.Helper()
	h.must(h.conn.DefineDomain(h.Context(), domainXML(name, devices)))
}

func (h *harness) start(name string) {
	h.Helper()
	h.must(h.conn.StartDomain(h.Context(), uuidOf(name)))
}

func (h *harness) started(name, devices string) {
	h.Helper()
	h.define(name, devices)
	h.start(name)
}

func (h *harness) wantState(name string, state, reason int) {
	h.Helper()
	d, err := h.conn.DomainByName(h.Context(), name)
	h.must(err)
	if want := (kvm2.LibvirtState{State: state, Reason: reason}); d.State != want {
		h.Errorf("got state %+v of %q, want %+v", d.State, name, want)
	}
}

func rawXML(name string, capacity, allocation int64) string {
	return fmt.Sprintf("<volume><name>%s</name><capacity>%d</capacity><allocation>%d</allocation></volume>", name, capacity, allocation)
}

func (h *harness) rawVolume(name string, capacity int64) {
	h.Helper()
	h.must(h.conn.CreateVolume(h.Context(), "default", rawXML(name, capacity, 0)))
}

func (h *harness) qcow2Volume(name string, capacity int64, backing string) {
	h.Helper()
	store := ""
	if backing != "" {
		store = "<backingStore><path>" + backing + "</path><format type='qcow2'/></backingStore>"
	}
	h.must(h.conn.CreateVolume(h.Context(), "default", fmt.Sprintf("<volume><name>%s</name><capacity>%d</capacity>"+
		"<target><format type='qcow2'/><compat>1.1</compat></target>%s</volume>", name, capacity, store)))
}

func (h *harness) upload(name string, content []byte) error {
	return h.conn.UploadVolume(context.Background(), "default", name, 0, bytes.NewReader(content))
}

func (h *harness) volume(name string) kvm2.Volume {
	h.Helper()
	v, err := h.conn.Volume(h.Context(), "default", name)
	h.must(err)
	return v
}

func (h *harness) pool() kvm2.Pool {
	h.Helper()
	p, err := h.conn.Pool(h.Context(), "default")
	h.must(err)
	return p
}

func (h *harness) addresses(query kvm2.AddressQuery) []kvm2.AddressRecord {
	h.Helper()
	r, err := h.conn.Addresses(h.Context(), query)
	h.must(err)
	return r
}

func (h *harness) leases() []kvm2.AddressRecord {
	h.Helper()
	return h.addresses(kvm2.AddressQuery{Networks: []string{"default"}})
}

// wantPanic checks that fn panics with a text.
func wantPanic(t *testing.T, text string, fn func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), text) {
			t.Errorf("got panic %v, want one with %q", p, text)
		}
	}()
	fn()
}
