package fake_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

func TestFault_BeforeLeavesNoTrace(t *testing.T) {
	h := newHarness(t)
	f := h.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, Effect: fake.Fail(38, "out of order")})
	h.wantAnswer(h.conn.DefineDomain(t.Context(), domainXML("d", "")), 38, "out of order")
	if len(h.host.Domains()) != 0 || !f.Reached() {
		t.Errorf("got domains %+v, reached %v", h.host.Domains(), f.Reached())
	}
	h.define("d", "") // the session is good, and the fault has struck its one time
}

func TestFault_AfterLosesOnlyTheReply(t *testing.T) {
	h := newHarness(t)
	h.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, When: fake.After, Effect: fake.Drop()})
	h.wantLost(h.conn, h.conn.DefineDomain(t.Context(), domainXML("d", "")))
	if got := h.host.Domains(); len(got) != 1 {
		t.Errorf("got %+v, want the domain defined all the same", got)
	}
}

func TestFault_Matching(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault fake.Fault
		want  string // of six calls: looking up a and b in turn, which fail
	}{
		{"every field empty strikes the next call", fake.Fault{}, "x....."},
		{"always", fake.Fault{Times: fake.Always}, "xxxxxx"},
		{"object", fake.Fault{Object: "b", Times: fake.Always}, ".x.x.x"},
		{"object by UUID", fake.Fault{Object: uuidOf("b").String(), Times: fake.Always}, ".x.x.x"},
		{"skip and times", fake.Fault{Skip: 2, Times: 2}, "..xx.."},
		{"skip counts matches", fake.Fault{Object: "b", Skip: 1}, "...x.."},
		{"nth counts all calls", fake.Fault{Nth: 4 + 3}, "...x.."}, // a dial and two definitions came first
		{"nth of another operation", fake.Fault{Nth: 7, Op: kvm2.OpPoolLookup}, "......"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t)
			h.define("a", "")
			h.define("b", "")
			c.fault.Effect = fake.Fail(38, "out of order")
			f := h.host.AddFault(c.fault)
			got := ""
			for i := range 6 {
				_, err := h.conn.DomainByUUID(t.Context(), uuidOf([]string{"a", "b"}[i%2]))
				got += map[bool]string{true: ".", false: "x"}[err == nil]
			}
			if got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if want := bytes.Count([]byte(c.want), []byte("x")); f.Struck() != want {
				t.Errorf("struck %d times, want %d", f.Struck(), want)
			}
		})
	}
}

func TestFault_RemovedStrikesNoMore(t *testing.T) {
	h := newHarness(t)
	f := h.host.AddFault(fake.Fault{Times: fake.Always, Effect: fake.Fail(38, "out of order")})
	f.Remove()
	_, err := h.conn.HostInfo(t.Context())
	h.must(err)
	if f.Reached() {
		t.Error("it says that it was reached")
	}
}

func TestFault_WithoutEffectPanics(t *testing.T) {
	h := newHarness(t)
	wantPanic(t, "needs an Effect", func() { h.host.AddFault(fake.Fault{}) })
	wantPanic(t, "unsupported", func() { h.host.AddFault(fake.Fault{Op: kvm2.OpPoolLookup, Effect: fake.CutUpload(1)}) })
	wantPanic(t, "unsupported", func() {
		h.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, When: fake.After, Effect: fake.TruncateUpload(1)})
	})
}

func TestFault_OnDialOpensNoSession(t *testing.T) {
	refused := errors.New("connection refused")
	for _, effect := range []fake.Effect{fake.FailWith(refused), fake.Fail(45, "authentication failed")} {
		h := newHarness(t)
		h.host.AddFault(fake.Fault{Op: kvm2.OpDial, When: fake.After, Effect: effect})
		if _, err := h.host.Dial(t.Context()); err == nil {
			t.Fatal("it dialed")
		}
		if got := h.host.Stats().OpenSessions; got != 1 {
			t.Errorf("%d sessions are open, want the first one only", got)
		}
	}
}

func TestFault_HangEndsWithTheContext(t *testing.T) {
	for name, when := range map[string]fake.When{"before": fake.Before, "after": fake.After} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t)
				h.host.AddFault(fake.Fault{Op: kvm2.OpDomainDefine, When: when, Effect: fake.Hang()})
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err := h.conn.DefineDomain(ctx, domainXML("d", ""))
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v", err)
				}
				h.wantLost(h.conn, err)
				if got, want := len(h.host.Domains()) == 1, when == fake.After; got != want {
					t.Errorf("defined: %v, want %v", got, want)
				}
			})
		})
	}
}

func TestFault_DelayTakesTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.host.AddFault(fake.Fault{Effect: fake.Delay(time.Minute)})
		start := time.Now()
		_, err := h.conn.HostInfo(t.Context())
		h.must(err)
		if got := time.Since(start); got != time.Minute {
			t.Errorf("it took %v", got)
		}
	})
}

func TestCutUpload_DropsTheConnectionHalfway(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	h.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.CutUpload(300_000)})
	content := bytes.Repeat([]byte("0123456789"), 100_000)
	h.wantLost(h.conn, h.upload("v", content))
	if got := h.host.VolumeBytes("default", "v"); !bytes.Equal(got, content[:300_000]) {
		t.Errorf("%d bytes arrived, want the first 300000", len(got))
	}
}

func TestTruncateUpload_ReportsSuccess(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	h.host.AddFault(fake.Fault{Op: kvm2.OpVolumeUpload, Effect: fake.TruncateUpload(300_000)})
	h.must(h.upload("v", bytes.Repeat([]byte("0123456789"), 100_000)))
	if got := h.volume("v").PhysicalBytes; got != 300_000 {
		t.Errorf("%d bytes arrived, want 300000", got)
	}
}

func TestIntercept_DecidesAboutEachCall(t *testing.T) {
	h := newHarness(t)
	h.host.Intercept(func(c fake.Call) error {
		if c.Op == kvm2.OpDomainDefine {
			h.host.AddForeignDomain("raced") // the host may be changed under the call
		}
		if c.Object == "denied" {
			return &kvm2.LibvirtError{Code: 88, Message: "access denied"}
		}
		return nil
	})
	h.wantAnswer(h.conn.DefineDomain(t.Context(), domainXML("raced", "")), 9, "already exists with uuid")
	_, err := h.conn.DomainByName(t.Context(), "denied")
	h.wantAnswer(err, 88, "access denied")
	h.host.Intercept(nil)
	_, err = h.conn.DomainByName(t.Context(), "denied")
	h.wantAnswer(err, 42, "no domain")
}

func TestFault_SweepEndsWhereTheCallsEnd(t *testing.T) {
	for k := 1; ; k++ {
		host := fake.NewHost()
		f := host.AddFault(fake.Fault{Nth: k, Effect: fake.Drop()})
		err := threeCalls(t.Context(), host)
		if !f.Reached() {
			if k != 4 || err != nil {
				t.Errorf("the sweep ended at call %d with %v, want 4 and no error", k, err)
			}
			return
		}
		if err == nil {
			t.Errorf("call %d was to fail", k)
		}
	}
}

func threeCalls(ctx context.Context, host *fake.Host) error {
	conn, err := host.Dial(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.HostInfo(ctx); err != nil {
		return fmt.Errorf("host: %w", err)
	}
	return conn.RefreshPool(ctx, "default")
}
