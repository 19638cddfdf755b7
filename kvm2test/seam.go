package kvm2test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
)

// Caps says where TestSeam may work, and what the target cannot do.
type Caps struct {
	// Prefix begins the name of every domain and volume that the suite makes. Everything whose name begins with it
	// and a dash is removed before and after the suite. It is required.
	Prefix string
	// Pool and Network name an active storage pool and an active network. They are required.
	Pool    string
	Network string
	// DomainType is the type of the domains that are made: "qemu" if empty, which every host can run.
	DomainType string
	// CallTimeout bounds each case; one minute if zero.
	CallTimeout time.Duration

	// NoTransfers says that the target cannot upload and download, NoStart that it cannot start domains. The cases
	// that need it are left out, and listed.
	NoTransfers bool
	NoStart     bool

	// Fake says that the target is kvm2's fake. The cases in which it is listed to differ from libvirt must then
	// differ, and must hold on every other target.
	Fake bool
}

// A seamCase is one rule of the seam, and how to see whether it is kept.
type seamCase struct {
	Name  string
	Rule  string
	Needs need
	Run   func(*seam)
}

// A need is what a case needs the target to be able to do.
type need string

const (
	needTransfers need = "transfers"
	needStart     need = "starting domains"
)

func (c Caps) lacks(n need) bool {
	return n == needTransfers && c.NoTransfers || n == needStart && c.NoStart
}

func seamCases() []seamCase {
	return slices.Concat(
		sessionCases(), hostCases(), domainCases(), defineCases(), guestCases(), addressCases(),
		volumeCases(), createVolumeCases(), transferCases(),
	)
}

// TestSeam checks that the sessions that dialer opens keep the promises of kvm2.Conn.
func TestSeam(t *testing.T, dialer kvm2.Dialer, caps Caps) {
	t.Helper()
	if caps.Prefix == "" || caps.Pool == "" || caps.Network == "" {
		t.Fatal("kvm2test: Caps.Prefix, Caps.Pool and Caps.Network are required")
	}
	if caps.DomainType == "" {
		caps.DomainType = "qemu"
	}
	if caps.CallTimeout == 0 {
		caps.CallTimeout = time.Minute
	}
	sweepAll(t, dialer, caps)
	var left []string
	for i, c := range seamCases() {
		if caps.lacks(c.Needs) {
			left = append(left, fmt.Sprintf("%s (needs %s)", c.Name, c.Needs))
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			t.Log("rule: " + c.Rule)
			c.Run(newSeam(t, dialer, caps, fmt.Sprintf("%s-%d", caps.Prefix, i)))
		})
	}
	runDiffering(t, caps, func(t *testing.T, base string) *seam { return newSeam(t, dialer, caps, base) })
	if len(left) > 0 {
		t.Logf("%d cases were left out:\n\t%s", len(left), strings.Join(left, "\n\t"))
	}
}

// seam is one case at work.
type seam struct {
	*testing.T
	dialer kvm2.Dialer
	caps   Caps
	base   string // begins all names of this case
	ctx    context.Context
	conn   kvm2.Conn
}

func newSeam(t *testing.T, dialer kvm2.Dialer, caps Caps, base string) *seam {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), caps.CallTimeout)
	t.Cleanup(cancel)
	s := &seam{T: t, dialer: dialer, caps: caps, base: base, ctx: ctx}
	t.Cleanup(func() { sweep(t, dialer, caps, base) })
	s.conn = s.dial()
	return s
}

// dial opens a session that is closed at the end of the case.
func (s *seam) dial() kvm2.Conn {
	s.Helper()
	conn, err := s.dialer.Dial(s.ctx)
	if err != nil {
		s.Fatalf("Dial: %v", err)
	}
	s.Cleanup(func() { _ = conn.Close() }) // some cases close it themselves
	return conn
}

// sweepAll removes what an earlier run has left.
func sweepAll(t *testing.T, dialer kvm2.Dialer, caps Caps) {
	t.Helper()
	sweep(t, dialer, caps, caps.Prefix)
	t.Cleanup(func() { sweep(t, dialer, caps, caps.Prefix) })
}

// sweep removes all that begins with base and a dash, over a session of its own.
func sweep(t *testing.T, dialer kvm2.Dialer, caps Caps, base string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), caps.CallTimeout) // t's own has ended by now
	defer cancel()
	conn, err := dialer.Dial(ctx)
	if err != nil {
		t.Errorf("clean up: %v", err)
		return
	}
	defer func() { _ = conn.Close() }()
	if err := errors.Join(sweepDomains(ctx, conn, base), sweepVolumes(ctx, conn, caps.Pool, base)); err != nil {
		t.Errorf("clean up: %v", err)
	}
}

func sweepDomains(ctx context.Context, conn kvm2.Conn, base string) error {
	domains, err := conn.Domains(ctx)
	for _, d := range domains {
		if strings.HasPrefix(d.Name, base+"-") {
			err = errors.Join(err, unless(55, conn.DestroyDomain(ctx, d.UUID, kvm2.DestroyForced)))
			err = errors.Join(err, unless(42, conn.UndefineDomain(ctx, d.UUID)))
		}
	}
	return err
}

func sweepVolumes(ctx context.Context, conn kvm2.Conn, pool, base string) error {
	names, err := conn.VolumeNames(ctx, pool)
	for _, name := range names {
		if strings.HasPrefix(name, base+"-") {
			err = errors.Join(err, unless(50, conn.DeleteVolume(ctx, pool, name)))
		}
	}
	return err
}

// unless drops an error with the code given.
func unless(code int, err error) error {
	if codeOf(err) == code {
		return nil
	}
	return err
}

// codeOf is the number of libvirt's answer; 0 for any other error.
func codeOf(err error) int {
	if e, ok := errors.AsType[*kvm2.LibvirtError](err); ok {
		return e.Code
	}
	return 0
}

// name is a name of this case.
func (s *seam) name(part string) string { return s.base + "-" + part }

// must fails the case over an error.
func (s *seam) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatalf("unexpected error: %v", err)
	}
}

// get fails the case over the error of a call that returns a value.
func get[T any](s *seam, what string) func(v T, err error) T {
	return func(v T, err error) T {
		s.Helper()
		if err != nil {
			s.Fatalf("%s: %v", what, err)
		}
		return v
	}
}

// wantCode fails the case unless err is libvirt's answer with the code.
func (s *seam) wantCode(err error, code int) {
	s.Helper()
	if err == nil {
		s.Fatalf("got no error, want libvirt's code %d", code)
	}
	if got := codeOf(err); got != code {
		s.Fatalf("got error %v, want libvirt's code %d", err, code)
	}
}

// wantBroken fails the case unless the session is broken.
func (s *seam) wantBroken(conn kvm2.Conn) {
	s.Helper()
	_, err := conn.HostInfo(s.ctx)
	if err == nil {
		s.Fatal("the session still answers, want it to be broken")
	}
	if codeOf(err) != 0 {
		s.Fatalf("the session answers %v, want an error that is not libvirt's", err)
	}
}

// wantUsable fails the case unless the session still answers.
func (s *seam) wantUsable(conn kvm2.Conn) {
	s.Helper()
	if _, err := conn.HostInfo(s.ctx); err != nil {
		s.Fatalf("the session should still be usable: %v", err)
	}
}

// eventually repeats a check until it holds: libvirt looks at uploaded content in its own time.
func (s *seam) eventually(what string, holds func() bool) {
	s.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.Fatalf("%s: not yet when the case's time was over", what)
		}
	}
}

// promptly fails the case unless fn returns soon.
func (s *seam) promptly(what string, fn func()) {
	s.Helper()
	const soon = 5 * time.Second
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	timer := time.NewTimer(soon)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		s.Fatalf("%s did not return within %v", what, soon)
	}
}
