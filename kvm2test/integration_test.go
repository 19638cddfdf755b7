//go:build integration

package kvm2test_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
	"github.com/kvm2/kvm2/kvm2test"
)

// Both suites run on a real host as they do on the fake, so that the fake cannot drift from it.

func TestRealHost_SeamConforms(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range map[string]string{"unix": h.UnixURI, "ssh": h.SSHURI} {
		t.Run(name, func(t *testing.T) {
			dialer, err := kvm2.NewDialer(kvm2.Config{URI: uri, Scope: "kvm2test"})
			if err != nil {
				t.Fatal(err)
			}
			kvm2test.TestSeam(t, dialer, kvm2test.Caps{Prefix: "kvm2-it-seam", Pool: h.Pool, Network: h.Network})
		})
	}
}

func TestRealHost_ProviderConforms(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range map[string]string{"unix": h.UnixURI, "ssh": h.SSHURI} {
		t.Run(name, func(t *testing.T) {
			cfg := kvm2.Config{URI: uri, Scope: "kvm2-it-contract", Pool: h.Pool, Network: h.Network, DomainType: "qemu"}
			t.Cleanup(func() { removeImages(t, h.Pool, cfg.Scope) })
			kvm2test.TestProvider(t, providerFactory(t, cfg, 100*time.Millisecond))
		})
	}
}

// removeImages removes the scope's cached image, which deleting machines leaves.
func removeImages(t *testing.T, pool, scope string) {
	t.Helper()
	out, err := testhost.Virsh("vol-list", pool)
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) == 0 || !strings.HasPrefix(fields[0], scope+"-") {
			continue
		}
		if _, err := testhost.Virsh("vol-delete", fields[0], pool); err != nil {
			t.Error(err)
		}
	}
}
