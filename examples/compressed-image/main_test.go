package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

func Example() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Println(err)
	}
	// Unordered output:
	// xz: Running
	// zst: Running
}

// prepared is a Provider on a host of its own.
func prepared(t *testing.T, opts ...kvm2.Option) (*fake.Host, *kvm2.Provider) {
	t.Helper()
	host := fake.NewHost()
	p, err := kvm2.New(kvm2.Config{URI: "qemu:///system", Scope: "example"}, append(opts, kvm2.WithDialer(host))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return host, p
}

func spec(image kvm2.Image) kvm2.Spec {
	return kvm2.Spec{Name: "a", OwnerUID: "a", Image: image, CPUs: 1, MemoryBytes: 1 << 30, RootDiskBytes: 1 << 30}
}

func TestDecompressors_PublishWhatWasPacked(t *testing.T) {
	for name, pack := range packers {
		t.Run(name, func(t *testing.T) {
			image, err := writeImage(filepath.Join(t.TempDir(), "disk.raw."+name), pack)
			if err != nil {
				t.Fatal(err)
			}
			host, p := prepared(t, decompressors()...)
			if _, err := create(t.Context(), p, spec(image)); err != nil {
				t.Fatal(err)
			}
			want := make([]byte, 4<<20)
			want[510], want[511] = 0x55, 0xaa
			var data string
			for _, v := range host.Volumes("default") {
				if strings.HasPrefix(v.Name, "example-image-") && v.Format == "raw" {
					data = v.Name
				}
			}
			if data == "" || !bytes.Equal(host.VolumeBytes("default", data), want) {
				t.Errorf("the image's volume is %q and holds something else", data)
			}
		})
	}
}

func TestDecompressors_AreNeeded(t *testing.T) {
	for name, pack := range packers {
		t.Run(name, func(t *testing.T) {
			image, err := writeImage(filepath.Join(t.TempDir(), "disk.raw."+name), pack)
			if err != nil {
				t.Fatal(err)
			}
			_, p := prepared(t)
			_, err = create(t.Context(), p, spec(image))
			if !errors.Is(err, kvm2.ErrImage) || !strings.Contains(fmt.Sprint(err), "WithDecompressor") {
				t.Errorf("Create() = %v, want ErrImage that names the way out", err)
			}
		})
	}
}

func TestDecompressors_DamagedFilesAreRefused(t *testing.T) {
	for name, pack := range packers {
		t.Run(name, func(t *testing.T) {
			damaged := func(w io.Writer) (io.WriteCloser, error) { return pack(&flip{w: w}) }
			image, err := writeImage(filepath.Join(t.TempDir(), "disk.raw."+name), damaged)
			if err != nil {
				t.Fatal(err)
			}
			_, p := prepared(t, decompressors()...)
			_, err = create(t.Context(), p, spec(image))
			if !errors.Is(err, kvm2.ErrImage) || !strings.Contains(fmt.Sprint(err), "cannot be decompressed") {
				t.Errorf("Create() = %v, want ErrImage: it cannot be decompressed", err)
			}
		})
	}
}

// flip damages one byte behind the magic.
type flip struct {
	w io.Writer
	n int
}

func (f *flip) Write(p []byte) (int, error) {
	const at = 40
	q := bytes.Clone(p)
	if i := at - f.n; i >= 0 && i < len(q) {
		q[i] ^= 0xff
	}
	f.n += len(p)
	return f.w.Write(q)
}
