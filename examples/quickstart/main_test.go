package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// asProgram makes the test binary run as the program itself; hangDelete has its host never answer a destroy.
const (
	asProgram  = "QUICKSTART_TEST_AS_PROGRAM"
	hangDelete = "hang-delete"
)

func TestMain(m *testing.M) {
	switch os.Getenv(asProgram) {
	case "":
		os.Exit(m.Run())
	case hangDelete:
		os.Exit(start(func(s settings) (*site, error) {
			d, err := newDemo()
			if err != nil {
				return nil, err
			}
			d.server.pause = 0
			d.host.AddFault(fake.Fault{Op: kvm2.OpDomainDestroy, Times: fake.Always, Effect: fake.Hang()})
			return d.open(s)
		}))
	default:
		os.Exit(start(openSite))
	}
}

// trial is one run of the command on an in-memory host.
type trial struct {
	demo           *demo
	code           int
	stdout, stderr string
	released       bool
}

// preparation may change the host before the command runs. It returns the context to run in, and who reads along.
type preparation func(context.Context, *demo) (context.Context, io.Writer)

// try runs the command in a bubble, where time passes at once.
func try(t *testing.T, args []string, prepare preparation) trial {
	t.Helper()
	var got trial
	synctest.Test(t, func(t *testing.T) {
		d := mustDemo(t)
		ctx, also := prepare(t.Context(), d)
		var stdout, stderr bytes.Buffer
		c := command{
			stdout: io.MultiWriter(&stdout, also), stderr: io.MultiWriter(&stderr, also),
			release: func() { got.released = true },
			open:    d.open,
		}
		got.code = c.run(ctx, args)
		got.demo, got.stdout, got.stderr = d, stdout.String(), stderr.String()
		if open := d.host.Stats().OpenSessions; open != 0 {
			t.Errorf("%d sessions are still open", open)
		}
		if err := d.host.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return got
}

func mustDemo(t *testing.T) *demo {
	t.Helper()
	d, err := newDemo()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func asItIs(ctx context.Context, _ *demo) (context.Context, io.Writer) { return ctx, io.Discard }

// expect checks the exit code, and that the texts occur in their order.
func (r trial) expect(t *testing.T, code int, output string, texts ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d\nstdout:\n%s\nstderr:\n%s", r.code, code, r.stdout, r.stderr)
	}
	rest := output
	for _, text := range texts {
		_, after, ok := strings.Cut(rest, text)
		if !ok {
			t.Fatalf("%q is missing or out of order in:\n%s", text, output)
		}
		rest = after
	}
}

// expectGone checks that nothing is on the host but so many volumes of the image.
func (r trial) expectGone(t *testing.T, imageVolumes int) {
	t.Helper()
	if domains := r.demo.host.Domains(); len(domains) != 0 {
		t.Errorf("domains left: %v", domains)
	}
	var names []string
	for _, v := range r.demo.host.Volumes("default") {
		names = append(names, v.Name)
	}
	if len(names) != imageVolumes || slices.ContainsFunc(names, func(n string) bool { return !strings.Contains(n, "-image-") }) {
		t.Errorf("volumes left: %q, want %d of the image", names, imageVolumes)
	}
}

func TestRun_BareShowsAWholeLife(t *testing.T) {
	got := try(t, nil, asItIs)
	got.expect(t, exitDone, got.stdout,
		"machine  web-1: 2 CPUs, 1024 MiB memory, 10 GiB disk\n",
		"Create, until the machine runs\n",
		"id       kvm2://fake/",
		"state    Creating\n",
		"image    opening\n",
		"image    transferring [------------]   ",
		"MiB/s\n",
		"image    ready        [############] 100%  8.0/8.0 MiB\n",
		"state    Running (Booted)\n",
		"Get, until the guest has an address\n",
		"address  192.168.122.",
		"List\nNAME   STATE    ADDRESSES ",
		"web-1  Running  192.168.122.",
		"Delete, until nothing is left\n",
		"gone     kvm2://fake/",
		"What is left\n",
		"get      NotFound, as it should be\n",
		"list     0 machines in scope \"quickstart\"\n",
		"host     no domain, and no volumes but the 2 of the cached image\n",
		"done in ",
	)
	if got.stderr != "" {
		t.Errorf("stderr: %q, want nothing", got.stderr)
	}
	got.expectGone(t, 2)
}

func TestRun_BareIsLongEnoughToWatchAndNoLonger(t *testing.T) {
	got := try(t, nil, asItIs)
	if !regexp.MustCompile(`(?m)^done in [23]\.[0-9] s$`).MatchString(got.stdout) {
		t.Errorf("it took another time than 2 to 4 s:\n%s", got.stdout)
	}
}

func TestRun_WithoutATerminalTheTransferIsOneLinePerTenth(t *testing.T) {
	got := try(t, nil, asItIs)
	if n := strings.Count(got.stdout, "image    transferring"); n < 9 || n > 11 {
		t.Errorf("%d lines of transfer, want about ten:\n%s", n, got.stdout)
	}
	if strings.ContainsAny(got.stdout, "\r\x1b") {
		t.Errorf("control characters without a terminal: %q", got.stdout)
	}
}

func TestRun_WrongChecksumFailsAndLeavesNothing(t *testing.T) {
	got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.image.Checksum = "sha256:" + strings.Repeat("0", 64)
		return ctx, io.Discard
	})
	got.expect(t, exitFailed, got.stderr, "error  ", "wrong checksum", "class  Permanent\n", "do     check -image and -sha256\n")
	got.expectGone(t, 0)
}

func TestRun_TransientErrorIsTriedAgain(t *testing.T) {
	for _, op := range []kvm2.Op{
		kvm2.OpDial, kvm2.OpVolumeUpload, kvm2.OpDomainDefine, kvm2.OpDomainAddresses, kvm2.OpDomainList, kvm2.OpDomainUndefine,
	} {
		t.Run(string(op), func(t *testing.T) {
			got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
				d.host.AddFault(fake.Fault{Op: op, Effect: fake.Drop()})
				return ctx, io.Discard
			})
			got.expect(t, exitDone, got.stdout, "retry    in 5s: Transient: ", "\ndone in ")
			got.expectGone(t, 2)
		})
	}
}

func TestRun_QuotaIsWaitedForUntilTheTimeIsUp(t *testing.T) {
	got := try(t, []string{"-timeout", "5m"}, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.host.SetPoolCapacity("default", 1<<30)
		d.host.StopPool("default")
		d.host.StartPool("default")
		return ctx, io.Discard
	})
	got.expect(t, exitFailed, got.stderr, "not done within -timeout 5m", "too little space", "class  Quota\n", "do     free space")
	if n := strings.Count(got.stdout, "retry    in 2m0s: Quota: "); n != 3 {
		t.Errorf("tried %d times, want 3", n)
	}
	got.expectGone(t, 0)
}

func TestRun_NoAddressInTimeFailsAndCleansUp(t *testing.T) {
	got := try(t, []string{"-timeout", "20s"}, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.host = fake.NewHost(fake.WithBootTime(time.Hour))
		return ctx, io.Discard
	})
	got.expect(t, exitFailed, got.stderr, "error  not done within -timeout 20s\n", "class  Transient\n")
	got.expect(t, exitFailed, got.stdout, "state    Running", "gone     kvm2://fake/")
	got.expectGone(t, 2)
}

func TestRun_MachineThatFailsIsNotWaitedFor(t *testing.T) {
	got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		return ctx, when("state    Running", func() { d.host.CrashGuest("quickstart-web-1") })
	})
	got.expect(t, exitFailed, got.stderr, "is Failed (Crashed)\n", "class  Permanent\n")
	got.expectGone(t, 2)
}

func TestRun_ForeignMachineIsNotTouched(t *testing.T) {
	got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.host.AddForeignDomain("quickstart-web-1")
		return ctx, io.Discard
	})
	got.expect(t, exitFailed, got.stderr, "class  Permanent\n", "do     it belongs to somebody else and was not touched")
	if domains := got.demo.host.Domains(); len(domains) != 1 || domains[0].Name != "quickstart-web-1" {
		t.Errorf("domains: %v, want the foreign one as it was", domains)
	}
}

func TestRun_CleanUpThatFailsSaysWhatIsLeft(t *testing.T) {
	got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.host.AddFault(fake.Fault{Op: kvm2.OpDomainUndefine, Times: fake.Always, Effect: fake.Fail(29, "not allowed")})
		return ctx, io.Discard
	})
	got.expect(t, exitFailed, got.stderr, "not allowed", "class  Permanent\n", "left   perhaps kvm2://fake/")
}

func TestRun_InterruptedCleansUp(t *testing.T) {
	for _, c := range []struct {
		at    string
		image int // volumes of the image that stay
		why   string
	}{
		{"state    Creating", 0, "the transfer has just begun"},
		{"transferring [######", 0, "in the middle of the transfer: half an image is no use to anybody"},
		{"state    Running", 2, "the machine runs"},
		{"address  ", 2, "all is there"},
		{"Delete, until", 2, "Delete is cut off by the signal, and goes on afterwards"},
	} {
		t.Run(c.at, func(t *testing.T) {
			got := try(t, nil, func(ctx context.Context, _ *demo) (context.Context, io.Writer) {
				ctx, cancel := context.WithCancel(ctx)
				return ctx, when(c.at, cancel)
			})
			got.expect(t, exitInterrupted, got.stderr, "interrupted: cleaning up")
			got.expect(t, exitInterrupted, got.stdout, c.at, "gone     kvm2://fake/")
			if strings.Contains(got.stderr, "error") {
				t.Errorf("%s: the interruption is reported as an error: %s", c.why, got.stderr)
			}
			if !got.released {
				t.Errorf("%s: a second signal would not end the program", c.why)
			}
			got.expectGone(t, c.image)
		})
	}
}

func TestRun_InterruptedBeforeTheHostWasReachedEndsAtOnce(t *testing.T) {
	got := try(t, nil, func(ctx context.Context, d *demo) (context.Context, io.Writer) {
		d.host.AddFault(fake.Fault{Op: kvm2.OpDial, Times: fake.Always, Effect: fake.Drop()})
		ctx, cancel := context.WithCancel(ctx)
		return ctx, when("retry", cancel)
	})
	got.expect(t, exitInterrupted, got.stderr, "interrupted: cleaning up")
	if strings.Contains(got.stdout, "Delete") {
		t.Errorf("there was nothing to delete:\n%s", got.stdout)
	}
}

// onRealHost are flags that name a host, which in these tests is the in-memory one all the same.
func onRealHost(t *testing.T, more ...string) []string {
	t.Helper()
	return append([]string{"-uri", "qemu:///system", "-image", "https://images.example/a", "-sha256", strings.Repeat("0", 64)}, more...)
}

func TestRun_OnAHostTellsHowToLogIn(t *testing.T) {
	got := try(t, onRealHost(t, "-ssh-key", publicKeyFile(t)), asItIs)
	got.expect(t, exitDone, got.stdout, "login    ssh kvm2@192.168.122.", "gone     ")
	got.expectGone(t, 2)
}

func TestRun_KeepLeavesTheMachineAndTellsHowToDeleteIt(t *testing.T) {
	got := try(t, onRealHost(t, "-keep"), asItIs)
	got.expect(t, exitDone, got.stdout, "login    none: -ssh-key", "The machine is kept\n", "delete   run the same command without -keep\n")
	if domains := got.demo.host.Domains(); len(domains) != 1 || !domains[0].Running {
		t.Errorf("domains: %v, want the machine, running", domains)
	}
}

func TestRun_KeepDoesNotLeaveAnInterruptedMachine(t *testing.T) {
	got := try(t, onRealHost(t, "-keep"), func(ctx context.Context, _ *demo) (context.Context, io.Writer) {
		ctx, cancel := context.WithCancel(ctx)
		return ctx, when("address  ", cancel)
	})
	got.expect(t, exitInterrupted, got.stdout, "gone     ")
	got.expectGone(t, 2)
}

func TestRun_WrongFlagsExitWith2(t *testing.T) {
	private := privateKeyFile(t)
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"unknown", []string{"-nope"}, "flag provided but not defined: -nope"},
		{"no number", []string{"-cpus", "x"}, "-cpus"},
		{"an argument", []string{"web-2"}, `"web-2" is not a flag`},
		{"no time", []string{"-timeout", "0s"}, "-timeout: 0s: want a time above zero"},
		{"host without image", []string{"-uri", "qemu:///system"}, "-uri needs -image and -sha256"},
		{"image without host", []string{"-image", "a"}, "-image needs -uri"},
		{"keep without host", []string{"-keep"}, "-keep needs -uri"},
		{"missing image file", onRealHost(t, "-image", "/does/not/exist"), "-image: stat /does/not/exist"},
		{"missing key file", onRealHost(t, "-ssh-key", "/does/not/exist"), "-ssh-key: open /does/not/exist"},
		{"private key", onRealHost(t, "-ssh-key", private), "holds no public key"},
		{"checksum", onRealHost(t, "-sha256", "12"), "image.checksum"},
		{"image's scheme", onRealHost(t, "-image", "ftp://images.example/a"), `-image: scheme "ftp"`},
		{"host's URI", onRealHost(t, "-uri", "xen:///system"), "uri: scheme"},
		{"scope", []string{"-scope", "A"}, "scope:"},
		{"name", []string{"-name", "a_b"}, "name:"},
		{"too much memory", []string{"-memory-mib", "9223372036854775807"}, "memoryBytes:"},
		{"less than nothing", []string{"-disk-gib", "-9223372036854775808"}, "rootDiskBytes:"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := command{stdout: &stdout, stderr: &stderr, open: openSite}.run(t.Context(), c.args)
			if code != exitUsage || !strings.Contains(stderr.String(), c.want) || stdout.Len() > 0 {
				t.Errorf("exit code %d, stdout %q, stderr %q; want %d and %q in stderr", code, stdout.String(), stderr.String(), exitUsage, c.want)
			}
			if strings.Contains(stderr.String(), "PRIVATE") {
				t.Errorf("a key was printed: %q", stderr.String())
			}
		})
	}
}

func TestRun_HelpIsNoMistake(t *testing.T) {
	var stdout, stderr bytes.Buffer
	code := command{stdout: &stdout, stderr: &stderr, open: openSite}.run(t.Context(), []string{"-h"})
	if code != exitDone || stderr.Len() > 0 || !strings.Contains(stdout.String(), "-memory-mib") {
		t.Errorf("exit code %d, stdout %q, stderr %q; want 0 and the flags", code, stdout.String(), stderr.String())
	}
}

// bars shows what is written of a transfer in which the steps are a second apart.
func bars(t *testing.T, terminal bool, steps []kvm2.ImageProgress) string {
	t.Helper()
	var out bytes.Buffer
	synctest.Test(t, func(*testing.T) {
		s := newScreen(&out)
		s.terminal = terminal
		b := &bar{screen: s}
		for _, p := range steps {
			b.show(p)
			time.Sleep(time.Second) // the bubble's time
		}
		b.finish()
		b.finish() // once more changes nothing
		s.event("state", "Running")
	})
	return out.String()
}

func TestBar_ShowsPhasePercentBytesAndRate(t *testing.T) {
	const mib = 1 << 20
	sending := func(done, total int64) kvm2.ImageProgress {
		return kvm2.ImageProgress{Phase: kvm2.ImageTransferring, DoneBytes: done * mib, TotalBytes: total * mib, Attempt: 1}
	}
	opening := kvm2.ImageProgress{Phase: kvm2.ImageOpening, Attempt: 1}
	for _, c := range []struct {
		name     string
		terminal bool
		steps    []kvm2.ImageProgress
		want     string
	}{
		{
			"terminal", true,
			[]kvm2.ImageProgress{opening, sending(0, 8), sending(4, 8)},
			"\r  0.0s  image    opening\x1b[K" +
				"\r  1.0s  image    transferring [------------]   0%  0.0/8.0 MiB\x1b[K" +
				"\r  2.0s  image    transferring [######------]  50%  4.0/8.0 MiB  4.0 MiB/s\x1b[K" +
				"\r  3.0s  image    ready        [############] 100%  8.0/8.0 MiB\x1b[K\n" +
				"  3.0s  state    Running\n",
		},
		{
			"no terminal: a tenth that has been shown is not shown again", false,
			[]kvm2.ImageProgress{sending(0, 100), sending(10, 100), sending(19, 100), sending(40, 100)},
			"  0.0s  image    transferring [------------]   0%  0.0/100.0 MiB\n" +
				"  1.0s  image    transferring [#-----------]  10%  10.0/100.0 MiB  10.0 MiB/s\n" +
				"  3.0s  image    transferring [####--------]  40%  40.0/100.0 MiB  13.3 MiB/s\n" +
				"  4.0s  image    ready        [############] 100%  100.0/100.0 MiB\n" +
				"  4.0s  state    Running\n",
		},
		{
			"unknown size: no percentage, a line now and then", false,
			[]kvm2.ImageProgress{sending(0, 0), sending(1, 0), sending(2, 0), sending(3, 0), sending(4, 0), sending(5, 0), sending(6, 0)},
			"  0.0s  image    transferring\n" +
				"  5.0s  image    transferring 5.0 MiB  1.0 MiB/s\n" +
				"  7.0s  image    ready        6.0 MiB\n" +
				"  7.0s  state    Running\n",
		},
		{
			"begun anew: the bytes of the time before are not taken for this one's", false,
			[]kvm2.ImageProgress{
				sending(9, 10), {Phase: kvm2.ImageOpening, DoneBytes: 10 * mib, TotalBytes: 10 * mib, Attempt: 2}, sending(0, 10), sending(2, 10),
			},
			"  0.0s  image    transferring [##########--]  90%  9.0/10.0 MiB\n" +
				"  1.0s  image    opening, attempt 2\n" +
				"  2.0s  image    transferring [------------]   0%  0.0/10.0 MiB\n" +
				"  3.0s  image    transferring [##----------]  20%  2.0/10.0 MiB  2.0 MiB/s\n" +
				"  4.0s  image    ready        [############] 100%  10.0/10.0 MiB\n" +
				"  4.0s  state    Running\n",
		},
		{
			"more than its total: the bar does not leave its frame", false,
			[]kvm2.ImageProgress{sending(0, 10), sending(12, 10)},
			"  0.0s  image    transferring [------------]   0%  0.0/10.0 MiB\n" +
				"  1.0s  image    transferring [############] 100%  10.0/10.0 MiB  10.0 MiB/s\n" +
				"  2.0s  image    ready        [############] 100%  10.0/10.0 MiB\n" +
				"  2.0s  state    Running\n",
		},
		{"no transfer: the image was there already", false, nil, "  0.0s  state    Running\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, bars(t, c.terminal, c.steps)); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
}

func TestScreen_AnotherLineEndsTheOpenOne(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out)
	s.redraw("image", "half")
	s.text("text")
	if want := "half\x1b[K\ntext\n"; !strings.HasSuffix(out.String(), want) {
		t.Errorf("output %q, want it to end in %q", out.String(), want)
	}
}

func TestSize_PicksTheUnit(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536 << 10: "1.5 MiB", 5 << 40: "5120.0 GiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestParse_PathBecomesURLAndKeyBecomesUser(t *testing.T) {
	dir := t.TempDir()
	image := filepath.Join(dir, "an image.qcow2")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	key := publicKeyFile(t)
	s, err := parse(onRealHost(t, "-image", image, "-sha256", "SHA256:"+strings.Repeat("AB", 32), "-ssh-key", key))
	if err != nil {
		t.Fatal(err)
	}
	want := kvm2.Image{URL: "file://" + strings.ReplaceAll(image, " ", "%20"), Checksum: "sha256:" + strings.Repeat("ab", 32)}
	if s.spec.Image != want {
		t.Errorf("image %+v, want %+v", s.spec.Image, want)
	}
	if err := s.spec.Validate(); err != nil {
		t.Errorf("Validate() = %v", err)
	}
	checkUserData(t, s.spec.UserData, key)
}

func checkUserData(t *testing.T, data []byte, keyFile string) {
	t.Helper()
	config, ok := bytes.CutPrefix(data, []byte("#cloud-config\n"))
	if !ok {
		t.Fatalf("user-data does not begin with #cloud-config: %q", data)
	}
	var got struct {
		Users []struct {
			Name string
			Sudo string
			Keys []string `json:"ssh_authorized_keys"`
		}
	}
	if err := json.Unmarshal(config, &got); err != nil {
		t.Fatal(err)
	}
	line, err := os.ReadFile(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Users) != 1 || got.Users[0].Name != "kvm2" || got.Users[0].Sudo == "" || len(got.Users[0].Keys) != 1 ||
		!strings.HasPrefix(string(line), got.Users[0].Keys[0]) {
		t.Errorf("users %+v, want kvm2 with sudo and the key", got.Users)
	}
}

func TestSignal_FirstCleansUp(t *testing.T) {
	p := startProgram(t, "yes")
	p.await(t, "state    Creating")
	p.signal(t, os.Interrupt)
	rest := p.end(t)
	if code := p.cmd.ProcessState.ExitCode(); code != exitInterrupted || !strings.Contains(rest, "gone     ") {
		t.Errorf("exit code %d, want %d; output:\n%s", code, exitInterrupted, rest)
	}
}

func TestSignal_TerminationCleansUp(t *testing.T) {
	p := startProgram(t, "yes")
	p.await(t, "state    Creating")
	p.signal(t, syscall.SIGTERM)
	rest := p.end(t)
	if code := p.cmd.ProcessState.ExitCode(); code != exitInterrupted || !strings.Contains(rest, "gone     ") {
		t.Errorf("exit code %d, want %d; output:\n%s", code, exitInterrupted, rest)
	}
}

func TestSignal_SecondEndsAtOnce(t *testing.T) {
	p := startProgram(t, hangDelete)
	p.await(t, "state    Running")
	p.signal(t, os.Interrupt)
	p.await(t, "interrupted")
	p.signal(t, os.Interrupt)
	rest := p.end(t)
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() || status.Signal() != syscall.SIGINT {
		t.Errorf("%s, want the end by the signal; output:\n%s", p.cmd.ProcessState, rest)
	}
}

// program is the program as a process of its own.
type program struct {
	cmd    *exec.Cmd
	output io.Reader
	seen   []byte
}

// startProgram starts the test binary as the program, with both outputs in one pipe.
func startProgram(t *testing.T, as string) *program {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if err := r.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), asProgram+"="+as)
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil { // the child has its own
		t.Fatal(err)
	}
	return &program{cmd: cmd, output: r}
}

// await reads until the text occurs.
func (p *program) await(t *testing.T, text string) {
	t.Helper()
	buffer := make([]byte, 4096)
	for !bytes.Contains(p.seen, []byte(text)) {
		n, err := p.output.Read(buffer)
		p.seen = append(p.seen, buffer[:n]...)
		if err != nil {
			t.Fatalf("waiting for %q: %v; output:\n%s", text, err, p.seen)
		}
	}
}

func (p *program) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// end reads the rest, and waits for the process.
func (p *program) end(t *testing.T) string {
	t.Helper()
	rest, err := io.ReadAll(p.output)
	if err != nil {
		t.Fatalf("reading the rest: %v; output:\n%s", err, rest)
	}
	var exit *exec.ExitError
	if err := p.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(rest)
}

// trigger calls fn once, when the text is written.
type trigger struct {
	text string
	fn   func()
}

func when(text string, fn func()) io.Writer { return &trigger{text, fn} }

func (w *trigger) Write(p []byte) (int, error) {
	if w.fn != nil && bytes.Contains(p, []byte(w.text)) {
		w.fn()
		w.fn = nil
	}
	return len(p), nil
}

func newKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func writeFile(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func publicKeyFile(t *testing.T) string {
	t.Helper()
	key, err := ssh.NewPublicKey(newKey(t).Public())
	if err != nil {
		t.Fatal(err)
	}
	line := fmt.Sprintf("%s somebody@somewhere\n", bytes.TrimSpace(ssh.MarshalAuthorizedKey(key)))
	return writeFile(t, "key.pub", []byte(line))
}

func privateKeyFile(t *testing.T) string {
	t.Helper()
	block, err := ssh.MarshalPrivateKey(newKey(t), "")
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "key", pem.EncodeToMemory(block))
}
