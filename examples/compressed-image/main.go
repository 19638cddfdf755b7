// The compressed-image program makes machines from images compressed with xz and zstd, which kvm2 leaves to libraries of
// one's choice. It is a module of its own, so that those libraries stay out of kvm2's. The host is the in-memory one.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// decompressors is what it takes: an Option for each format.
func decompressors() []kvm2.Option {
	return []kvm2.Option{
		kvm2.WithDecompressor(kvm2.Decompressor{
			Name:  "xz",
			Magic: []byte("\xfd7zXZ\x00"),
			NewReader: func(file io.Reader) (io.Reader, error) {
				return xz.NewReader(file) // takes as much memory as the file's header says: up to 4 GiB
			},
		}),
		kvm2.WithDecompressor(kvm2.Decompressor{
			Name:  "zstd",
			Magic: []byte("\x28\xb5\x2f\xfd"),
			NewReader: func(file io.Reader) (io.Reader, error) {
				d, err := zstd.NewReader(file, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(256<<20))
				if err != nil {
					return nil, err
				}
				return d.IOReadCloser(), nil
			},
		}),
	}
}

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "compressed-image")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()

	host := fake.NewHost()
	config := kvm2.Config{URI: "qemu:///system", Scope: "example"}
	p, err := kvm2.New(config, append(decompressors(), kvm2.WithDialer(host))...)
	if err != nil {
		return err
	}
	defer func() { _ = p.Close() }()

	for name, pack := range packers {
		image, err := writeImage(filepath.Join(dir, "disk.raw."+name), pack)
		if err != nil {
			return err
		}
		m, err := create(ctx, p, kvm2.Spec{
			Name: name, OwnerUID: "uid-of-" + name, Image: image,
			CPUs: 1, MemoryBytes: 1 << 30, RootDiskBytes: 1 << 30,
		})
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(out, "%s: %s\n", m.Name, m.State)
	}
	return nil
}

// create polls until the machine runs.
func create(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) (kvm2.Machine, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		m, err := p.Create(ctx, spec)
		if err != nil || m.State == kvm2.StateRunning {
			return m, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return m, ctx.Err()
		}
	}
}

// packers compress an image; in earnest somebody else has done that.
var packers = map[string]func(io.Writer) (io.WriteCloser, error){
	"xz":  func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) },
	"zst": func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) },
}

// writeImage writes a compressed disk image, and names it with the checksum of the compressed file.
func writeImage(path string, pack func(io.Writer) (io.WriteCloser, error)) (kvm2.Image, error) {
	disk := make([]byte, 4<<20)
	disk[510], disk[511] = 0x55, 0xaa // with a boot sector it passes for a raw disk image
	var packed bytes.Buffer
	w, err := pack(&packed)
	if err != nil {
		return kvm2.Image{}, err
	}
	_, err = w.Write(disk)
	if err := errors.Join(err, w.Close()); err != nil {
		return kvm2.Image{}, err
	}
	if err := os.WriteFile(path, packed.Bytes(), 0o600); err != nil {
		return kvm2.Image{}, err
	}
	return kvm2.Image{URL: "file://" + path, Checksum: fmt.Sprintf("sha256:%x", sha256.Sum256(packed.Bytes()))}, nil
}
