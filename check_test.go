package kvm2_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/sshdial"
)

// allChecks are the checks in the order of a report.
var allChecks = []kvm2.CheckName{
	kvm2.CheckDial, kvm2.CheckHostKey, kvm2.CheckAuthentication, kvm2.CheckDaemon, kvm2.CheckReadWrite, kvm2.CheckLibvirt,
	kvm2.CheckQEMU, kvm2.CheckDomainType, kvm2.CheckPool, kvm2.CheckNetwork,
}

func (l *lab) checker(edit func(*kvm2.Config)) *kvm2.Checker {
	l.Helper()
	cfg := kvm2.Config{URI: "qemu:///system", Scope: labScope}
	if edit != nil {
		edit(&cfg)
	}
	c, err := kvm2.NewChecker(cfg, kvm2.WithDialer(l.host))
	if err != nil {
		l.Fatal(err)
	}
	return c
}

func TestCheck_GoodHostPassesEveryCheck(t *testing.T) {
	inLab(t, func(l *lab) {
		r := l.checker(nil).Check(l.Context())
		if !r.OK() || r.Err() != nil || r.Host != "localhost" {
			l.Errorf("Check() = %v", r)
		}
		l.wantOutcome(r, "", nil)
		for _, c := range r.Results {
			if asks := c.Name != kvm2.CheckHostKey && c.Name != kvm2.CheckAuthentication && c.Name != kvm2.CheckDaemon && c.Name != kvm2.CheckQEMU &&
				c.Name != kvm2.CheckDomainType; asks != (c.Latency > 0) {
				l.Errorf("%s: latency %v", c.Name, c.Latency)
			}
		}
	}, fake.WithLatency(time.Millisecond))
}

// wantOutcome checks that one check failed, those that could not run are skipped, and all others passed. The fake is
// reached without SSH, so unless they are what failed, SSH's own checks are skipped.
func (l *lab) wantOutcome(r kvm2.Report, failed kvm2.CheckName, skipped []kvm2.CheckName) {
	l.Helper()
	var names []kvm2.CheckName
	for _, c := range r.Results {
		names = append(names, c.Name)
		want := kvm2.CheckPassed
		switch {
		case c.Name == failed:
			want = kvm2.CheckFailed
		case slices.Contains(skipped, c.Name), c.Name == kvm2.CheckHostKey, c.Name == kvm2.CheckAuthentication:
			want = kvm2.CheckSkipped
		}
		if c.Status != want || c.Detail == "" {
			l.Errorf("%s: %s %q, want it %s", c.Name, c.Status, c.Detail, want)
		}
		if isFailed := c.Status == kvm2.CheckFailed; isFailed != (c.Err != nil) || isFailed != (c.Advice != "") || c.Class != kvm2.ClassOf(c.Err) {
			l.Errorf("%s: %+v, want error, class and advice with a failure and only then", c.Name, c)
		}
	}
	if !slices.Equal(names, allChecks) {
		l.Errorf("checks: %q, want %q", names, allChecks)
	}
}

// checkFault is one thing that is wrong with a host.
type checkFault struct {
	name    string
	edit    func(*kvm2.Config)
	opts    []fake.Option
	happen  func(*fake.Host)
	failed  kvm2.CheckName
	skipped []kvm2.CheckName
	class   kvm2.Class
	is      error
	advice  string
}

func dialFault(err error) func(*fake.Host) {
	return func(h *fake.Host) { h.AddFault(fake.Fault{Op: kvm2.OpDial, Effect: fake.FailWith(err)}) }
}

func checkFaults() []checkFault {
	const readOnly = "operation forbidden: read only access prevents virDomainSetMetadata"
	return []checkFault{
		{
			name: "host down", happen: dialFault(errors.New("connect: connection refused")),
			failed: kvm2.CheckDial, skipped: allChecks[1:], class: kvm2.ClassTransient, advice: "firewall",
		},
		{
			name: "unknown host key", happen: dialFault(&sshdial.HostKeyError{LookupKey: "[host]:2222"}),
			failed: kvm2.CheckHostKey, skipped: allChecks[2:], class: kvm2.ClassPermanent, is: kvm2.ErrHostKey, advice: "ssh-keygen",
		},
		{
			name: "key refused", happen: dialFault(&sshdial.AuthError{User: "root"}),
			failed: kvm2.CheckAuthentication, skipped: allChecks[3:], class: kvm2.ClassPermanent, is: kvm2.ErrUnauthorized, advice: "authorized_keys",
		},
		{
			name: "key that cannot be read", happen: dialFault(&sshdial.MaterialError{Path: "/key", What: "private key"}),
			failed: kvm2.CheckAuthentication, skipped: slices.Concat(allChecks[:2], allChecks[3:]), class: kvm2.ClassPermanent, advice: "can be read",
		},
		{
			name: "known_hosts that cannot be read", happen: dialFault(&sshdial.MaterialError{Path: "/known_hosts", What: "known_hosts"}),
			failed: kvm2.CheckHostKey, skipped: slices.Concat(allChecks[:1], allChecks[2:]), class: kvm2.ClassPermanent, advice: "known_hosts",
		},
		{
			name: "libvirt refuses the user", happen: dialFault(&kvm2.LibvirtError{Code: 45, Message: "authentication failed"}),
			failed: kvm2.CheckAuthentication, skipped: allChecks[3:], class: kvm2.ClassPermanent, is: kvm2.ErrUnauthorized, advice: "polkit",
		},
		{
			name: "no daemon behind SSH", happen: dialFault(&sshdial.ForwardError{Reason: ssh.ConnectionFailed}),
			failed: kvm2.CheckDaemon, skipped: allChecks[4:], class: kvm2.ClassTransient, advice: "libvirtd",
		},
		{
			name: "forwarding forbidden", happen: dialFault(&sshdial.ForwardError{Reason: ssh.Prohibited}),
			failed: kvm2.CheckDaemon, skipped: allChecks[4:], class: kvm2.ClassPermanent, advice: "forwarding",
		},
		{
			name: "read-only socket", happen: func(h *fake.Host) {
				h.AddFault(fake.Fault{Op: kvm2.OpDomainSetMetadata, Effect: fake.Fail(29, readOnly)})
			},
			failed: kvm2.CheckReadWrite, class: kvm2.ClassPermanent, is: kvm2.ErrUnauthorized, advice: "libvirt-sock",
		},
		{
			name: "old libvirt", opts: []fake.Option{fake.WithVersions(6_008_000, 7_002_000)},
			failed: kvm2.CheckLibvirt, class: kvm2.ClassPermanent, is: kvm2.ErrUnsupported, advice: "upgrade",
		},
		{
			name: "old QEMU", opts: []fake.Option{fake.WithVersions(9_000_000, 5_000_000)},
			failed: kvm2.CheckQEMU, class: kvm2.ClassPermanent, is: kvm2.ErrUnsupported, advice: "upgrade",
		},
		{
			name: "no KVM", opts: []fake.Option{fake.WithDomainTypes("qemu")},
			failed: kvm2.CheckDomainType, class: kvm2.ClassPermanent, is: kvm2.ErrUnsupported, advice: "/dev/kvm",
		},
		{
			name: "host that cannot be asked", happen: func(h *fake.Host) {
				h.AddFault(fake.Fault{Op: kvm2.OpHostInfo, Effect: fake.Fail(1, "internal error: something")})
			},
			failed: kvm2.CheckLibvirt, skipped: []kvm2.CheckName{kvm2.CheckQEMU, kvm2.CheckDomainType}, class: kvm2.ClassTransient, advice: "log",
		},
		{
			name: "no such pool", edit: func(c *kvm2.Config) { c.Pool = "nosuch" },
			failed: kvm2.CheckPool, class: kvm2.ClassPermanent, advice: "virsh pool-start nosuch",
		},
		{
			name: "pool not active", happen: func(h *fake.Host) { h.StopPool(labPool) },
			failed: kvm2.CheckPool, class: kvm2.ClassPermanent, advice: "virsh pool-start default",
		},
		{
			name: "pool full", opts: []fake.Option{fake.WithPool(labPool, 100*mib)},
			failed: kvm2.CheckPool, class: kvm2.ClassQuota, is: kvm2.ErrQuotaExceeded, advice: "remove",
		},
		{
			name: "no such network", edit: func(c *kvm2.Config) { c.Network = "nosuch" },
			failed: kvm2.CheckNetwork, class: kvm2.ClassPermanent, advice: "virsh net-start nosuch",
		},
		{
			name: "network not active", happen: func(h *fake.Host) { h.StopNetwork("default") },
			failed: kvm2.CheckNetwork, class: kvm2.ClassPermanent, advice: "virsh net-start default",
		},
	}
}

func TestCheck_EachFaultIsFoundByItselfWithAdvice(t *testing.T) {
	var found []kvm2.CheckName
	for _, tt := range checkFaults() {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				if tt.happen != nil {
					tt.happen(l.host)
				}
				r := l.checker(tt.edit).Check(l.Context())
				l.wantOutcome(r, tt.failed, tt.skipped)
				i := slices.IndexFunc(r.Results, func(c kvm2.CheckResult) bool { return c.Name == tt.failed })
				c := r.Results[i]
				l.wantError(string(c.Name), c.Err, tt.class, tt.is)
				if !strings.Contains(c.Advice, tt.advice) {
					l.Errorf("advice: %q, want it to mention %q", c.Advice, tt.advice)
				}
				if r.OK() || !strings.Contains(fmt.Sprint(r.Err()), string(tt.failed)) || !strings.Contains(r.String(), c.Advice) {
					l.Errorf("the report does not tell of it:\n%v", r)
				}
			}, tt.opts...)
		})
		found = append(found, tt.failed)
	}
	for _, name := range allChecks {
		if !slices.Contains(found, name) {
			t.Errorf("no fault fails check %q", name)
		}
	}
}

func TestCheck_ChangesNothingAndDialsAnew(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		c := l.checker(nil)
		before := l.host.Dump()
		open := l.host.Stats().OpenSessions
		dials := l.calls(kvm2.OpDial, func() {
			for range 3 {
				if r := c.Check(l.Context()); !r.OK() {
					l.Errorf("Check() = %v", r)
				}
			}
		})
		if dials != 3 || l.host.Stats().OpenSessions != open {
			l.Errorf("%d dials for 3 checks, and %d sessions more are open", dials, l.host.Stats().OpenSessions-open)
		}
		if after := l.host.Dump(); after != before {
			l.Errorf("the host has changed:\n%s\nwas\n%s", after, before)
		}
	})
}

func TestCheck_EndsWithItsContext(t *testing.T) {
	inLab(t, func(l *lab) {
		l.host.AddFault(fake.Fault{Times: fake.Always, Effect: fake.Hang()})
		ctx, cancel := context.WithTimeout(l.Context(), time.Second)
		defer cancel()
		start := time.Now()
		r := l.checker(nil).Check(ctx)
		if took := time.Since(start); took > time.Second {
			l.Errorf("Check() took %v after a context of 1 s", took)
		}
		if !errors.Is(r.Err(), context.DeadlineExceeded) {
			l.Errorf("Check() = %v, want the context's error", r)
		}
	})
}
