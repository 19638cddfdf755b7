//go:build integration

package kvm2

import (
	"context"
	"crypto/rand"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// sparseSource makes the source of pieces of random data, evenly spread.
func (b *transferBench) sparseSource(size, piece int64, pieces int) {
	b.tb.Helper()
	b.fillSource(size, func(f *os.File) error {
		if _, err := io.Copy(f, bootSector()); err != nil {
			return err
		}
		for i := range pieces {
			at := io.NewOffsetWriter(f, (int64(i)*2+1)*size/int64(2*pieces))
			if _, err := io.CopyN(at, rand.Reader, piece); err != nil {
				return err
			}
		}
		return nil
	})
}

// wire is a way to a unix socket that counts what is sent there.
type wire struct {
	sent atomic.Int64
}

// newWire listens at path and passes everything on to the socket, until the test ends.
func newWire(t *testing.T, path, socket string) *wire {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", socket)
			if err != nil {
				_ = near.Close()
				continue
			}
			closeBoth := func() { _, _ = near.Close(), far.Close() }
			stop := context.AfterFunc(ctx, closeBoth)
			all.Go(func() {
				defer stop()
				defer closeBoth()
				_, _ = io.Copy(far, io.TeeReader(near, w))
			})
			all.Go(func() {
				defer closeBoth()
				_, _ = io.Copy(near, far)
			})
		}
	})
	return w
}

func (w *wire) Write(p []byte) (int, error) {
	w.sent.Add(int64(len(p)))
	return len(p), nil
}

func TestRealHost_SparseImageSendsItsDataOnly(t *testing.T) {
	const (
		size   = 10 * gib
		piece  = 2 * mib
		pieces = 100
	)
	b := newTransferBench(t)
	b.sparseSource(size, piece, pieces)
	w := newWire(t, filepath.Join(b.dir, "wire"), b.Socket)
	peak := b.kvm2("qemu+unix:///system?socket=" + filepath.Join(b.dir, "wire"))

	copies, err := filepath.Glob(filepath.Join(b.PoolPath, benchScope+"-image-"+b.digest+"-*"))
	if err != nil || len(copies) != 1 {
		t.Fatalf("the pool has %q, %v; want one copy", copies, err)
	}
	var stat syscall.Stat_t
	if err := syscall.Stat(copies[0], &stat); err != nil {
		t.Fatal(err)
	}
	t.Logf("of %d bytes with %d of data %d were sent and %d are stored; peak memory %d", size, piece*pieces, w.sent.Load(), stat.Blocks*512, peak)
	if sent := w.sent.Load(); sent < piece*pieces || sent > piece*pieces*11/10 {
		t.Errorf("%d bytes were sent for %d of data", sent, piece*pieces)
	}
	if stored := stat.Blocks * 512; stored > piece*pieces*11/10 {
		t.Errorf("%d bytes are stored for %d of data", stored, piece*pieces)
	}
	if got := b.digestOf(copies[0]); got != b.digest {
		t.Errorf("the copy has the digest %s, want %s", got, b.digest)
	}
	if peak > peakLimit {
		t.Errorf("the process took %d bytes of memory, want at most %d", peak, peakLimit)
	}
}

// peakLimit is what a process may take up that does nothing but transfer, however large the image is.
const peakLimit = 64 * mib
