package kvm2

import (
	"bufio"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvm2/kvm2/internal/sshtest"
)

// use is what a process holds.
type use struct {
	goroutines, fds, tcp int
	heap                 uint64 // bytes, after a collection
}

// heapSlack is what caches of the runtime and the libraries may take; 1,000 leaks of a KiB each are more.
const heapSlack = 1 << 20

func (u use) within(limit use) bool {
	return u.goroutines <= limit.goroutines && u.fds <= limit.fds && u.tcp <= limit.tcp && u.heap <= limit.heap+heapSlack
}

// measureUse also counts the ends of TCP connections of a port, those aside that the kernel keeps after they were
// closed.
func measureUse(t testing.TB, port int) use {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.GC() // what the first one's finalizers let go
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return use{goroutines: runtime.NumGoroutine(), fds: len(fds), tcp: tcpEnds(t, port), heap: m.HeapAlloc}
}

func tcpEnds(t testing.TB, port int) int {
	t.Helper()
	const listening, timeWait = "0A", "06" // include/net/tcp_states.h
	f, err := os.Open("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	ends, suffix := 0, fmt.Sprintf(":%04X", port)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text()) // number, local and remote address, state
		if len(fields) < 4 || fields[3] == listening || fields[3] == timeWait {
			continue
		}
		if strings.HasSuffix(fields[1], suffix) || strings.HasSuffix(fields[2], suffix) {
			ends++
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return ends
}

// answerAll is a daemon that answers every call with eight zero bytes, which is a version.
func (p rpcPeer) answerAll() {
	p.login()
	for {
		procedure, serial, err := p.call()
		if err != nil {
			return
		}
		p.reply(procedure, serial, make([]byte, 8))
	}
}

// connectPeer opens connections to a daemon in this process.
func connectPeer(serve func(rpcPeer)) func(string) (net.Conn, error) {
	return func(string) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer func() { _ = far.Close() }()
			serve(rpcPeer{far})
		}()
		return near, nil
	}
}

func TestDial_ThousandCyclesLeaveNothing(t *testing.T) {
	const cycles, atOnce = 1000, 8
	h := startSSHHost(t, func(c *sshtest.Config) { c.Connect = connectPeer(rpcPeer.answerAll) })
	uri, err := parseURI(h.uri())
	if err != nil {
		t.Fatal(err)
	}
	d := &decorator{next: &libvirtDialer{uri: uri}, host: "kvm-1", timeout: generous, log: slog.New(slog.DiscardHandler)}
	run := func(n int) {
		var wg sync.WaitGroup
		for range atOnce {
			wg.Go(func() {
				for range n / atOnce {
					connectOnce(t, d)
				}
			})
		}
		wg.Wait()
	}
	_, number, _ := net.SplitHostPort(h.server.Addr())
	port, err := strconv.Atoi(number)
	if err != nil {
		t.Fatal(err)
	}
	idle := measureUse(t, port)
	run(5 * atOnce) // what is set up once is set up now
	before := settle(t, port, use{idle.goroutines, idle.fds, idle.tcp, 1 << 40})
	start := time.Now()
	run(cycles)
	took := time.Since(start)
	after := settle(t, port, before)
	t.Logf("%d cycles in %s; before: %+v, after: %+v", cycles, took.Round(time.Millisecond), before, after)
}

// connectOnce connects, makes a call and closes.
func connectOnce(t testing.TB, d *decorator) {
	s, err := d.open(t.Context())
	if err != nil {
		t.Errorf("open() = %v", err)
		return
	}
	if err := s.ping(t.Context()); err != nil {
		t.Errorf("ping() = %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
}

// settle waits until no more is in use than limit, and returns what is. The server's side ends a little later.
func settle(t testing.TB, port int, limit use) use {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		now := measureUse(t, port)
		if now.within(limit) {
			return now
		}
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("in use: %+v, want no more than %+v\n%s", now, limit, stacks[:runtime.Stack(stacks, true)])
		}
	}
}
