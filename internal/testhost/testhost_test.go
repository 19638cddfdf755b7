package testhost_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/testhost"
)

func TestLoad_ReadsWhatTheScriptWrote(t *testing.T) {
	want := testhost.Host{
		Dir:             "/srv/t",
		Pool:            "kvm2-test",
		PoolPath:        "/srv/t/pool",
		Network:         "kvm2-test",
		Subnet:          "192.168.231.0/24",
		UnixURI:         "qemu+unix:///system?socket=/run/s",
		SSHURI:          "qemu+ssh://root@127.0.0.1:22022/system?keyfile=/srv/t/k&socket=/run/s",
		Socket:          "/run/s",
		SSHPort:         22022,
		SSHDPIDFile:     "/srv/t/run/sshd.pid",
		SSHDConfig:      "/srv/t/ssh/sshd_config",
		HostKeyFiles:    []string{"/srv/t/ssh/a", "/srv/t/ssh/b"},
		KeyFile:         "/srv/t/k",
		KnownHosts:      "/srv/t/known_hosts",
		Image:           "/srv/t/image/i.qcow2",
		ImageSHA256:     "00ff",
		ImageSize:       145227776,
		VirtualSize:     2 << 30,
		GuestArch:       "x86_64",
		LibvirtVersion:  "9.0.0",
		QEMUVersion:     "7.2.22",
		LibvirtdPIDFile: "/srv/t/run/libvirtd.pid",
	}
	describe(t, want)
	got, err := testhost.Load()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Load() (-want +got):\n%s", diff)
	}
}

func TestLoad_NoHostSaysHowToMakeOne(t *testing.T) {
	t.Setenv(testhost.DirVariable, t.TempDir())
	_, err := testhost.Load()
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "testhost.sh") {
		t.Errorf("Load() = %v, want an error which is os.ErrNotExist and names testhost.sh", err)
	}
}

func TestLoad_RefusesOtherVersions(t *testing.T) {
	for _, tt := range []struct{ why, text string }{
		{"a field this version does not know", `{"hypervisor": "qemu"}`},
		{"a field of another type", `{"ssh_port": "22022"}`},
		{"cut short", `{"dir": "/srv/t"`},
		{"empty", ``},
	} {
		t.Run(tt.why, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv(testhost.DirVariable, dir)
			writeFile(t, filepath.Join(dir, "testhost.json"), []byte(tt.text))
			if _, err := testhost.Load(); err == nil || !strings.Contains(err.Error(), "testhost.sh again") {
				t.Errorf("Load() = %v, want an error that says to run testhost.sh again", err)
			}
		})
	}
}

// The script and this package have to agree on every name.
func TestHost_HasTheFieldsOfTheScript(t *testing.T) {
	script, err := os.ReadFile("testhost.sh")
	if err != nil {
		t.Fatal(err)
	}
	var written []string
	for _, m := range regexp.MustCompile(`(?m)^\t+  "([a-z0-9_]+)": `).FindAllSubmatch(script, -1) {
		written = append(written, string(m[1]))
	}
	var read []string
	for f := range reflect.TypeFor[testhost.Host]().Fields() {
		read = append(read, f.Tag.Get("json"))
	}
	slices.Sort(written)
	slices.Sort(read)
	if diff := cmp.Diff(written, read); diff != "" {
		t.Errorf("fields (-script +Host):\n%s", diff)
	}
}

func TestRequire_ReturnsAHostThatAnswers(t *testing.T) {
	t.Setenv(testhost.RequireVariable, "1")
	want := listening(t)
	describe(t, want)
	var got testhost.Host
	end := require(t, &got)
	if end != "" {
		t.Fatalf("Require: %s", end)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Require() (-want +got):\n%s", diff)
	}
}

func TestRequire_WithoutHost(t *testing.T) {
	down := listening(t)
	down.Socket += "-gone"
	for _, tt := range []struct {
		why     string
		prepare func(*testing.T)
		setting string
		want    string
	}{
		{"no host: other tests still run", noHost, "", "skipped: "},
		{"no host, where one must be", noHost, "1", "failed: "},
		{"the machine was restarted", func(t *testing.T) { describe(t, down) }, "", "skipped: "},
		{"it was restarted where one must be", func(t *testing.T) { describe(t, down) }, "1", "failed: "},
	} {
		t.Run(tt.why, func(t *testing.T) {
			tt.prepare(t)
			t.Setenv(testhost.RequireVariable, tt.setting)
			end := require(t, new(testhost.Host))
			if !strings.HasPrefix(end, tt.want+t.Name()) || !strings.Contains(end, "testhost.sh") {
				t.Errorf("Require ended with %q, want %q, the test's name and a hint at testhost.sh", end, tt.want)
			}
		})
	}
}

func noHost(t *testing.T) { t.Setenv(testhost.DirVariable, t.TempDir()) }

// listening returns a Host whose libvirtd and sshd are listeners of this test.
func listening(t *testing.T) testhost.Host {
	t.Helper()
	dir, err := os.MkdirTemp("", "testhost") //nolint:usetesting // t.TempDir has the test's name in it; a socket path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h := testhost.Host{Socket: filepath.Join(dir, "sock")}
	unix, err := net.Listen("unix", h.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close() })
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	h.SSHPort = tcp.Addr().(*net.TCPAddr).Port
	return h
}

// describe writes h where Load looks for it.
func describe(t *testing.T, h testhost.Host) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv(testhost.DirVariable, dir)
	text, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "testhost.json"), text)
}

func writeFile(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// require calls Require for a test of the same name and returns how it ended that
// test: "" for not at all.
func require(t *testing.T, h *testhost.Host) string {
	tb := &endings{TB: t}
	func() {
		defer func() {
			if r := recover(); r != nil && r != any(tb) {
				panic(r)
			}
		}()
		*h = testhost.Require(tb)
	}()
	return tb.end
}

// endings records how a test would have ended, and leaves it by a panic, as Goexit
// would end the test that watches.
type endings struct {
	testing.TB
	end string
}

func (e *endings) Skipf(format string, args ...any) { e.leave("skipped: ", format, args) }

func (e *endings) Fatalf(format string, args ...any) { e.leave("failed: ", format, args) }

func (e *endings) leave(how, format string, args []any) {
	e.end = how + fmt.Sprintf(format, args...)
	panic(e)
}
