package sshdial

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2/internal/sshtest"
)

// shell runs commands as sshd does, with a PATH that has nothing but the programs
// given: name and script.
func shell(t *testing.T, programs map[string]string) func(string, io.Reader, io.Writer, io.Writer) int {
	t.Helper()
	dir := t.TempDir()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	cat, err := exec.LookPath("cat")
	if err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"sh": sh, "cat": cat} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range programs {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!"+sh+"\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return func(command string, in io.Reader, out, stderr io.Writer) int {
		cmd := exec.Command(sh, "-c", command)
		cmd.Env = []string{"PATH=" + dir}
		cmd.Stdout, cmd.Stderr = out, stderr
		stdin, err := cmd.StdinPipe() // Run would wait for the end of the input, also when the command has ended
		if err != nil {
			t.Error(err)
			return -1
		}
		if err := cmd.Start(); err != nil {
			t.Error(err)
			return -1
		}
		go func() {
			_, _ = io.Copy(stdin, in)
			_ = stdin.Close()
		}()
		_ = cmd.Wait()
		return cmd.ProcessState.ExitCode()
	}
}

func listenNothing(t *testing.T) string {
	t.Helper()
	return listenUnix(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
}

func TestDial_CommandIsTheWayWhereSocketsAreNot(t *testing.T) {
	socket := listenNothing(t)
	awkward := filepath.Join(filepath.Dir(socket), "it's; a $(touch x) \"sock\"\n")
	if err := os.Symlink(socket, awkward); err != nil {
		t.Fatal(err)
	}
	const echoAll = "exec cat\n"
	says := func(args string) string { // an echo that first checks how it was called
		return `test "$*" = "` + args + `" || { echo "called with $*" >&2; exit 3; }` + "\nexec cat\n"
	}
	tests := []struct {
		name     string
		programs map[string]string
		commands []Command
		want     string // the one that was used
		why      string
	}{
		{
			name: "helper", programs: map[string]string{"virt-ssh-helper": says("qemu:///system")},
			commands: []Command{HelperCommand("qemu:///system"), NetcatCommand("nc", []string{socket})}, want: "virt-ssh-helper",
		},
		{
			name: "netcat where there is no helper", programs: map[string]string{"nc": "test \"$1\" = -q && { echo invalid >&2; exit 1; }\n" + says("-U "+socket)},
			commands: []Command{HelperCommand("qemu:///system"), NetcatCommand("nc", []string{"/absent", socket})}, want: "nc",
		},
		{
			name:     "netcat that must be told to end with its input",
			programs: map[string]string{"nc": "test $# = 1 && { echo \"nc: option requires an argument -- 'q'\" >&2; exit 1; }\n" + says("-q 0 -U "+socket)},
			commands: []Command{NetcatCommand("nc", []string{socket})}, want: "nc",
		},
		{
			name: "another netcat", programs: map[string]string{"nc.openbsd": echoAll},
			commands: []Command{NetcatCommand("nc.openbsd", []string{socket})}, want: "nc.openbsd",
		},
		{
			name: "path that a shell would take apart", programs: map[string]string{"nc": `test -S "$2" || test $# = 1 || exit 4` + "\nexec cat\n"},
			commands: []Command{NetcatCommand("nc", []string{awkward})}, want: "nc", why: "the path comes from a URI",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config := serverConfig()
			config.Exec = shell(t, test.programs)
			config.Reject = func(string) *ssh.OpenChannelError { return &ssh.OpenChannelError{Reason: ssh.ConnectionFailed} }
			cfg := clientConfig(t, newServer(t, config))
			cfg.Commands = test.commands
			conn, err := Dial(t.Context(), cfg)
			if err != nil {
				t.Fatalf("%v; %s", err, test.why)
			}
			mustEcho(t, conn)
			if got := conn.RemoteAddr().String(); got != test.want {
				t.Errorf("it leads through %q, want %q", got, test.want)
			}
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDial_SocketThatOpensNeedsNoCommand(t *testing.T) {
	config := serverConfig()
	config.Exec = func(string, io.Reader, io.Writer, io.Writer) int {
		t.Error("a command was run")
		return 1
	}
	cfg := clientConfig(t, newServer(t, config))
	cfg.Commands = []Command{HelperCommand("qemu:///system")}
	mustEcho(t, mustDial(t, cfg))
}

func TestDial_WhatShellProfilesSayIsSkipped(t *testing.T) {
	config := serverConfig()
	run := shell(t, map[string]string{"virt-ssh-helper": "exec cat\n"})
	config.Exec = func(command string, in io.Reader, out, stderr io.Writer) int {
		_, _ = io.WriteString(out, "Welcome!\nkvm2-conn\n")
		return run(command, in, out, stderr)
	}
	cfg := clientConfig(t, newServer(t, config))
	cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
	mustEcho(t, mustDial(t, cfg))
}

func TestDial_CommandThatFailsIsACommandError(t *testing.T) {
	tests := []struct {
		name   string
		exec   func(command string, in io.Reader, out, stderr io.Writer) int
		status int
		says   []string
	}{
		{"no sessions", nil, -1, []string{"virt-ssh-helper", "unknown channel type"}},
		{"not there", func(_ string, _ io.Reader, _, stderr io.Writer) int {
			_, _ = io.WriteString(stderr, "sh: not found\n")
			return 127
		}, 127, []string{"virt-ssh-helper", "does not have it", "sh: not found"}},
		{"account without a shell", func(_ string, _ io.Reader, out, _ io.Writer) int {
			_, _ = io.WriteString(out, "This account is currently not available.\n")
			return 1
		}, 1, []string{"exit status 1"}},
		{"something else talks", func(_ string, in io.Reader, out, _ io.Writer) int {
			_, _ = io.Copy(out, strings.NewReader(strings.Repeat("y\n", 1<<20)))
			_, _ = io.Copy(io.Discard, in)
			return 0
		}, -1, []string{"something else answers"}},
		{"much on standard error", func(_ string, _ io.Reader, _, stderr io.Writer) int {
			_, _ = stderr.Write(bytes.Repeat([]byte("x"), 4<<20))
			_, _ = io.WriteString(stderr, "the cause\n")
			return 2
		}, 2, []string{"exit status 2", "xthe cause"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := serverConfig()
				config.Exec = test.exec
				cfg := clientConfig(t, newServer(t, config))
				cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
				_, err := Dial(t.Context(), cfg)
				failed, ok := errors.AsType[*CommandError](err)
				if !ok || failed.Status != test.status {
					t.Fatalf("error %v (%T), want a *CommandError with status %d", err, err, test.status)
				}
				wantText(t, err, test.says...)
				if len(err.Error()) > 2*maxStderr {
					t.Errorf("the error is %d bytes long", len(err.Error()))
				}
			})
		})
	}
}

func TestDial_EveryWayThatFailedIsReported(t *testing.T) {
	for _, reason := range []ssh.RejectionReason{ssh.Prohibited, ssh.ConnectionFailed, ssh.UnknownChannelType} {
		synctest.Test(t, func(t *testing.T) {
			config := serverConfig()
			config.Reject = func(string) *ssh.OpenChannelError { return &ssh.OpenChannelError{Reason: reason} }
			config.Exec = func(string, io.Reader, io.Writer, io.Writer) int { return 127 }
			cfg := clientConfig(t, newServer(t, config))
			cfg.Commands = []Command{HelperCommand("qemu:///system"), NetcatCommand("nc", testSockets)}
			_, err := Dial(t.Context(), cfg)
			noWay, ok := errors.AsType[*NoWayError](err)
			if !ok || len(noWay.Errs) != 3 || !is[*ForwardError](noWay.Errs[0]) {
				t.Fatalf("%v: error %v (%T), want a *NoWayError of three", reason, err, err)
			}
			wantText(t, err, testSockets[0], `"virt-ssh-helper"`, `"nc"`)
		})
	}
}

func TestDial_ServerShortOfResourcesIsNotAskedForMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := serverConfig()
		config.Reject = func(string) *ssh.OpenChannelError { return &ssh.OpenChannelError{Reason: ssh.ResourceShortage} }
		config.Exec = func(string, io.Reader, io.Writer, io.Writer) int {
			t.Error("a command was run")
			return 0
		}
		cfg := clientConfig(t, newServer(t, config))
		cfg.Commands = []Command{HelperCommand("qemu:///system")}
		if _, err := Dial(t.Context(), cfg); !is[*ForwardError](err) {
			t.Errorf("error %v, want a *ForwardError", err)
		}
	})
}

// commandThat serves a helper that is ready and then goes on with rest.
func commandThat(rest func(in io.Reader, out, stderr io.Writer) int) sshtest.Config {
	config := serverConfig()
	config.Exec = func(_ string, in io.Reader, out, stderr io.Writer) int {
		_, _ = io.WriteString(out, ready)
		return rest(in, out, stderr)
	}
	return config
}

func TestConn_CommandThatEndsInErrorSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, commandThat(func(in io.Reader, _, stderr io.Writer) int {
			_, _ = in.Read(make([]byte, 1))
			_, _ = io.WriteString(stderr, "cannot connect to the socket\n")
			return 1
		}))
		cfg := clientConfig(t, server)
		cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
		conn := mustDial(t, cfg)
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		_, err := conn.Read(make([]byte, 1))
		if failed, ok := errors.AsType[*CommandError](err); !ok || failed.Status != 1 {
			t.Fatalf("Read: %v, want a *CommandError with status 1", err)
		}
		wantText(t, err, "cannot connect to the socket")
		_, err = conn.Write([]byte("x"))
		if !is[*CommandError](err) {
			t.Errorf("Write: %v, want a *CommandError", err)
		}
	})
}

func TestConn_CommandThatEndsInSuccessIsEOF(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, commandThat(func(io.Reader, io.Writer, io.Writer) int { return 0 }))
		cfg := clientConfig(t, server)
		cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
		if _, err := mustDial(t, cfg).Read(make([]byte, 1)); err != io.EOF { //nolint:errorlint // io.Reader wants it bare
			t.Errorf("Read: %v, want io.EOF", err)
		}
	})
}

func TestDial_CommandThatSaysNothingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := serverConfig()
		config.Exec = func(_ string, in io.Reader, _, _ io.Writer) int {
			_, _ = io.Copy(io.Discard, in)
			return 0
		}
		cfg := clientConfig(t, newServer(t, config))
		cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
		start := time.Now()
		if _, err := Dial(t.Context(), cfg); !is[*DialError](err) || time.Since(start) != time.Minute {
			t.Errorf("error %v after %v, want a *DialError at the timeout", err, time.Since(start))
		}
	})
}

func TestKeepalive_FrozenHostEndsACommand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, commandThat(func(in io.Reader, out, _ io.Writer) int {
			_, _ = io.Copy(out, in)
			return 0
		}))
		cfg := clientConfig(t, server)
		cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
		cfg.KeepaliveInterval = time.Second
		conn := mustDial(t, cfg)
		mustEcho(t, conn)
		server.Freeze()
		if _, err := conn.Read(make([]byte, 1)); !is[*KeepaliveError](err) {
			t.Errorf("Read: %v, want a *KeepaliveError", err)
		}
	})
}

func TestDial_CommandsLeakNothing(t *testing.T) {
	config := serverConfig()
	config.Exec = shell(t, map[string]string{"virt-ssh-helper": "exec cat\n"})
	cfg := clientConfig(t, newServer(t, config))
	cfg.Sockets, cfg.Commands = nil, []Command{HelperCommand("qemu:///system")}
	cycle := func() {
		conn, err := Dial(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		mustEcho(t, conn)
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	cycle()
	before := currentUsage(t)
	for range 5 {
		cycle()
	}
	wantUsage(t, before)
}
