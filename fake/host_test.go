package fake_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

func TestNewHost_OptionsShowInHostInfo(t *testing.T) {
	h := newHarness(t, fake.WithHostname("node7"), fake.WithArch("aarch64"), fake.WithVersions(8_000_000, 6_002_000),
		fake.WithCPUs(4), fake.WithMemory(8<<30), fake.WithDomainTypes("qemu", "kvm"))
	got, err := h.conn.HostInfo(t.Context())
	h.must(err)
	want := kvm2.HostInfo{
		Hostname: "node7", Arch: "aarch64", Libvirt: 8_000_000, Hypervisor: 6_002_000, CPUs: 4, MemoryBytes: 8 << 30,
		DomainTypes: []string{"kvm", "qemu"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("HostInfo (-want +got):\n%s", diff)
	}
}

func TestNewHost_SameSeedSameChoices(t *testing.T) {
	uuid := func(seed uint64) kvm2.UUID { return fake.NewHost(fake.WithSeed(seed)).AddForeignDomain("d") }
	if first, second := uuid(7), uuid(7); first != second {
		t.Error("one seed gave two UUIDs")
	}
	if uuid(7) == uuid(8) {
		t.Error("two seeds gave one UUID")
	}
}

func TestWithNetwork_UnsupportedSubnetPanics(t *testing.T) {
	wantPanic(t, "unsupported", func() { fake.WithNetwork("n", netip.MustParsePrefix("10.0.0.0/30")) })
	wantPanic(t, "unsupported", func() { fake.WithNetwork("n", netip.MustParsePrefix("fd00::/64")) })
}

func TestConn_UsedByTwoGoroutinesPanics(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- h.conn.UploadVolume(context.Background(), "default", "v", 0, r) }()
	_, err := w.Write([]byte("x"))
	h.must(err)
	wantPanic(t, "two goroutines", func() { _, _ = h.conn.HostInfo(t.Context()) })
	h.must(w.Close())
	h.must(<-done)
}

func TestConn_UnknownDestroyModeIsUnsupported(t *testing.T) {
	h := newHarness(t)
	err := h.conn.DestroyDomain(t.Context(), kvm2.UUID{}, kvm2.DestroyMode(7))
	if err == nil || err.Error() != "fake: unsupported: DestroyMode 7" {
		t.Fatalf("got %v", err)
	}
	h.wantLost(h.conn, err)
}

func TestConn_IsAliveUntilTheSessionEnds(t *testing.T) {
	h := newHarness(t)
	session := h.conn.(interface{ Alive() bool })
	if !session.Alive() {
		t.Fatal("ended already")
	}
	h.host.DropSessions()
	if session.Alive() {
		t.Error("still alive after all sessions were lost")
	}
	_, err := h.conn.HostInfo(t.Context())
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v, want an unexpected EOF", err)
	}
}

func TestHost_CloseEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost()
		host.AddFault(fake.Fault{Op: kvm2.OpDomainList, Effect: fake.Hang()})
		conn, err := host.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		go func() {
			_, err := conn.Domains(t.Context())
			result <- err
		}()
		synctest.Wait()
		_ = host.Close()
		if err := <-result; err == nil {
			t.Error("the call under way succeeded")
		}
		if _, err := host.Dial(t.Context()); err == nil {
			t.Error("a new session opened")
		}
		if got := host.Stats().OpenSessions; got != 0 {
			t.Errorf("%d sessions are open", got)
		}
	})
}

func TestWithLatency_EveryCallTakesSoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost(fake.WithLatency(time.Second))
		defer func() { _ = host.Close() }()
		start := time.Now()
		conn, err := host.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.HostInfo(t.Context())
		_ = conn.UndefineDomain(t.Context(), kvm2.UUID{})
		if got := time.Since(start); got != 3*time.Second {
			t.Errorf("three calls took %v", got)
		}
	})
}

func TestWithLatency_ContextEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost(fake.WithLatency(time.Minute))
		defer func() { _ = host.Close() }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := host.Dial(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if got := time.Since(start); got != time.Second {
			t.Errorf("it took %v", got)
		}
		if got := host.Stats(); got.Dials != 0 || got.OpenSessions != 0 || got.Sessions != 1 {
			t.Errorf("got %+v, want one session tried and none opened", got)
		}
	})
}

func TestHost_ManySessionsAtOnce(t *testing.T) {
	h := newHarness(t)
	const workers = 16
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers {
		conn := h.dial()
		wg.Go(func() { errs[i] = lifeOf(t.Context(), conn, fmt.Sprintf("d%02d", i)) })
	}
	for range workers {
		_, _, _ = h.host.Dump(), h.host.Calls(), h.host.Domains()
	}
	wg.Wait()
	h.must(errors.Join(errs...))
	domains, err := h.conn.Domains(t.Context())
	h.must(err)
	if len(domains) != workers || domains[0].Name != "d00" || domains[workers-1].Name != "d15" {
		t.Errorf("got %+v, want all of them in order", domains)
	}
}

// lifeOf makes a volume and a running domain.
func lifeOf(ctx context.Context, conn kvm2.Conn, name string) error {
	return errors.Join(
		conn.CreateVolume(ctx, "default", rawXML(name, 0, 0)),
		conn.UploadVolume(ctx, "default", name, 0, strings.NewReader(strings.Repeat(name, 1000))),
		conn.RefreshPool(ctx, "default"),
		conn.DefineDomain(ctx, domainXML(name, diskXML(images+name, "raw"))),
		conn.StartDomain(ctx, uuidOf(name)),
		conn.SetDomainMetadata(ctx, uuidOf(name), "<m/>"),
	)
}
