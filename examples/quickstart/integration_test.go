//go:build integration

package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvm2/kvm2/internal/testhost"
)

func TestQuickstart_RealHost(t *testing.T) {
	h := testhost.Require(t)
	const scope = "kvm2-it-quickstart"
	t.Cleanup(func() { removeImages(t, h.Pool, scope) })
	args := []string{
		"-uri", h.SSHURI, "-scope", scope, "-pool", h.Pool, "-network", h.Network, "-domain-type", "qemu",
		"-image", h.Image, "-sha256", h.ImageSHA256, "-ssh-key", h.KeyFile + ".pub", "-memory-mib", "512", "-disk-gib", "4",
	}
	var stdout bytes.Buffer
	got := trial{code: command{stdout: &stdout, stderr: os.Stderr, open: openSite}.run(t.Context(), args)}
	got.stdout = stdout.String()
	t.Log(got.stdout)
	got.expect(t, exitDone, got.stdout,
		"state    Running", "login    ssh kvm2@", "web-1  Running", "gone     kvm2://", "get      NotFound", "list     0 machines", "done in ")
	for line := range strings.Lines(virsh(t, "list", "--all", "--name")) {
		if strings.HasPrefix(line, scope+"-") {
			t.Errorf("domain left: %q", line)
		}
	}
}

// removeImages removes the image, and complains about every other volume of the scope.
func removeImages(t *testing.T, pool, scope string) {
	t.Helper()
	for line := range strings.Lines(virsh(t, "vol-list", pool)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || !strings.HasPrefix(fields[0], scope+"-") {
			continue
		}
		if !strings.HasPrefix(fields[0], scope+"-image-") {
			t.Errorf("volume left: %q", fields[0])
		}
		virsh(t, "vol-delete", fields[0], pool)
	}
}

// virsh looks at the host with libvirt's own client, so that kvm2 does not vouch for itself.
func virsh(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("virsh", append([]string{"-q", "-c", "qemu:///system"}, args...)...).CombinedOutput()
	if err != nil {
		t.Errorf("virsh %q: %v: %s", args, err, out)
	}
	return string(out)
}
