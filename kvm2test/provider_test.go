package kvm2test_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
	"github.com/kvm2/kvm2/kvm2test"
)

func TestProvider_ConformsOnTheFake(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(func() { _ = host.Close() })
	kvm2test.TestProvider(t, providerFactory(t, kvm2.Config{URI: "qemu:///system", Scope: "conformance"},
		5*time.Millisecond, kvm2.WithDialer(host)))
	if open := host.Stats().OpenSessions; open != 0 {
		t.Errorf("%d sessions were left open", open)
	}
}

// providerFactory makes providers on the host that cfg names, and machines with a minimal image.
func providerFactory(t *testing.T, cfg kvm2.Config, pollInterval time.Duration, opts ...kvm2.Option) kvm2test.Factory {
	t.Helper()
	image, err := qcow2.MinimalImage(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(image)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "image.qcow2", time.Time{}, bytes.NewReader(image))
	}))
	t.Cleanup(server.Close)
	return kvm2test.Factory{
		Scope: cfg.Scope,
		New: func(t *testing.T, scope string) kvm2test.Provider {
			t.Helper()
			c := cfg
			c.Scope = scope
			p, err := kvm2.New(c, append(opts, kvm2.WithHTTPClient(server.Client()))...)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := p.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
			return p
		},
		Spec: func(name, ownerUID string) kvm2.Spec {
			return kvm2.Spec{
				Name: name, OwnerUID: ownerUID, CPUs: 1, MemoryBytes: 64 << 20, RootDiskBytes: 2 << 20,
				Image:    kvm2.Image{URL: server.URL, Checksum: "sha256:" + hex.EncodeToString(digest[:])},
				Disks:    []kvm2.Disk{{Name: "data", SizeBytes: 1 << 20}},
				UserData: []byte("#cloud-config\n"),
			}
		},
		PollInterval: pollInterval,
		Timeout:      time.Minute,
	}
}
