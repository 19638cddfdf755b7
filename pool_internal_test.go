package kvm2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// stubConn answers every call with err, and records what it was given.
type stubConn struct {
	err error

	dead     bool
	closed   atomic.Int32
	calls    []string
	deadline []bool
}

func (c *stubConn) Alive() bool { return !c.dead }

func (c *stubConn) Close() error {
	c.closed.Add(1)
	return errors.New("what Close says is nobody's business")
}

func (c *stubConn) note(ctx context.Context, call string) error {
	_, has := ctx.Deadline()
	c.calls, c.deadline = append(c.calls, call), append(c.deadline, has)
	return c.err
}

func (c *stubConn) HostInfo(ctx context.Context) (HostInfo, error) {
	return HostInfo{}, c.note(ctx, "HostInfo")
}

func (c *stubConn) Domains(ctx context.Context) ([]Domain, error) { return nil, c.note(ctx, "Domains") }

func (c *stubConn) DomainByName(ctx context.Context, name string) (Domain, error) {
	return Domain{}, c.note(ctx, "DomainByName "+name)
}

func (c *stubConn) DomainByUUID(ctx context.Context, uuid UUID) (Domain, error) {
	return Domain{}, c.note(ctx, "DomainByUUID "+uuid.String())
}

func (c *stubConn) DefineDomain(ctx context.Context, xml string) error {
	return c.note(ctx, "DefineDomain "+xml)
}

func (c *stubConn) StartDomain(ctx context.Context, uuid UUID) error {
	return c.note(ctx, "StartDomain "+uuid.String())
}

func (c *stubConn) SetDomainMetadata(ctx context.Context, uuid UUID, xml string) error {
	return c.note(ctx, "SetDomainMetadata "+uuid.String()+" "+xml)
}

func (c *stubConn) DestroyDomain(ctx context.Context, uuid UUID, mode DestroyMode) error {
	return c.note(ctx, map[DestroyMode]string{DestroyGraceful: "graceful ", DestroyForced: "forced "}[mode]+uuid.String())
}

func (c *stubConn) UndefineDomain(ctx context.Context, uuid UUID) error {
	return c.note(ctx, "UndefineDomain "+uuid.String())
}

func (c *stubConn) Addresses(ctx context.Context, query AddressQuery) ([]AddressRecord, error) {
	return nil, c.note(ctx, "Addresses "+strings.Join(slices.Concat(query.Networks, query.MACs), ","))
}

func (c *stubConn) Pool(ctx context.Context, name string) (Pool, error) {
	return Pool{}, c.note(ctx, "Pool "+name)
}

func (c *stubConn) RefreshPool(ctx context.Context, name string) error {
	return c.note(ctx, "RefreshPool "+name)
}

func (c *stubConn) Network(ctx context.Context, name string) (Network, error) {
	return Network{}, c.note(ctx, "Network "+name)
}

func (c *stubConn) Volumes(ctx context.Context, pool string) ([]Volume, error) {
	return nil, c.note(ctx, "Volumes "+pool)
}

func (c *stubConn) VolumeNames(ctx context.Context, pool string) ([]string, error) {
	return nil, c.note(ctx, "VolumeNames "+pool)
}

func (c *stubConn) Volume(ctx context.Context, pool, name string) (Volume, error) {
	return Volume{}, c.note(ctx, "Volume "+pool+" "+name)
}

func (c *stubConn) CreateVolume(ctx context.Context, pool, xml string) error {
	return c.note(ctx, "CreateVolume "+pool+" "+xml)
}

func (c *stubConn) DeleteVolume(ctx context.Context, pool, name string) error {
	return c.note(ctx, "DeleteVolume "+pool+" "+name)
}

func (c *stubConn) UploadVolume(ctx context.Context, pool, name string, _ int64, _ io.Reader) error {
	return c.note(ctx, "UploadVolume "+pool+" "+name)
}

func (c *stubConn) DownloadVolume(ctx context.Context, pool, name string, _ io.Writer) error {
	return c.note(ctx, "DownloadVolume "+pool+" "+name)
}

// stubDialer opens stubConns and keeps them.
type stubDialer struct {
	mu     sync.Mutex
	opened []*stubConn
	err    error
}

func (d *stubDialer) Dial(context.Context) (Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return nil, d.err
	}
	c := &stubConn{}
	d.opened = append(d.opened, c)
	return c, nil
}

func (d *stubDialer) decorator(log io.Writer) *decorator {
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return &decorator{next: d, host: "kvm-1", timeout: 30 * time.Second, log: logger}
}

func (d *stubDialer) pool(size int, idle time.Duration) *connPool {
	return newConnPool(d.decorator(io.Discard).open, size, idle)
}

// closed counts the connections that have been closed, each of them once.
func (d *stubDialer) closed(t testing.TB) int {
	t.Helper()
	n := 0
	for _, c := range d.opened {
		times := int(c.closed.Load())
		if times > 1 {
			t.Errorf("a connection was closed %d times", times)
		}
		n += times
	}
	return n
}

func TestPool_ReusesAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(4, time.Minute)
		defer p.close()
		for range 5 {
			if err := p.with(t.Context(), func(c Conn) error { return c.RefreshPool(t.Context(), "p") }); err != nil {
				t.Fatal(err)
			}
		}
		if len(d.opened) != 1 || d.closed(t) != 0 {
			t.Errorf("%d connections opened and %d closed, want one that is kept", len(d.opened), d.closed(t))
		}
	})
}

func TestPool_AnAnswerKeepsTheConnectionAndAnythingElseEndsIt(t *testing.T) {
	tests := []struct {
		name string
		err  error
		kept bool
	}{
		{name: "libvirt's answer", err: &LibvirtError{Code: 42, Message: "x"}, kept: true},
		{name: "EOF", err: io.EOF},
		{name: "cancelled", err: context.Canceled},
		{name: "deadline", err: context.DeadlineExceeded},
		{name: "an error of a reader", err: errors.New("x")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &stubDialer{}
				p := d.pool(4, time.Minute)
				defer p.close()
				err := p.with(t.Context(), func(c Conn) error {
					d.opened[0].err = tt.err
					return c.UploadVolume(t.Context(), "p", "v", 0, nil)
				})
				if !errors.Is(err, tt.err) {
					t.Errorf("with = %v, want %v", err, tt.err)
				}
				if kept := d.closed(t) == 0; kept != tt.kept {
					t.Errorf("connection kept: %t, want %t", kept, tt.kept)
				}
			})
		})
	}
}

func TestPool_AnErrorOfTheCallerKeepsTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(4, time.Minute)
		defer p.close()
		if err := p.with(t.Context(), func(Conn) error { return io.EOF }); !errors.Is(err, io.EOF) {
			t.Errorf("with = %v", err)
		}
		if d.closed(t) != 0 {
			t.Error("the connection was closed, although nothing happened to it")
		}
	})
}

func TestPool_ConnectionThatEndedWhileIdleIsNotReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(4, time.Minute)
		defer p.close()
		nothing := func(Conn) error { return nil }
		if err := p.with(t.Context(), nothing); err != nil {
			t.Fatal(err)
		}
		d.opened[0].dead = true
		if err := p.with(t.Context(), nothing); err != nil {
			t.Fatal(err)
		}
		if len(d.opened) != 2 || d.opened[0].closed.Load() != 1 || d.opened[1].closed.Load() != 0 {
			t.Errorf("opened %d, closed %d: want a second one, and the first closed", len(d.opened), d.closed(t))
		}
	})
}

func TestPool_LimitMakesCallersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(2, time.Minute)
		defer p.close()
		hold := make(chan struct{})
		inside, most := 0, 0
		for range 5 {
			go func() {
				err := p.with(t.Context(), func(Conn) error {
					inside++
					most = max(most, inside)
					<-hold
					inside--
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}()
			synctest.Wait()
		}
		if inside != 2 || len(d.opened) != 2 {
			t.Errorf("%d callers at work on %d connections, want 2", inside, len(d.opened))
		}
		for range 5 {
			hold <- struct{}{}
			synctest.Wait()
		}
		if most != 2 || len(d.opened) != 2 || d.closed(t) != 0 {
			t.Errorf("at most %d at once, %d opened, %d closed; want 2, 2 and 0", most, len(d.opened), d.closed(t))
		}
	})
}

func TestPool_WaitingEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(1, time.Minute)
		defer p.close()
		hold := make(chan struct{})
		go func() {
			_ = p.with(t.Context(), func(Conn) error {
				<-hold
				return nil
			})
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := p.with(ctx, func(Conn) error { return errors.New("called without a connection") })
		if !errors.Is(err, context.DeadlineExceeded) || ClassOf(err) != ClassTransient {
			t.Errorf("with = %v, want a Transient deadline", err)
		}
		close(hold)
		synctest.Wait()
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Errorf("the one who gave up kept the place: %v", err)
		}
	})
}

func TestPool_EndedContextOpensNothing(t *testing.T) {
	d := &stubDialer{}
	p := d.pool(1, time.Minute)
	defer p.close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		err := p.with(ctx, func(Conn) error { return nil })
		if !errors.Is(err, context.Canceled) || ClassOf(err) != ClassTransient {
			t.Fatalf("with = %v, want a Transient context.Canceled", err)
		}
	}
	if len(d.opened) != 0 {
		t.Errorf("%d connections were opened for nobody", len(d.opened))
	}
}

func TestPool_FailedDialGivesThePlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{err: io.EOF}
		p := d.pool(1, time.Minute)
		defer p.close()
		for range 3 {
			err := p.with(t.Context(), func(Conn) error { return nil })
			e, ok := errors.AsType[*Error](err)
			if !ok || e.Op != OpDial || e.Host != "kvm-1" || e.Class != ClassTransient {
				t.Errorf("with = %v, want a Transient error of dialling kvm-1", err)
			}
		}
		d.err = nil
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Errorf("with after the host came back = %v", err)
		}
	})
}

func TestPool_PanicGivesThePlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(1, time.Minute)
		defer p.close()
		func() {
			defer func() { _ = recover() }()
			_ = p.with(t.Context(), func(Conn) error { panic("a mutator of the caller") })
		}()
		if err := p.with(t.Context(), func(Conn) error { return nil }); err != nil {
			t.Errorf("with after a panic = %v", err)
		}
	})
}

// useTogether takes n connections at once and gives them back.
func useTogether(t *testing.T, p *connPool, n int) {
	t.Helper()
	hold := make(chan struct{})
	for range n {
		go func() {
			_ = p.with(t.Context(), func(Conn) error {
				<-hold
				return nil
			})
		}()
	}
	synctest.Wait()
	close(hold)
	synctest.Wait()
}

func TestPool_IdleConnectionsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(4, time.Minute)
		defer p.close()
		useTogether(t, p, 3)

		time.Sleep(30 * time.Second)
		useTogether(t, p, 1)
		time.Sleep(29 * time.Second)
		synctest.Wait()
		if len(d.opened) != 3 || d.closed(t) != 0 {
			t.Fatalf("after 59s: %d opened, %d closed; want 3 and 0", len(d.opened), d.closed(t))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := d.closed(t); got != 2 {
			t.Fatalf("after 61s: %d closed, want the 2 that nobody used", got)
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if got := d.closed(t); got != 3 {
			t.Fatalf("after 91s: %d closed, want 3", got)
		}
		useTogether(t, p, 1)
		if len(d.opened) != 4 || d.closed(t) != 3 {
			t.Errorf("after all expired: %d opened, %d closed; want a new one", len(d.opened), d.closed(t))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := d.closed(t); got != 4 {
			t.Errorf("%d closed, want 4: the clock runs again for new ones", got)
		}
	})
}

func TestPool_CloseClosesTheFreeOnesAndLaterThoseInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stubDialer{}
		p := d.pool(2, time.Minute)
		useTogether(t, p, 2)
		hold := make(chan struct{})
		var waiting error
		go func() {
			_ = p.with(t.Context(), func(Conn) error {
				<-hold
				return nil
			})
		}()
		go func() {
			_ = p.with(t.Context(), func(Conn) error {
				<-hold
				return nil
			})
		}()
		synctest.Wait()
		go func() { waiting = p.with(t.Context(), func(Conn) error { return nil }) }()
		synctest.Wait()
		p.close()
		p.close() // again is harmless
		if got := d.closed(t); got != 0 {
			t.Errorf("%d connections in use were closed under their users", got)
		}
		close(hold)
		synctest.Wait()
		if got := d.closed(t); got != 2 {
			t.Errorf("%d closed when given back, want 2", got)
		}
		if !errors.Is(waiting, ErrClosed) {
			t.Errorf("the one who waited got %v, want ErrClosed", waiting)
		}
		err := p.with(t.Context(), func(Conn) error { return nil })
		if !errors.Is(err, ErrClosed) || ClassOf(err) != ClassPermanent {
			t.Errorf("with after close = %v, want a Permanent ErrClosed", err)
		}
		if len(d.opened) != 2 {
			t.Errorf("%d opened, want 2: none after close", len(d.opened))
		}
		time.Sleep(time.Hour)
		synctest.Wait()
	})
}

// sessionCalls are all calls of a session, by the operation that they report, with what the Conn under it must get.
func sessionCalls(s *session, u UUID) map[string]struct {
	op   Op
	call func(context.Context) error
} {
	type c = struct {
		op   Op
		call func(context.Context) error
	}
	id := u.String()
	return map[string]c{
		"HostInfo":                          {OpHostInfo, func(ctx context.Context) error { _, err := s.HostInfo(ctx); return err }},
		"Domains":                           {OpDomainList, func(ctx context.Context) error { _, err := s.Domains(ctx); return err }},
		"DomainByName d":                    {OpDomainLookup, func(ctx context.Context) error { _, err := s.DomainByName(ctx, "d"); return err }},
		"DomainByUUID " + id:                {OpDomainLookup, func(ctx context.Context) error { _, err := s.DomainByUUID(ctx, u); return err }},
		"DefineDomain <x/>":                 {OpDomainDefine, func(ctx context.Context) error { return s.DefineDomain(ctx, "<x/>") }},
		"StartDomain " + id:                 {OpDomainStart, func(ctx context.Context) error { return s.StartDomain(ctx, u) }},
		"SetDomainMetadata " + id + " <x/>": {OpDomainSetMetadata, func(ctx context.Context) error { return s.SetDomainMetadata(ctx, u, "<x/>") }},
		"graceful " + id:                    {OpDomainDestroy, func(ctx context.Context) error { return s.DestroyDomain(ctx, u, DestroyGraceful) }},
		"forced " + id:                      {OpDomainDestroy, func(ctx context.Context) error { return s.DestroyDomain(ctx, u, DestroyForced) }},
		"UndefineDomain " + id:              {OpDomainUndefine, func(ctx context.Context) error { return s.UndefineDomain(ctx, u) }},
		"Addresses a,b,m": {OpDomainAddresses, func(ctx context.Context) error {
			_, err := s.Addresses(ctx, AddressQuery{Networks: []string{"a", "b"}, MACs: []string{"m"}})
			return err
		}},
		"Pool p":              {OpPoolLookup, func(ctx context.Context) error { _, err := s.Pool(ctx, "p"); return err }},
		"RefreshPool p":       {OpPoolRefresh, func(ctx context.Context) error { return s.RefreshPool(ctx, "p") }},
		"Network n":           {OpNetworkLookup, func(ctx context.Context) error { _, err := s.Network(ctx, "n"); return err }},
		"Volumes p":           {OpVolumeList, func(ctx context.Context) error { _, err := s.Volumes(ctx, "p"); return err }},
		"VolumeNames p":       {OpVolumeList, func(ctx context.Context) error { _, err := s.VolumeNames(ctx, "p"); return err }},
		"Volume p v":          {OpVolumeLookup, func(ctx context.Context) error { _, err := s.Volume(ctx, "p", "v"); return err }},
		"CreateVolume p <x/>": {OpVolumeCreate, func(ctx context.Context) error { return s.CreateVolume(ctx, "p", "<x/>") }},
		"DeleteVolume p v":    {OpVolumeDelete, func(ctx context.Context) error { return s.DeleteVolume(ctx, "p", "v") }},
		"UploadVolume p v":    {OpVolumeUpload, func(ctx context.Context) error { return s.UploadVolume(ctx, "p", "v", 0, nil) }},
		"DownloadVolume p v":  {OpVolumeDownload, func(ctx context.Context) error { return s.DownloadVolume(ctx, "p", "v", nil) }},
	}
}

func TestSession_EveryCallIsBoundedAndSaysWhatItDid(t *testing.T) {
	var log bytes.Buffer
	d := &stubDialer{}
	s, err := d.decorator(&log).open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn := d.opened[0]
	for given, c := range sessionCalls(s, keyA) {
		conn.calls, conn.deadline, conn.err, s.broken = nil, nil, nil, false
		if err := c.call(t.Context()); err != nil || s.broken {
			t.Errorf("%s: %v, broken: %t", given, err, s.broken)
		}
		if diff := cmp.Diff([]string{given}, conn.calls); diff != "" {
			t.Errorf("what the Conn was given differs (-want +got):\n%s", diff)
		}
		transfer := c.op == OpVolumeUpload || c.op == OpVolumeDownload
		if len(conn.deadline) == 1 && conn.deadline[0] == transfer {
			t.Errorf("%s: deadline set: %t, want one for everything but transfers", given, conn.deadline[0])
		}
		conn.err = &LibvirtError{Code: 1, Message: "x"}
		e, ok := errors.AsType[*Error](c.call(t.Context()))
		if !ok || e.Op != c.op || e.Host != "kvm-1" || e.Class != ClassTransient || s.broken {
			t.Errorf("%s: error %+v, broken: %t; want a Transient one of %s at kvm-1 that breaks nothing", given, e, s.broken, c.op)
		}
		conn.err = io.EOF
		if err := c.call(t.Context()); !errors.Is(err, io.EOF) || !s.broken {
			t.Errorf("%s: %v, broken: %t; want EOF to break the session", given, err, s.broken)
		}
		for _, want := range []string{"host=kvm-1", "op=" + string(c.op), "class=Transient"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("%s: the log does not say %q", given, want)
			}
		}
	}
	if strings.Contains(log.String(), "<x/>") {
		t.Errorf("a payload was logged:\n%s", log.String())
	}
}

func TestSession_CallsEndAtTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := (&stubDialer{}).decorator(io.Discard)
		start := time.Now()
		_, err := observe(t.Context(), d, OpPoolLookup, (&session{}).traffic, func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) || ClassOf(err) != ClassTransient || time.Since(start) != d.timeout {
			t.Errorf("the call ended after %v with %v, want a Transient deadline after %v", time.Since(start), err, d.timeout)
		}
	})
}
