package kvm2

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvm2/kvm2/internal/sshdial"
	"github.com/kvm2/kvm2/internal/tlsdial"
)

// Checker tests whether a host can be used. It dials anew for each Check, so it meets what a new connection would meet,
// and it changes nothing on the host. It is safe for concurrent use.
type Checker struct{ endpoint }

// NewChecker returns a Checker for the host that cfg names, with the options that New takes. It does not connect.
// Errors are of class Permanent, ErrInvalidConfig.
func NewChecker(cfg Config, opts ...Option) (*Checker, error) {
	e, err := newEndpoint(cfg, opts)
	if err != nil {
		return nil, err
	}
	return &Checker{e}, nil
}

// CheckName names one check.
type CheckName string

// The checks, in the order in which a Report has them.
const (
	// CheckDial: the host can be reached.
	CheckDial CheckName = "dial"
	// CheckHostKey: its SSH host key is the one that known_hosts has, or its certificate is trusted.
	CheckHostKey CheckName = "host-key"
	// CheckAuthentication: SSH or TLS, and libvirt, accept the credentials.
	CheckAuthentication CheckName = "authentication"
	// CheckDaemon: a libvirt daemon answers.
	CheckDaemon CheckName = "daemon"
	// CheckReadWrite: the connection may change things.
	CheckReadWrite CheckName = "read-write"
	// CheckLibvirt and CheckQEMU: the versions are recent enough.
	CheckLibvirt CheckName = "libvirt-version"
	CheckQEMU    CheckName = "qemu-version"
	// CheckDomainType: the host offers Config.DomainType, which is KVM unless emulation is asked for.
	CheckDomainType CheckName = "domain-type"
	// CheckPool: the pool is active and has free space.
	CheckPool CheckName = "pool"
	// CheckNetwork: the network is active.
	CheckNetwork CheckName = "network"
)

// CheckStatus is the outcome of one check.
type CheckStatus string

// The outcomes.
const (
	CheckPassed CheckStatus = "passed"
	CheckFailed CheckStatus = "failed"
	// CheckSkipped: it could not run, because one before it failed, or does not apply to this kind of connection.
	CheckSkipped CheckStatus = "skipped"
)

// CheckResult is what one check found.
type CheckResult struct {
	Name   CheckName
	Status CheckStatus
	// Detail says what was found, for a person.
	Detail string
	// Err is the error of a failed check, Class its class.
	Err   error
	Class Class
	// Advice says what to do about a failed check.
	Advice string
	// Latency is how long the host took to answer; 0 for what an earlier answer already told.
	Latency time.Duration
}

// Report is the outcome of a Check.
type Report struct {
	// Host is the host's name.
	Host string
	// Results has one result for each check, in the order of the constants.
	Results []CheckResult
}

// OK reports whether no check failed and the host was reached.
func (r Report) OK() bool { return r.Err() == nil }

// Err joins the errors of the failed checks; nil when none failed.
func (r Report) Err() error {
	var errs []error
	for _, c := range r.Results {
		if c.Status == CheckFailed {
			errs = append(errs, fmt.Errorf("%s: %w", c.Name, c.Err))
		}
	}
	return errors.Join(errs...)
}

// String is the report as a table for a person.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "host %s\n", r.Host)
	for _, c := range r.Results {
		latency := ""
		if c.Latency > 0 {
			latency = c.Latency.Round(10 * time.Microsecond).String()
		}
		fmt.Fprintf(&b, "  %-7s  %-15s  %9s  %s\n", c.Status, c.Name, latency, c.Detail)
		if c.Status == CheckFailed {
			fmt.Fprintf(&b, "           %s: %v\n           advice: %s\n", c.Class, c.Err, c.Advice)
		}
	}
	return b.String()
}

// Oldest versions, in libvirt's form: 6.9.0 is the first libvirt with free page reporting for the balloon, 5.1.0 the
// first QEMU (https://libvirt.org/formatdomain.html#memory-balloon-device).
const (
	oldestLibvirt = 6_009_000
	oldestQEMU    = 5_001_000
)

// lowSpace is how little free space makes a pool useless.
const lowSpace = gib

// Check runs all checks on a new connection. One that fails does not stop those that can still run. It ends with ctx.
func (c *Checker) Check(ctx context.Context) Report {
	r := &checkRun{report: Report{Host: c.host.name}}
	conn, err := timed(r, func() (*session, error) { return c.dial.open(ctx) })
	r.connection(err, c.hostKey)
	if err != nil {
		r.skip("there is no connection", CheckReadWrite, CheckLibvirt, CheckQEMU, CheckDomainType, CheckPool, CheckNetwork)
		return r.report
	}
	defer func() { _ = conn.Close() }()
	r.readWrite(ctx, conn)
	r.hostInfo(ctx, conn, c.cfg.DomainType)
	r.pool(ctx, conn, c.cfg.Pool)
	r.network(ctx, conn, c.cfg.Network)
	return r.report
}

// checkRun is one Check at work.
type checkRun struct {
	report  Report
	latency time.Duration // of the last answer, until a result takes it
}

// timed asks the host and keeps how long it took.
func timed[T any](r *checkRun, ask func() (T, error)) (T, error) {
	start := time.Now()
	v, err := ask()
	r.latency = time.Since(start)
	return v, err
}

func (r *checkRun) add(result CheckResult) {
	result.Latency, r.latency = r.latency, 0
	result.Class = ClassOf(result.Err)
	r.report.Results = append(r.report.Results, result)
}

func (r *checkRun) pass(name CheckName, format string, args ...any) {
	r.add(CheckResult{Name: name, Status: CheckPassed, Detail: fmt.Sprintf(format, args...)})
}

func (r *checkRun) fail(name CheckName, err error, advice string) {
	r.add(CheckResult{Name: name, Status: CheckFailed, Detail: "failed", Err: err, Advice: advice})
}

func (r *checkRun) skip(why string, names ...CheckName) {
	for _, name := range names {
		r.add(CheckResult{Name: name, Status: CheckSkipped, Detail: why})
	}
}

// connection tells from the outcome of a dial how far it came: reaching the host, its key, our credentials, the daemon.
func (r *checkRun) connection(err error, hostKey bool) {
	steps := []CheckName{CheckDial, CheckHostKey, CheckAuthentication, CheckDaemon}
	failed := slices.Index(steps, failedStep(err))
	untried := isMaterial(err) // keys, certificates and known_hosts are read before the dial
	for i, step := range steps {
		switch {
		case i == failed:
			r.fail(step, err, connectionAdvice[step])
		case untried && i < failed:
			r.skip("the host was not tried", step)
		case failed >= 0 && i > failed:
			r.skip("the connection did not come so far", step)
		case !hostKey && (step == CheckHostKey || step == CheckAuthentication):
			r.skip("there is none without SSH or TLS", step)
		default:
			r.pass(step, "ok")
		}
	}
}

// failedStep says at which step a dial failed; "" if it did not.
func failedStep(err error) CheckName {
	if err == nil {
		return ""
	}
	if errors.Is(err, ErrHostKey) {
		return CheckHostKey
	}
	if errors.Is(err, ErrUnauthorized) {
		return CheckAuthentication
	}
	if e, ok := errors.AsType[*sshdial.MaterialError](err); ok {
		switch e.What {
		case sshConfigMaterial:
			return CheckDial
		case "known_hosts":
			return CheckHostKey
		}
		return CheckAuthentication
	}
	if _, ok := errors.AsType[*tlsdial.MaterialError](err); ok {
		return CheckAuthentication
	}
	if isDaemonOutOfReach(err) || isLibvirtAnswer(err) {
		return CheckDaemon
	}
	return CheckDial
}

func isMaterial(err error) bool {
	_, ofSSH := errors.AsType[*sshdial.MaterialError](err)
	_, ofTLS := errors.AsType[*tlsdial.MaterialError](err)
	return ofSSH || ofTLS
}

// isDaemonOutOfReach reports whether the SSH server was reached and no daemon behind it.
func isDaemonOutOfReach(err error) bool {
	_, forward := errors.AsType[*sshdial.ForwardError](err)
	_, command := errors.AsType[*sshdial.CommandError](err)
	return forward || command
}

var connectionAdvice = map[CheckName]string{
	CheckDial:           "see that the host is up, that uri names it and its port (or the socket), and that no firewall is between",
	CheckHostKey:        "compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*.pub there), then correct the known_hosts file; with TLS, see that the certificate is for this name and that cacert.pem is of its authority",
	CheckAuthentication: "see that the key exists and can be read, that the user's authorized_keys on the host has it (with TLS, that libvirtd.conf admits the certificate), and that the user may use libvirt (group libvirt, polkit)",
	CheckDaemon:         "see that libvirtd (or virtqemud) runs on the host, that socket names its socket, and that sshd allows stream-local forwarding, or the host has virt-ssh-helper or nc",
}

// readWrite tries to change a domain that does not exist. A connection that may not change anything is refused before
// the domain is looked for.
func (r *checkRun) readWrite(ctx context.Context, conn Conn) {
	var nobody UUID
	_, _ = rand.Read(nobody[:]) // never fails
	_, err := timed(r, func() (struct{}, error) { return struct{}{}, conn.SetDomainMetadata(ctx, nobody, "<machine/>") })
	if ClassOf(err) == ClassNotFound {
		r.pass(CheckReadWrite, "ok")
		return
	}
	if err == nil {
		err = permanent(nil, "a domain that does not exist was changed")
	}
	r.fail(CheckReadWrite, err, "use the read-write socket (libvirt-sock, not libvirt-sock-ro), as a user whom polkit allows to manage")
}

func (r *checkRun) hostInfo(ctx context.Context, conn Conn, domainType string) {
	info, err := timed(r, func() (HostInfo, error) { return conn.HostInfo(ctx) })
	if err != nil {
		r.fail(CheckLibvirt, err, "see the log of the libvirt daemon")
		r.skip("the host could not be asked", CheckQEMU, CheckDomainType)
		return
	}
	r.version(CheckLibvirt, "libvirt", info.Libvirt, oldestLibvirt)
	r.version(CheckQEMU, "QEMU", info.Hypervisor, oldestQEMU)
	if !slices.Contains(info.DomainTypes, domainType) {
		r.fail(CheckDomainType, permanent(ErrUnsupported, "the host offers %q, not %q", info.DomainTypes, domainType),
			"switch virtualization on in the firmware, load kvm_intel or kvm_amd, see that QEMU may open /dev/kvm; or set domainType to \"qemu\" for slow emulation")
		return
	}
	r.pass(CheckDomainType, "%s on %s, %d CPUs, %d bytes of memory", domainType, info.Arch, info.CPUs, info.MemoryBytes)
}

func (r *checkRun) version(name CheckName, what string, got, oldest uint64) {
	if got < oldest {
		r.fail(name, permanent(ErrUnsupported, "%s %s is too old: want %s", what, versionText(got), versionText(oldest)), "upgrade the host")
		return
	}
	r.pass(name, "%s", versionText(got))
}

func versionText(v uint64) string {
	return fmt.Sprintf("%d.%d.%d", v/1_000_000, v/1000%1000, v%1000)
}

func (r *checkRun) pool(ctx context.Context, conn Conn, name string) {
	pool, err := timed(r, func() (Pool, error) { return activePool(ctx, conn, name) })
	if err != nil {
		r.fail(CheckPool, err, fmt.Sprintf("define the pool and start it: virsh pool-start %s; virsh pool-autostart %s", name, name))
		return
	}
	if pool.AvailableBytes < lowSpace {
		r.fail(CheckPool, quota("pool %q has %d bytes available", name, pool.AvailableBytes), "remove what is not needed, or make the pool larger")
		return
	}
	r.pass(CheckPool, "%q at %s, %d of %d bytes available", name, pool.TargetPath, pool.AvailableBytes, pool.CapacityBytes)
}

func (r *checkRun) network(ctx context.Context, conn Conn, name string) {
	_, err := timed(r, func() (Network, error) { return activeNetwork(ctx, conn, name) })
	if err != nil {
		r.fail(CheckNetwork, err, fmt.Sprintf("define the network and start it: virsh net-start %s; virsh net-autostart %s", name, name))
		return
	}
	r.pass(CheckNetwork, "%q is active", name)
}
