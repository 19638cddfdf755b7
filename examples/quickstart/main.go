// Quickstart shows a machine's whole life: it polls Create until the machine runs and Get until the guest has an
// address, lists what there is, polls Delete until nothing of the machine is left, and makes sure of that.
//
//	go run ./examples/quickstart
//
// does so on an in-memory host, with nothing installed. With -uri, -image and -sha256 it does the same on a libvirt host:
//
//	go run ./examples/quickstart -uri qemu:///system -image debian.qcow2 -sha256 HEX -ssh-key ~/.ssh/id_ed25519.pub
//
// With -check it only looks whether the host can be used.
//
// Ctrl-C deletes the machine before the program ends; a second Ctrl-C ends it at once.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2"
)

// The exit codes.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130 // what a shell reports of a process that Ctrl-C ended
)

func main() { os.Exit(start(openSite)) }

func start(open func(settings) (*site, error)) int {
	// Who stops reading, as head does, must not end the program before it has deleted the machine.
	signal.Ignore(syscall.SIGPIPE)
	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer release()
	c := command{stdout: os.Stdout, stderr: os.Stderr, release: release, open: open}
	return c.run(ctx, os.Args[1:])
}

// command is the program with what it needs of the world.
type command struct {
	stdout, stderr io.Writer
	release        func() // gives signals back their usual effect
	open           func(settings) (*site, error)
}

// run returns the exit code.
func (c command) run(ctx context.Context, args []string) int {
	s, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		usage(c.stdout)
		return exitDone
	}
	if err != nil {
		return c.misused(err)
	}
	host, err := c.open(s)
	if err != nil {
		return c.misused(err)
	}
	err = c.do(ctx, s, host)
	if closeErr := host.provider.Close(); closeErr != nil {
		explain(c.stderr, closeErr)
		err = errors.Join(err, closeErr)
	}
	switch {
	case err == nil:
		return exitDone
	case ctx.Err() != nil:
		return exitInterrupted
	}
	return exitFailed
}

func (c command) do(ctx context.Context, s settings, host *site) error {
	if !s.check {
		return newLife(s, host, c).run(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	report := host.checker.Check(ctx)
	say(c.stdout, "%s", strings.TrimSuffix(report.String(), "\n"))
	return report.Err()
}

func (c command) misused(err error) int {
	for line := range strings.Lines(err.Error()) {
		say(c.stderr, "quickstart: %s", strings.TrimSuffix(line, "\n"))
	}
	say(c.stderr, "quickstart -h lists the flags")
	return exitUsage
}

// settings are what the flags say.
type settings struct {
	config  kvm2.Config // without a URI: the in-memory host
	spec    kvm2.Spec   // without an image on the in-memory host
	login   bool        // the machine gets a user who can log in
	keep    bool
	check   bool // only look whether the host can be used
	timeout time.Duration
}

// onHost are the flags that mean something only on a real host.
var onHost = map[string]bool{
	"image": true, "sha256": true, "pool": true, "network": true, "domain-type": true, "ssh-key": true, "keep": true,
}

// onMachine are the flags that mean something only where a machine is made.
var onMachine = map[string]bool{
	"image": true, "sha256": true, "ssh-key": true, "name": true, "cpus": true, "memory-mib": true, "disk-gib": true, "keep": true,
}

// inputs are the flags whose values are not settings yet.
type inputs struct {
	image, sha256, sshKey string
	memoryMiB, diskGiB    int64
}

func flags(s *settings, in *inputs) *flag.FlagSet {
	f := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	f.SetOutput(io.Discard) // run reports errors itself
	f.StringVar(&s.config.URI, "uri", "", "libvirt `URI` of the host; without it everything happens on an in-memory host")
	f.StringVar(&s.config.Scope, "scope", "quickstart", "owner of the machine; no other scope's machines are touched")
	f.StringVar(&s.config.Pool, "pool", "default", "storage pool")
	f.StringVar(&s.config.Network, "network", "default", "libvirt network")
	f.StringVar(&s.config.DomainType, "domain-type", "kvm", "kvm, or qemu for plain emulation")
	f.StringVar(&in.image, "image", "", "disk image, qcow2 or raw: a `URL` or a file's path")
	f.StringVar(&in.sha256, "sha256", "", "the image's checksum in `hex`adecimal")
	f.StringVar(&in.sshKey, "ssh-key", "", "`path` of the public key with which user \""+loginUser+"\" may log in")
	f.StringVar(&s.spec.Name, "name", "web-1", "name of the machine, a DNS label")
	f.IntVar(&s.spec.CPUs, "cpus", 2, "virtual CPUs")
	f.Int64Var(&in.memoryMiB, "memory-mib", 1024, "memory in MiB")
	f.Int64Var(&in.diskGiB, "disk-gib", 10, "root disk in GiB")
	f.BoolVar(&s.keep, "keep", false, "leave the machine running")
	f.BoolVar(&s.check, "check", false, "only check whether the host can be used; change nothing")
	f.DurationVar(&s.timeout, "timeout", 10*time.Minute, "how long it may take until the machine has an address")
	return f
}

func usage(w io.Writer) {
	f := flags(&settings{}, &inputs{})
	f.SetOutput(w)
	say(w, "quickstart takes a machine through its life: on an in-memory host, or with -uri, -image and -sha256 on yours.")
	f.PrintDefaults()
}

// parse reads the flags. It does not judge what Config and Spec judge themselves.
func parse(args []string) (settings, error) {
	var s settings
	var in inputs
	f := flags(&s, &in)
	if err := f.Parse(args); err != nil {
		return settings{}, err
	}
	if f.NArg() > 0 {
		return settings{}, fmt.Errorf("%q is not a flag", f.Arg(0))
	}
	if s.timeout <= 0 {
		return settings{}, fmt.Errorf("-timeout: %s: want a time above zero", s.timeout)
	}
	if err := checkTogether(f, s, in); err != nil {
		return settings{}, err
	}
	// A controller has the UID of its own object here. This program has none: by the name it finds its machine again.
	s.spec.OwnerUID = s.spec.Name
	s.spec.MemoryBytes = times(in.memoryMiB, 1<<20)
	s.spec.RootDiskBytes = times(in.diskGiB, 1<<30)
	if s.config.URI == "" || s.check {
		return s, nil
	}
	return s, s.addFiles(in)
}

// checkTogether makes sure that the flags make sense with each other.
func checkTogether(f *flag.FlagSet, s settings, in inputs) error {
	if s.config.URI != "" && !s.check && (in.image == "" || in.sha256 == "") {
		return errors.New("-uri needs -image and -sha256: what the machine's disk starts from")
	}
	var errs []error
	f.Visit(func(given *flag.Flag) {
		if s.config.URI == "" && onHost[given.Name] {
			errs = append(errs, fmt.Errorf("-%s needs -uri: without that there is no real host", given.Name))
		}
		if s.check && onMachine[given.Name] {
			errs = append(errs, fmt.Errorf("-%s does not go with -check: no machine is made", given.Name))
		}
	})
	return errors.Join(errs...)
}

// times returns n units in bytes. What would overflow becomes the largest number, which Spec.Validate refuses.
func times(n, unit int64) int64 {
	if n > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return n * unit
}

// addFiles adds the image and the key.
func (s *settings) addFiles(in inputs) error {
	imageURL, err := urlOf(in.image)
	if err != nil {
		return fmt.Errorf("-image: %w", err)
	}
	digest := strings.TrimPrefix(strings.ToLower(in.sha256), "sha256:")
	s.spec.Image = kvm2.Image{URL: imageURL, Checksum: "sha256:" + digest}
	if in.sshKey == "" {
		return nil
	}
	s.spec.UserData, err = userData(in.sshKey)
	if err != nil {
		return fmt.Errorf("-ssh-key: %w", err)
	}
	s.login = true
	return nil
}

// urlOf makes a path a URL.
func urlOf(image string) (string, error) {
	if scheme, _, ok := strings.Cut(image, "://"); ok {
		if !slices.Contains([]string{"http", "https", "file"}, strings.ToLower(scheme)) {
			return "", fmt.Errorf("scheme %q: want http, https, file or a path", scheme)
		}
		return image, nil
	}
	path, err := filepath.Abs(image)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "", err
	}
	return (&url.URL{Scheme: "file", Path: path}).String(), nil
}

// loginUser is who may log in with -ssh-key.
const loginUser = "kvm2"

// userData is a cloud-config with a user who logs in with the public key in a file. JSON is YAML, so nothing needs
// escaping by hand.
func userData(path string) ([]byte, error) {
	content, err := os.ReadFile(path) //nolint:gosec // the user names the file
	if err != nil {
		return nil, err
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey(content)
	if err != nil {
		return nil, fmt.Errorf("%q holds no public key: want the file that ends in .pub", path)
	}
	config, err := json.Marshal(map[string]any{"users": []any{map[string]any{
		"name": loginUser, "sudo": "ALL=(ALL) NOPASSWD:ALL",
		"ssh_authorized_keys": []string{strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))},
	}}})
	if err != nil {
		return nil, err
	}
	return append([]byte("#cloud-config\n"), config...), nil
}

// explain says what an error is, of which class, and what to do.
func explain(w io.Writer, err error) {
	text := strings.ReplaceAll(err.Error(), "\n", "\n       ")
	say(w, "error  %s\nclass  %s\ndo     %s", text, kvm2.ClassOf(err), advice(err))
}

// advice is what a person can do about an error.
func advice(err error) string {
	for _, a := range []struct {
		sentinel error
		do       string
	}{
		{kvm2.ErrImage, "check -image and -sha256"},
		{kvm2.ErrForeignOwner, "it belongs to somebody else and was not touched: choose another -name or -scope"},
		{kvm2.ErrInvalidSpec, "correct the flag that the error names"},
		{kvm2.ErrUnauthorized, "check user and keyfile in -uri; for a local socket be root or in the group libvirt"},
		{kvm2.ErrHostKey, "make sure of the host's key, then put it into known_hosts"},
		{kvm2.ErrUnsupported, "choose what the host can do: -domain-type qemu where it has no KVM"},
	} {
		if errors.Is(err, a.sentinel) {
			return a.do
		}
	}
	switch kvm2.ClassOf(err) {
	case kvm2.ClassQuota:
		return "free space or memory on the host, ask for less, or take another host"
	case kvm2.ClassNotFound:
		return "somebody removed the machine meanwhile: start again"
	case kvm2.ClassPermanent:
		return "correct what the error names; trying again changes nothing"
	case kvm2.ClassNone, kvm2.ClassTransient:
	}
	return "it may get better by itself: start again, perhaps with a longer -timeout"
}
