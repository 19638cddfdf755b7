//go:build integration

package kvm2_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

// holdings are what a connection could leave in this process.
type holdings struct {
	files, goroutines, tcp int
	heap                   uint64 // bytes in use after a collection
}

func (h holdings) String() string {
	return fmt.Sprintf("%d open files, %d goroutines, %d TCP connections, %d KiB of heap", h.files, h.goroutines, h.tcp, h.heap>>10)
}

// holdingsNow counts, with the TCP connections that have the port at either end.
func holdingsNow(t *testing.T, port int) holdings {
	t.Helper()
	runtime.GC()
	runtime.GC() // the first only moves what pools hold to where the second finds it
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return holdings{files: openFiles(t), goroutines: runtime.NumGoroutine(), tcp: connectionsOf(t, port), heap: m.HeapAlloc}
}

// connectionsOf counts the ends, on this machine, of TCP connections with the port that neither side has closed for good.
func connectionsOf(t *testing.T, port int) int {
	t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	const timeWait, listen = "06", "0A"
	wanted, count := fmt.Sprintf(":%04X", port), 0
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // number, local address, remote address, state
		if len(fields) < 4 || fields[3] == timeWait || fields[3] == listen {
			continue
		}
		if strings.HasSuffix(fields[1], wanted) || strings.HasSuffix(fields[2], wanted) {
			count++
		}
	}
	return count
}

// waitForHoldings waits until no more is held than before, and no connection at all.
func waitForHoldings(t *testing.T, port int, before holdings) {
	t.Helper()
	var now holdings
	t.Cleanup(func() { t.Logf("held before: %s; after: %s", before, now) })
	const heapNoise = uint64(4 * mib) // what tests and runtime keep for themselves
	poll(t, 30*time.Second, func() bool {
		now = holdingsNow(t, port)
		return now.files <= before.files && now.goroutines <= before.goroutines && now.tcp == 0 && now.heap <= before.heap+heapNoise
	})
}

// dialCount counts dials, and those that failed.
type dialCount struct{ all, failed atomic.Int64 }

func (c *dialCount) CallObserved(e kvm2.CallEvent) {
	if e.Op != kvm2.OpDial {
		return
	}
	c.all.Add(1)
	if e.Err != nil {
		c.failed.Add(1)
	}
}

func TestRealHost_MaxStartupsOfOne(t *testing.T) {
	const clients = 20
	h := testhost.Require(t)
	server := startSSHD(t, "MaxStartups 1")
	before := holdingsNow(t, server.port)
	var dials dialCount
	providers := make([]*kvm2.Provider, clients)
	for i := range providers {
		p, err := kvm2.New(kvm2.Config{
			URI: server.uri(""), Scope: "kvm2-it-startups", Pool: h.Pool, Network: h.Network, DomainType: "qemu",
		}, kvm2.WithObserver(&dials))
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		providers[i] = p
	}
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	start, begin := time.Now(), make(chan struct{})
	var all sync.WaitGroup
	for i, p := range providers {
		all.Go(func() {
			<-begin
			if err := untilSuccess(ctx, func() error { _, err := p.List(ctx); return err }); err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	close(begin)
	all.Wait()
	t.Logf("%d clients came through in %s, %d of %d dials failed", clients, time.Since(start).Round(time.Millisecond), dials.failed.Load(), dials.all.Load())
	if dials.failed.Load() == 0 {
		t.Error("the server refused nobody, so the test has shown nothing")
	}
	for _, p := range providers {
		if err := p.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	}
	waitForHoldings(t, server.port, before)
}

// untilSuccess polls past Transient errors.
func untilSuccess(ctx context.Context, step func() error) error {
	tick := time.NewTicker(often)
	defer tick.Stop()
	for {
		err := step()
		if err == nil || kvm2.ClassOf(err) != kvm2.ClassTransient {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

func TestRealHost_ThousandConnectionsLeaveNothing(t *testing.T) {
	const cycles, atOnce = 1000, 4
	h := testhost.Require(t)
	dialer, err := kvm2.NewDialer(kvm2.Config{URI: h.SSHURI, Scope: "kvm2-it-thousand", Pool: h.Pool, Network: h.Network})
	if err != nil {
		t.Fatal(err)
	}
	dialAndClose(t, dialer, 10, 1) // what is made once is made
	before := holdingsNow(t, h.SSHPort)
	start := time.Now()
	dialAndClose(t, dialer, cycles, atOnce)
	t.Logf("%d connections in %s", cycles, time.Since(start).Round(time.Millisecond))
	waitForHoldings(t, h.SSHPort, before)
}

// dialAndClose opens that many connections, so many at once, asks each something and closes it.
func dialAndClose(t *testing.T, dialer kvm2.Dialer, cycles, atOnce int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var begun atomic.Int64
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for begun.Add(1) <= cycles {
				if err := askOnce(ctx, dialer); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

func askOnce(ctx context.Context, dialer kvm2.Dialer) error {
	conn, err := dialer.Dial(ctx)
	if err != nil {
		return fmt.Errorf("dialing: %w", err)
	}
	if _, err := conn.HostInfo(ctx); err != nil {
		_ = conn.Close()
		return fmt.Errorf("asking: %w", err)
	}
	return conn.Close()
}

// kill ends a server and all its connections, as a crash of its machine does.
func (s *sshd) kill(t *testing.T) {
	t.Helper()
	cmd := s.cmd
	s.cmd = nil
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil { // so that it starts no further processes
		t.Fatal(err)
	}
	for _, pid := range descendants(t, cmd.Process.Pid) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // which says that it was killed
}

// descendants are the processes that a process started, and those that they did.
func descendants(t *testing.T, ancestor int) []int {
	t.Helper()
	paths, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is good
	children := make(map[int][]int)
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if fields := strings.Fields(rest); len(fields) > 1 { // state, parent
			parent, _ := strconv.Atoi(fields[1])
			children[parent] = append(children[parent], pid)
		}
	}
	found := slices.Clone(children[ancestor])
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i]]...)
	}
	return found
}

// unsteady polls through a server that is killed and started again, now between two polls and now in the middle of one.
type unsteady struct {
	t                         *testing.T
	server                    *sshd
	polls, transient          int
	betweenPolls, duringPolls int
}

func (u *unsteady) until(step func() (bool, error)) {
	u.t.Helper()
	poll(u.t, 2*time.Minute, func() bool {
		done, err := u.disturbed(step)
		if err == nil {
			return done
		}
		if kvm2.ClassOf(err) != kvm2.ClassTransient {
			u.t.Fatal(err)
		}
		u.transient++
		return false
	})
}

// disturbed leaves every third poll alone, so that there is progress.
func (u *unsteady) disturbed(step func() (bool, error)) (done bool, err error) {
	u.polls++
	switch u.polls % 3 {
	case 1:
		u.server.kill(u.t)
		u.server.start(u.t)
		u.betweenPolls++
		return step()
	case 2:
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			done, err = step()
		}()
		u.server.kill(u.t)
		u.server.start(u.t)
		u.duringPolls++
		<-ended
		return done, err
	}
	return step()
}

func TestRealHost_SSHDRestartIsSurvived(t *testing.T) {
	const scope = "kvm2-it-sshd-restart"
	h := withOwnPool(t, testhost.Require(t), scope)
	server := startSSHD(t)
	p := realProvider(t, h, server.uri(""), scope)
	spec := tinySpec(tinyImage(t, idleSector), "web-1")
	id := kvm2.MachineUUID(scope, spec.OwnerUID)
	u := &unsteady{t: t, server: server}

	var m kvm2.Machine
	u.until(func() (running bool, err error) {
		m, err = p.Create(t.Context(), spec)
		return m.State == kvm2.StateRunning, err
	})
	t.Logf("running after %d polls", u.polls)
	seen := 0
	u.until(func() (bool, error) {
		got, err := p.Get(t.Context(), m.ID)
		if err == nil && (got.ID != m.ID || got.State != kvm2.StateRunning) {
			t.Errorf("Get() = %+v, want machine %q running", got, m.ID)
		}
		if err == nil {
			seen++
		}
		return seen >= 4, err
	})
	if got := domainsOf(t, scope); !slices.Equal(got, []string{scope + "-web-1"}) {
		t.Errorf("domains %q, want one", got)
	}
	wantMachineVolumes(t, h, scope, spec)
	u.until(func() (bool, error) { return true, p.Delete(t.Context(), m.ID) })
	if got := domainsOf(t, scope); len(got) != 0 {
		t.Errorf("domains left: %q", got)
	}
	if got := volumesOf(t, h.Pool, scope+"-"+id.String()); len(got) != 0 {
		t.Errorf("volumes left: %q", got)
	}
	t.Logf("%d polls, the server was killed %d times between two and %d times in the middle of one; %d Transient errors", u.polls, u.betweenPolls, u.duringPolls, u.transient)
}

// storm is a number of machines that are created and deleted over and over while something goes wrong with the host.
type storm struct {
	creations, deletions, stopped, transient atomic.Int64
	over                                     chan struct{} // closed when no machine is to be created any more
}

// completed is how many creations and deletions have come to their end.
func (s *storm) completed() int64 { return s.creations.Load() + s.deletions.Load() + s.stopped.Load() }

// machine creates and deletes a machine until the storm is over, and leaves it deleted. A libvirtd that cannot get back to
// an emulator ends it. The machine is then stopped for good, and to replace it is up to the controller.
func (s *storm) machine(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) error {
	var id string
	for {
		end := &s.creations
		err := s.until(ctx, func() (bool, error) {
			m, err := p.Create(ctx, spec)
			if err == nil && id == "" {
				id = m.ID
			}
			if err == nil && (m.ID != id || id == "") {
				return false, fmt.Errorf("the machine's ID is %q, was %q", m.ID, id)
			}
			if m.State == kvm2.StateStopped || m.State == kvm2.StateFailed {
				end = &s.stopped
				return true, err
			}
			return m.State == kvm2.StateRunning, err
		})
		if err != nil {
			return fmt.Errorf("creating %q: %w", spec.Name, err)
		}
		end.Add(1)
		if err := s.until(ctx, func() (bool, error) { return true, p.Delete(ctx, id) }); err != nil {
			return fmt.Errorf("deleting %q: %w", spec.Name, err)
		}
		s.deletions.Add(1)
		select {
		case <-s.over:
			return nil
		default:
		}
	}
}

// until polls until step is done, past Transient errors.
func (s *storm) until(ctx context.Context, step func() (bool, error)) error {
	tick := time.NewTicker(often)
	defer tick.Stop()
	for {
		done, err := step()
		switch {
		case err == nil && done:
			return nil
		case err == nil:
		case kvm2.ClassOf(err) == kvm2.ClassTransient:
			s.transient.Add(1)
		default:
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

func TestRealHost_DaemonKilledTwentyTimes(t *testing.T) {
	const (
		scope    = "kvm2-it-storm"
		kills    = 20
		machines = 6
	)
	h := withOwnPool(t, testhost.Require(t), scope)
	image := tinyImage(t, idleSector)
	t.Cleanup(func() { command(t, "internal/testhost/testhost.sh", "up") }) // also when the test failed between kill and start
	providers := []*kvm2.Provider{realProvider(t, h, h.UnixURI, scope), realProvider(t, h, h.SSHURI, scope)}

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	s := &storm{over: make(chan struct{})}
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel() // a test that fails below ends the machines' polling too
	var names []string
	for i := range machines {
		spec := tinySpec(image, fmt.Sprintf("web-%d", i))
		spec.Disks = nil
		names = append(names, scope+"-"+spec.Name)
		all.Go(func() {
			if err := s.machine(ctx, providers[i%len(providers)], spec); err != nil {
				t.Error(err)
			}
		})
	}
	start := time.Now()
	for range kills {
		before := s.completed() // one end between two kills: the other machines are then anywhere on their way
		poll(t, time.Minute, func() bool { return s.completed() > before || t.Failed() })
		killDaemon(t, h)
		command(t, "internal/testhost/testhost.sh", "up")
		wantOnlyDomains(t, scope, names)
	}
	close(s.over)
	all.Wait()
	t.Logf("%d kills in %s: %d creations, %d machines that libvirtd ended, %d deletions, %d Transient errors",
		kills, time.Since(start).Round(time.Second), s.creations.Load(), s.stopped.Load(), s.deletions.Load(), s.transient.Load())

	if s.creations.Load() < kills/2 {
		t.Errorf("%d creations in %d kills, so the test has shown little", s.creations.Load(), kills)
	}
	if left := domainsOf(t, scope); len(left) != 0 {
		t.Errorf("domains left: %q", left)
	}
	if left := emulatorsOf(scope); len(left) != 0 {
		t.Errorf("emulators left: %q", left)
	}
	for _, v := range volumesOf(t, h.Pool, scope) {
		if !strings.HasPrefix(v, scope+"-image-") {
			t.Errorf("volume %q is left", v)
		}
	}
	wantImageOnHost(t, h, scope, image)
}

// wantOnlyDomains checks that no machine has two domains or two emulators, and that there are no others.
func wantOnlyDomains(t *testing.T, scope string, names []string) {
	t.Helper()
	for what, found := range map[string][]string{"domain": domainsOf(t, scope), "emulator": emulatorsOf(scope)} {
		seen := make(map[string]bool)
		for _, name := range found {
			if seen[name] || !slices.Contains(names, name) {
				t.Errorf("%s of %q is one too many", what, name)
			}
			seen[name] = true
		}
	}
}

// emulatorsOf are the names of the machines of a scope of which an emulator runs, once for each.
func emulatorsOf(scope string) []string {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is good
	var found []string
	for _, path := range paths {
		cmdline, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		if _, rest, ok := strings.Cut(string(cmdline), "guest="+scope+"-"); ok {
			name, _, _ := strings.Cut(rest, ",")
			found = append(found, scope+"-"+name)
		}
	}
	return found
}
