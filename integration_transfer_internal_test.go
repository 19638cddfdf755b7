//go:build integration

package kvm2

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2/internal/testhost"
)

// The transfer against the tools that people would use instead, in alternating order on one machine: what counts is the
// ratio. kvm2 runs in a process of its own, so that its memory is its own.

const (
	benchScope = "kvm2-it-bench"
	benchBytes = gib
)

// transferBench is a source in memory, a pool in memory, and the ways from one to the other.
type transferBench struct {
	testhost.Host
	tb     testing.TB
	dir    string
	source string
	digest string
	ssh    []string // options of ssh and scp
}

func newTransferBench(tb testing.TB) *transferBench {
	tb.Helper()
	h := testhost.Require(tb)
	b := &transferBench{Host: h, tb: tb, dir: filepath.Join(h.Dir, benchScope)}
	b.undo() // what an interrupted run left
	tb.Cleanup(b.undo)
	if err := os.MkdirAll(b.dir, 0o711); err != nil {
		tb.Fatal(err)
	}
	b.run("mount", "-t", "tmpfs", "-o", "size=2304m,mode=0711", "none", b.dir)
	b.Pool, b.PoolPath = benchScope, filepath.Join(b.dir, "pool")
	if err := os.Mkdir(b.PoolPath, 0o711); err != nil {
		tb.Fatal(err)
	}
	b.manage("pool-create-as", b.Pool, "dir", "--target", b.PoolPath)
	b.source = filepath.Join(b.dir, "source.raw")
	b.ssh = []string{"-F", "none", "-i", h.KeyFile, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=" + h.KnownHosts}
	script := fmt.Sprintf("#!/bin/sh\nexec ssh %s \"$@\"\n", strings.Join(b.ssh, " "))
	if err := os.WriteFile(filepath.Join(b.dir, "ssh"), []byte(script), 0o700); err != nil {
		tb.Fatal(err)
	}
	return b
}

// undo takes away what this run or an interrupted one has made.
func (b *transferBench) undo() {
	_, _ = testhost.Virsh("pool-destroy", benchScope) // fails where there is none
	_ = exec.Command("umount", b.dir).Run()
	_ = os.Remove(b.dir)
}

// bootSector makes a file pass for a raw disk.
func bootSector() io.Reader {
	sector := make([]byte, 512)
	sector[510], sector[511] = 0x55, 0xaa
	return bytes.NewReader(sector)
}

// randomSource makes the source of what cannot be compressed.
func (b *transferBench) randomSource(size int64) {
	b.tb.Helper()
	b.fillSource(size, func(f *os.File) error {
		_, err := io.Copy(f, io.MultiReader(bootSector(), io.LimitReader(rand.Reader, size-512)))
		return err
	})
}

func (b *transferBench) fillSource(size int64, fill func(*os.File) error) {
	b.tb.Helper()
	f, err := os.OpenFile(b.source, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		b.tb.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := errors.Join(f.Truncate(size), fill(f)); err != nil {
		b.tb.Fatal(err)
	}
	b.digest = b.digestOf(b.source)
}

func (b *transferBench) digestOf(path string) string {
	b.tb.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.tb.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		b.tb.Fatal(err)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func (b *transferBench) run(name string, args ...string) {
	b.tb.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		b.tb.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

// manage does with virsh what is not measured.
func (b *transferBench) manage(args ...string) {
	b.tb.Helper()
	if _, err := testhost.Virsh(args...); err != nil {
		b.tb.Fatal(err)
	}
}

// empty removes what a transfer has brought.
func (b *transferBench) empty() {
	b.tb.Helper()
	entries, err := os.ReadDir(b.PoolPath)
	if err != nil {
		b.tb.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(b.PoolPath, e.Name())); err != nil {
			b.tb.Fatal(err)
		}
	}
	b.manage("pool-refresh", b.Pool)
}

// contender is a way to bring the source into the pool. It returns its peak memory where that is known.
type contender struct {
	name string
	move func(*transferBench) (peak int64)
}

func contenders() []contender {
	return []contender{
		{"kvm2-ssh", func(b *transferBench) int64 { return b.kvm2(b.SSHURI) }},
		{"virsh-ssh", func(b *transferBench) int64 {
			return b.virsh("qemu+ssh://root@127.0.0.1:" + strconv.Itoa(b.SSHPort) + "/system?command=" + filepath.Join(b.dir, "ssh"))
		}},
		{"scp", func(b *transferBench) int64 {
			b.run("scp", append(slices.Clone(b.ssh), "-O", "-q", "-P", strconv.Itoa(b.SSHPort), b.source, "root@127.0.0.1:"+filepath.Join(b.PoolPath, "scp"))...)
			return 0
		}},
		{"kvm2-unix", func(b *transferBench) int64 { return b.kvm2(b.UnixURI) }},
		{"virsh-unix", func(b *transferBench) int64 { return b.virsh("qemu:///system") }},
	}
}

func (b *transferBench) virsh(uri string) int64 {
	b.run("virsh", "-q", "-c", uri, "vol-upload", "--pool", b.Pool, "virsh", b.source)
	return 0
}

const transferChildVariable = "KVM2_TRANSFER_CHILD"

func (b *transferBench) kvm2(uri string) int64 {
	b.tb.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestTransferChild$", "-test.v")
	cmd.Env = append(os.Environ(), transferChildVariable+"="+strings.Join([]string{uri, b.Pool, b.source, "sha256:" + b.digest}, "\n"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.tb.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if _, peak, ok := strings.Cut(line, "peak memory: "); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(peak), 10, 64)
			if err != nil {
				b.tb.Fatal(err)
			}
			return n
		}
	}
	b.tb.Fatalf("the child did not tell its peak memory: %s", out)
	return 0
}

// TestTransferChild is what the process of its own does; in any other it has nothing to do.
func TestTransferChild(t *testing.T) {
	task := strings.Split(os.Getenv(transferChildVariable), "\n")
	if len(task) != 4 {
		return
	}
	p, err := New(Config{URI: task[0], Scope: benchScope, Pool: task[1], OvercommitPercent: 1000}) // holes take no space
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	conn, err := p.images.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		_, progress, err := p.images.ensure(t.Context(), conn, Image{URL: "file://" + task[2], Checksum: task[3]})
		if ClassOf(err) > ClassTransient {
			t.Fatal(err)
		}
		if err == nil && progress == nil {
			break
		}
		<-tick.C
	}
	t.Logf("peak memory: %d", peakMemory(t))
}

// peakMemory is the most that this process has had in memory, in bytes.
func peakMemory(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for s := bufio.NewScanner(bytes.NewReader(status)); s.Scan(); {
		var kibibytes int64
		if n, _ := fmt.Sscanf(s.Text(), "VmHWM: %d kB", &kibibytes); n == 1 {
			return kibibytes * kib
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

func BenchmarkRealHost_Transfer(b *testing.B) {
	bench := newTransferBench(b)
	bench.randomSource(benchBytes)
	all := contenders()
	rates, peak := map[string][]float64{}, int64(0)
	for round := 0; b.Loop(); round++ {
		for i := range all {
			c := all[(i+round)%len(all)]
			b.StopTimer()
			bench.empty()
			if strings.HasPrefix(c.name, "virsh") {
				bench.manage("vol-create-as", bench.Pool, "virsh", "0", "--format", "raw")
			}
			b.StartTimer()
			start := time.Now()
			peak = max(peak, c.move(bench))
			rates[c.name] = append(rates[c.name], float64(benchBytes)/time.Since(start).Seconds()/1e6)
		}
	}
	median := func(name string) float64 {
		r := slices.Sorted(slices.Values(rates[name]))
		return (r[(len(r)-1)/2] + r[len(r)/2]) / 2
	}
	for _, c := range all {
		b.ReportMetric(median(c.name), c.name+"-MB/s")
	}
	b.ReportMetric(median("kvm2-ssh")/median("virsh-ssh"), "ssh-ratio")
	b.ReportMetric(median("kvm2-unix")/median("virsh-unix"), "unix-ratio")
	b.ReportMetric(float64(peak)/float64(mib), "peak-MiB")
}
