package kvm2test_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/kvm2test"
)

// Parts of this stand in docs/testing-with-the-fake.md, word for word. It uses nothing that a module of
// another author could not use.

// metrics counts calls by the class of their error.
type metrics struct {
	mu    sync.Mutex
	calls map[string]int
}

func (m *metrics) count(call string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[call+" "+kvm2.ClassOf(err).String()]++
}

// measured is a wrapper that a controller may put around its provider.
type measured struct {
	kvm2test.Provider // the four methods: Get and List stay as they are
	metrics           *metrics
}

func (m measured) Create(ctx context.Context, spec kvm2.Spec) (kvm2.Machine, error) {
	machine, err := m.Provider.Create(ctx, spec)
	m.metrics.count("Create", err)
	return machine, err
}

func (m measured) Delete(ctx context.Context, id string) error {
	err := m.Provider.Delete(ctx, id)
	m.metrics.count("Delete", err)
	return err
}

func TestMeasured_KeepsTheContract(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(func() { _ = host.Close() })
	metrics := &metrics{calls: map[string]int{}}

	kvm2test.TestProvider(t, kvm2test.Factory{
		Scope: "conformance",
		New: func(t *testing.T, scope string) kvm2test.Provider {
			t.Helper()
			return measured{Provider: connect(t, host, scope), metrics: metrics}
		},
		Spec:         machineOf,
		PollInterval: 5 * time.Millisecond, // half a second on a real host
	})

	if metrics.calls["Create None"] == 0 || metrics.calls["Create Permanent"] == 0 || metrics.calls["Delete None"] == 0 {
		t.Errorf("got %v, want calls of all kinds", metrics.calls)
	}
	if open := host.Stats().OpenSessions; open != 0 {
		t.Errorf("%d sessions are left open", open)
	}
}

// connect returns a provider that is closed at the end of the test.
func connect(t *testing.T, host *fake.Host, scope string) *kvm2.Provider {
	t.Helper()
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: scope},
		kvm2.WithDialer(host), kvm2.WithHTTPClient(&http.Client{Transport: imageServer(emptyDisk())}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// machineOf is a small machine of an owner.
func machineOf(name, ownerUID string) kvm2.Spec {
	return kvm2.Spec{
		Name: name, OwnerUID: ownerUID, CPUs: 1, MemoryBytes: 64 << 20, RootDiskBytes: 2 << 20,
		Image: kvm2.Image{
			URL:      "http://images.example/disk.raw",
			Checksum: fmt.Sprintf("sha256:%x", sha256.Sum256(emptyDisk())),
		},
	}
}

func emptyDisk() []byte {
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa
	return disk
}

type imageServer []byte

func (s imageServer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	http.ServeContent(w, r, "disk.raw", time.Time{}, bytes.NewReader(s))
	return w.Result(), nil
}

// gauge is a dialer around another one: it knows how many sessions are open.
type gauge struct {
	kvm2.Dialer
	open atomic.Int64
}

func (g *gauge) Dial(ctx context.Context) (kvm2.Conn, error) {
	conn, err := g.Dialer.Dial(ctx)
	if err != nil {
		return nil, err // as it came: its text and type decide its class
	}
	g.open.Add(1)
	return &gaugedConn{Conn: conn, closed: sync.OnceFunc(func() { g.open.Add(-1) })}, nil
}

type gaugedConn struct {
	kvm2.Conn
	closed func()
}

func (c *gaugedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// Alive is an optional method of a Conn, which embedding hides.
func (c *gaugedConn) Alive() bool {
	conn, ok := c.Conn.(interface{ Alive() bool })
	return !ok || conn.Alive()
}

func TestGauge_KeepsThePromisesOfTheSeam(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(func() { _ = host.Close() })
	dialer := &gauge{Dialer: host}
	t.Cleanup(func() {
		if open := dialer.open.Load(); open != 0 {
			t.Errorf("the gauge shows %d open sessions at the end", open)
		}
	})

	kvm2test.TestSeam(t, dialer, kvm2test.Caps{
		Prefix: "conformance", Pool: "default", Network: "default",
		Fake: true, // behind the gauge is the fake
	})
}

func TestGauge_TellsThatASessionHasEnded(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(func() { _ = host.Close() })
	conn, err := (&gauge{Dialer: host}).Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	session, ok := conn.(interface{ Alive() bool })
	if !ok || !session.Alive() {
		t.Error("a session that has just begun does not say that it is alive")
	}
	host.DropSessions()
	if ok && session.Alive() {
		t.Error("a session that was lost says that it is alive")
	}
}
