package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvm2/kvm2"
)

// site is a host to make a machine on.
type site struct {
	title    string
	provider *kvm2.Provider
	checker  *kvm2.Checker
	image    kvm2.Image
	every    time.Duration // from one poll to the next
	// leftovers looks behind the Provider's back and tells what is left; nil where nobody but the Provider can look.
	leftovers func() (string, error)
}

// openSite returns the host that the settings name.
func openSite(s settings) (*site, error) {
	if s.config.URI == "" {
		d, err := newDemo()
		if err != nil {
			return nil, err
		}
		return d.open(s)
	}
	return openHost(s)
}

func openHost(s settings, opts ...kvm2.Option) (*site, error) {
	err := s.config.Validate("")
	if !s.check {
		err = errors.Join(err, s.spec.Validate())
	}
	if err != nil {
		return nil, err
	}
	checker, err := kvm2.NewChecker(s.config, opts...)
	if err != nil {
		return nil, err
	}
	p, err := kvm2.New(s.config, opts...)
	if err != nil {
		return nil, err
	}
	title := fmt.Sprintf("%s, pool %q", s.config.URI, s.config.Pool)
	return &site{title: title, provider: p, checker: checker, image: s.spec.Image, every: 500 * time.Millisecond}, nil
}

// cleanUpLimit bounds the deletion of a machine.
const cleanUpLimit = 2 * time.Minute

// life is one machine from the first Create to the last look at what is left.
type life struct {
	*site
	settings
	screen  *screen
	bar     *bar
	stderr  io.Writer
	release func()

	id      string // known from the first Create on
	begun   bool   // a Create has reached the host
	running bool   // the machine has come up
	shown   string // the state that was shown last
}

func newLife(s settings, host *site, c command) *life {
	s.spec.Image = host.image
	out := newScreen(c.stdout)
	return &life{site: host, settings: s, screen: out, bar: &bar{screen: out}, stderr: c.stderr, release: c.release}
}

// run takes the machine through its life, and says what went wrong. What was begun is taken away again, whatever fails.
func (l *life) run(ctx context.Context) error {
	l.introduce()
	err := l.live(ctx)
	l.screen.endLine()
	if err != nil && ctx.Err() == nil {
		explain(l.stderr, err)
	}
	switch {
	case l.keeps(ctx, err):
		l.farewell()
	case err != nil:
		l.cleanUp(ctx)
	}
	return err
}

func (l *life) live(ctx context.Context) error {
	if err := l.bringUp(ctx); err != nil {
		return err
	}
	if err := l.list(ctx); err != nil || l.keep {
		return err
	}
	if err := l.delete(ctx); err != nil {
		return err
	}
	return l.check(ctx)
}

// keeps reports whether the machine is to be left running: also when it has no address, so that one can look why.
func (l *life) keeps(ctx context.Context, err error) bool {
	return l.keep && l.running && ctx.Err() == nil && kvm2.ClassOf(err) != kvm2.ClassNotFound
}

func (l *life) introduce() {
	l.screen.text("host     %s", l.title)
	l.screen.text("machine  %s: %d CPUs, %d MiB memory, %d GiB disk", l.spec.Name, l.spec.CPUs, l.spec.MemoryBytes>>20, l.spec.RootDiskBytes>>30)
	l.screen.text("image    %s", l.spec.Image.Checksum)
}

// bringUp makes the machine and waits for an address.
func (l *life) bringUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.timeout, fmt.Errorf("not done within -timeout %s", l.timeout))
	defer cancel()
	l.screen.heading("Create, until the machine runs")
	if err := l.create(ctx); err != nil {
		return err
	}
	l.running = true
	l.screen.heading("Get, until the guest has an address")
	return l.awaitAddress(ctx)
}

func (l *life) create(ctx context.Context) error {
	return l.poll(ctx, func(ctx context.Context) (bool, error) {
		m, err := l.provider.Create(ctx, l.spec)
		l.showID(m.ID)
		l.begun = l.begun || !unreached(err)
		if err != nil {
			return false, err
		}
		l.show(m)
		return m.State == kvm2.StateRunning, ended(m)
	})
}

// unreached reports whether an error came before the host could be asked for anything.
func unreached(err error) bool {
	e, ok := errors.AsType[*kvm2.Error](err)
	return ok && e.Op == kvm2.OpDial
}

func (l *life) awaitAddress(ctx context.Context) error {
	return l.poll(ctx, func(ctx context.Context) (bool, error) {
		m, err := l.provider.Get(ctx, l.id)
		if err != nil {
			return false, err
		}
		l.show(m)
		if len(m.Addresses) == 0 {
			return false, ended(m)
		}
		l.showAddresses(m)
		return true, nil
	})
}

// poll calls fn until it is done, as a controller would: what may get better by itself is tried again in the time
// that kvm2 advises, everything else ends it.
func (l *life) poll(ctx context.Context, fn func(context.Context) (bool, error)) error {
	for {
		done, err := fn(ctx)
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		if err == nil && done {
			return nil
		}
		wait := l.every
		if err != nil {
			wait = kvm2.RetryAfter(err)
			if wait == 0 {
				return err
			}
			l.screen.event("retry", "in %s: %s: %v", wait, kvm2.ClassOf(err), err)
		}
		if sleep(ctx, wait) != nil {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ended is the error of a machine that does not come up any more by waiting.
func ended(m kvm2.Machine) error {
	if m.State != kvm2.StateFailed && m.State != kvm2.StateStopped {
		return nil
	}
	return &kvm2.Error{Class: kvm2.ClassPermanent, Err: fmt.Errorf("machine %q is %s (%s)", m.ID, m.State, m.Reason)}
}

func (l *life) list(ctx context.Context) error {
	l.screen.heading("List")
	machines, err := l.listed(ctx)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(l.screen, 0, 0, 2, ' ', 0)
	say(t, "NAME\tSTATE\tADDRESSES\tID")
	for _, m := range machines {
		say(t, "%s\t%s\t%s\t%s", cmp.Or(m.Name, "-"), m.State, cmp.Or(addresses(m), "-"), m.ID)
	}
	_ = t.Flush() // see say
	return nil
}

func (l *life) listed(ctx context.Context) (machines []kvm2.Machine, err error) {
	err = l.poll(ctx, func(ctx context.Context) (bool, error) {
		machines, err = l.provider.List(ctx)
		return true, err
	})
	return machines, err
}

func addresses(m kvm2.Machine) string {
	var out []string
	for _, a := range m.Addresses {
		out = append(out, a.IP.String())
	}
	return strings.Join(out, ",")
}

func (l *life) delete(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, cleanUpLimit, fmt.Errorf("not deleted within %s", cleanUpLimit))
	defer cancel()
	l.screen.heading("Delete, until nothing is left")
	err := l.poll(ctx, func(ctx context.Context) (bool, error) { return true, l.provider.Delete(ctx, l.id) })
	if err == nil {
		l.screen.event("gone", "%s", l.id)
	}
	return err
}

// cleanUp deletes the machine after a failure or a signal. It does not stop when ctx does: that is what it is for.
func (l *life) cleanUp(ctx context.Context) {
	if ctx.Err() != nil {
		l.release()
		say(l.stderr, "interrupted: cleaning up; Ctrl-C again ends at once")
	}
	if !l.begun {
		return
	}
	if err := l.delete(context.WithoutCancel(ctx)); err != nil {
		explain(l.stderr, err)
		say(l.stderr, "left   perhaps %s: the same command, run again, deletes it in the end", l.id)
	}
}

// check makes sure that the machine is gone.
func (l *life) check(ctx context.Context) error {
	l.screen.heading("What is left")
	err := l.poll(ctx, func(ctx context.Context) (bool, error) {
		_, err := l.provider.Get(ctx, l.id)
		return true, err
	})
	if !errors.Is(err, kvm2.ErrNotFound) {
		return errors.Join(fmt.Errorf("get of a deleted machine: want an error of class %s", kvm2.ClassNotFound), err)
	}
	l.screen.event("get", "%s, as it should be", kvm2.ClassOf(err))
	machines, err := l.listed(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(machines, func(m kvm2.Machine) bool { return m.ID == l.id }) {
		return fmt.Errorf("machine %q is deleted and still listed", l.id)
	}
	l.screen.event("list", "%d machines in scope %q", len(machines), l.config.Scope)
	return l.checkHost()
}

// checkHost looks at the host itself where that can be done.
func (l *life) checkHost() error {
	left := "the image stays in the pool: the next machine needs no transfer"
	if l.leftovers != nil {
		var err error
		if left, err = l.leftovers(); err != nil {
			return err
		}
	}
	l.screen.event("host", "%s", left)
	l.screen.text("\ndone in %.1f s", time.Since(l.screen.start).Seconds())
	return nil
}

func (l *life) showID(id string) {
	if l.id == "" && id != "" {
		l.id = id
		l.screen.event("id", "%s", id)
	}
}

// show tells what has changed.
func (l *life) show(m kvm2.Machine) {
	state := string(m.State)
	if m.Reason != "" {
		state += " (" + m.Reason + ")"
	}
	if m.Image == nil {
		l.bar.finish()
	}
	if state != l.shown {
		l.shown = state
		l.screen.event("state", "%s", state)
	}
	if m.Image != nil {
		l.bar.show(*m.Image)
	}
}

func (l *life) showAddresses(m kvm2.Machine) {
	for _, a := range m.Addresses {
		l.screen.event("address", "%s (%s, %s)", a.IP, a.Source, a.MAC)
	}
	switch {
	case l.config.URI == "":
		l.screen.event("login", "none: the guests of the in-memory host do not really run")
	case !l.login:
		l.screen.event("login", "none: -ssh-key names a key for user %q", loginUser)
	default:
		l.screen.event("login", "ssh %s@%s (once the guest has booted)", loginUser, m.Addresses[0].IP)
	}
}

// farewell says how a machine that is kept can be deleted.
func (l *life) farewell() {
	l.screen.heading("The machine is kept")
	l.screen.event("id", "%s", l.id)
	l.screen.event("delete", "run the same command without -keep")
}
