package testhost_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvm2/kvm2/internal/testhost"
)

// These tests call only what changes nothing: "up" would turn the machine that runs
// them into a test host.

func TestScript_Parses(t *testing.T) {
	for _, name := range []string{"testhost.sh", "image.sh"} {
		if out, err := exec.Command("bash", "-n", name).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

func TestScript_EnvPrintsTheDescription(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "testhost.json"), []byte("{}\n"))
	if out, err := script(dir, "env").Output(); err != nil || string(out) != "{}\n" {
		t.Errorf("env = %q, %v; want the content of testhost.json", out, err)
	}
}

func TestScript_EnvWithoutHostFails(t *testing.T) {
	out, err := script(t.TempDir(), "env").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "testhost.sh up") {
		t.Errorf("env = %q, %v; want a failure that says to run testhost.sh up", out, err)
	}
}

func TestScript_DownLeavesForeignDirectoriesAlone(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "pool", "kept")
	if err := os.Mkdir(filepath.Dir(kept), 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, kept, nil)
	if out, err := script(dir, "down", "--all").CombinedOutput(); err != nil {
		t.Errorf("down --all: %v\n%s", err, out)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("a file in a directory without the script's mark: %v", err)
	}
}

func TestScript_RefusesBadSettings(t *testing.T) {
	for _, tt := range []struct{ why, setting string }{
		{"it depends on where the script runs", "KVM2_TESTHOST_DIR=var/lib/host"},
		{"it is the whole machine", "KVM2_TESTHOST_DIR=/"},
		{"it leads elsewhere", "KVM2_TESTHOST_DIR=/var/lib/../etc"},
		{"it would need quotes in a configuration file", "KVM2_TESTHOST_DIR=/srv/a b"},
		{"it would end a query parameter of a URI", "KVM2_TESTHOST_DIR=/srv/a&b"},
		{"not a number", "KVM2_TESTHOST_SSH_PORT=ssh"},
		{"four numbers", "KVM2_TESTHOST_SUBNET=192.168.231.0"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			cmd := script("/nonexistent", "env")
			cmd.Env = append(cmd.Env, tt.setting)
			name, _, _ := strings.Cut(tt.setting, "=")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), name+" must be") {
				t.Errorf("%s: %q, %v; want a failure that names the setting", tt.setting, out, err)
			}
		})
	}
}

func TestScript_RefusesUnknownArguments(t *testing.T) {
	for _, args := range [][]string{{"destroy"}, {"down", "all"}, {"env", "--all"}, {"env", "", "x"}} {
		if out, err := script("/nonexistent", args...).CombinedOutput(); err == nil || !strings.Contains(string(out), "usage:") {
			t.Errorf("%q: %q, %v; want a failure that shows the usage", args, out, err)
		}
	}
}

func script(dir string, args ...string) *exec.Cmd {
	cmd := exec.Command("bash", append([]string{"testhost.sh"}, args...)...)
	cmd.Env = append(os.Environ(), testhost.DirVariable+"="+dir)
	return cmd
}
