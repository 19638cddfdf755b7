package testhost

import (
	"bytes"
	"fmt"
	"os/exec"
	"time"
)

// Virsh runs a command of virsh on the test host and returns what it printed; the
// error holds that as well. So the host is looked at with libvirt's own client, and
// kvm2 does not vouch for itself.
//
// A pool that is busy is waited for, up to 10 seconds: an upload ends with a refresh
// that goes on after its answer, and until then libvirt refuses to refresh or to
// stop the pool.
func Virsh(args ...string) (string, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for range 100 {
		out, err := exec.Command("virsh", append([]string{"-q", "-c", "qemu:///system"}, args...)...).CombinedOutput()
		switch {
		case err == nil:
			return string(out), nil
		case !bytes.Contains(out, []byte("asynchronous jobs")):
			return string(out), fmt.Errorf("virsh %q: %w: %s", args, err, out)
		}
		<-tick.C
	}
	return "", fmt.Errorf("virsh %q: the pool has been busy for 10 s", args)
}
