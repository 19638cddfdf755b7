//go:build integration

package kvm2_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

// foreignMachine is a domain that somebody else made. It runs, so that nothing can be done to it unnoticed.
type foreignMachine struct {
	name     string
	uuid     kvm2.UUID
	metadata string // kvm2's element, or none
}

func (f foreignMachine) start(t *testing.T) {
	t.Helper()
	xml := fmt.Sprintf(`<domain type='qemu'>
  <name>%s</name>
  <uuid>%s</uuid>
  <metadata>%s</metadata>
  <memory unit='MiB'>32</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><controller type='usb' model='none'/><memballoon model='none'/></devices>
</domain>`, f.name, f.uuid, f.metadata)
	path := filepath.Join(t.TempDir(), "domain.xml")
	if err := os.WriteFile(path, []byte(xml), 0o600); err != nil {
		t.Fatal(err)
	}
	virsh(t, "define", path)
	virsh(t, "start", f.name)
}

// portrait is all that libvirt says of a domain, running and stored.
func portrait(t *testing.T, domain string) string {
	t.Helper()
	return virsh(t, "dumpxml", domain) + virsh(t, "dumpxml", domain, "--inactive") +
		virsh(t, "domstate", domain, "--reason") + virsh(t, "domid", domain)
}

// metadataElement is kvm2's element as it stands in a domain.
func metadataElement(version int, scope, owner string) string {
	return fmt.Sprintf(`<kvm2:machine xmlns:kvm2=%q version="%d" scope=%q owner=%q name="web-1" phase="started" created="2026-01-01T00:00:00Z" spec="0" pool="default"/>`,
		kvm2.MetadataNamespace, version, scope, owner)
}

func TestRealHost_ForeignDomainIsLeftAlone(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { foreignDomains(t, h, uri, "kvm2-it-guard-"+name) })
	}
}

func foreignDomains(t *testing.T, h testhost.Host, uri, scope string) {
	h = withOwnPool(t, h, scope)
	p := realProvider(t, h, uri, scope)
	spec := tinySpec(tinyImage(t, idleSector), "web-1")
	uuid := kvm2.MachineUUID(scope, spec.OwnerUID)
	wanted := scope + "-web-1"
	stranger := kvm2.MachineUUID("elsewhere", "somebody")
	tests := []struct {
		name    string
		foreign foreignMachine
		// byUUID: it has the machine's UUID, so Get and Delete meet it too. Otherwise the machine does not exist.
		byUUID bool
		// unlisted: List reports neither it nor an error.
		unlisted bool
		listed   string // the owner of the machine that List has
		why      string
	}{
		{
			name: "name without metadata", foreign: foreignMachine{wanted, stranger, ""}, unlisted: true,
			why: "a prefix of a name proves nothing",
		},
		{
			name:    "name of another scope",
			foreign: foreignMachine{wanted, kvm2.MachineUUID("other", "o"), metadataElement(1, "other", "o")}, unlisted: true,
		},
		{
			name:    "name of another owner",
			foreign: foreignMachine{wanted, kvm2.MachineUUID(scope, "o"), metadataElement(1, scope, "o")}, listed: "o",
			why: "it is a machine of the scope, only not this one",
		},
		{
			name: "UUID without metadata", foreign: foreignMachine{wanted, uuid, ""}, byUUID: true,
			why: "libvirt drops metadata when somebody redefines a domain: its volumes still say whose it is",
		},
		{
			name: "UUID under another name", foreign: foreignMachine{scope + "-other", uuid, ""}, byUUID: true,
		},
		{
			name: "UUID with another scope's metadata", foreign: foreignMachine{wanted, uuid, metadataElement(1, "other", "o")}, byUUID: true,
		},
		{
			name: "UUID with another machine's metadata", foreign: foreignMachine{wanted, uuid, metadataElement(1, scope, "o")}, byUUID: true,
			why: "a clone keeps the metadata of what it was cloned from",
		},
		{
			name: "UUID with metadata that cannot be read", foreign: foreignMachine{wanted, uuid, metadataElement(0, scope, spec.OwnerUID)}, byUUID: true,
			why: "List must not pass over what may be ours",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Cleanup(func() { removeScope(t, h.Pool, scope) })
			tt.foreign.start(t)
			if tt.byUUID {
				virsh(t, "vol-create-as", h.Pool, scope+"-"+uuid.String()+"-root", "1MiB")
			}
			before, volumes := portrait(t, tt.foreign.name), volumesOf(t, h.Pool, scope)

			m, err := p.Create(t.Context(), spec)
			wantForeignOwner(t, "Create", err)
			_, getErr := p.Get(t.Context(), m.ID)
			delErr := p.Delete(t.Context(), m.ID)
			if tt.byUUID {
				wantForeignOwner(t, "Get", getErr)
				wantForeignOwner(t, "Delete", delErr)
			} else if !errors.Is(getErr, kvm2.ErrNotFound) || delErr != nil {
				t.Errorf("Get() = %v, Delete() = %v; want ErrNotFound and nil: the machine does not exist", getErr, delErr)
			}
			wantList(t, p, tt.unlisted, tt.listed)

			if diff := cmp.Diff(before, portrait(t, tt.foreign.name)); diff != "" {
				t.Errorf("the foreign domain was touched (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(volumes, volumesOf(t, h.Pool, scope)); diff != "" {
				t.Errorf("volumes came or went (-before +after):\n%s", diff)
			}
			if t.Failed() && tt.why != "" {
				t.Log(tt.why)
			}
		})
	}
}

func wantForeignOwner(t *testing.T, call string, err error) {
	t.Helper()
	if !errors.Is(err, kvm2.ErrForeignOwner) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
		t.Errorf("%s() = %v, want Permanent ErrForeignOwner", call, err)
	}
}

// wantList checks that List has nothing, or the one machine of that owner, or refuses to give less than all.
func wantList(t *testing.T, p *kvm2.Provider, nothing bool, owner string) {
	t.Helper()
	listed, err := p.List(t.Context())
	switch {
	case nothing:
		if err != nil || len(listed) != 0 {
			t.Errorf("List() = %+v, %v; want nothing", listed, err)
		}
	case owner != "":
		if err != nil || len(listed) != 1 || listed[0].OwnerUID != owner {
			t.Errorf("List() = %+v, %v; want the machine of %q", listed, err, owner)
		}
	default:
		wantForeignOwner(t, "List", err)
	}
}

func TestRealHost_MachineOfANewerKVM2IsLeftAlone(t *testing.T) {
	const scope = "kvm2-it-newer"
	h := withOwnPool(t, testhost.Require(t), scope)
	p := realProvider(t, h, h.UnixURI, scope)
	spec := tinySpec(tinyImage(t, idleSector), "web-1")
	m := pollUntilRunning(t, p, spec)
	virsh(t, "metadata", scope+"-web-1", "--uri", kvm2.MetadataNamespace, "--key", "kvm2", "--live", "--config",
		"--set", fmt.Sprintf(`<machine version="2" scope=%q owner="web-1" guard="moved"/>`, scope))
	before, volumes := portrait(t, scope+"-web-1"), volumesOf(t, h.Pool, scope)

	_, err := p.Create(t.Context(), spec)
	wantForeignOwner(t, "Create", err)
	_, err = p.Get(t.Context(), m.ID)
	wantForeignOwner(t, "Get", err)
	wantForeignOwner(t, "Delete", p.Delete(t.Context(), m.ID))
	wantList(t, p, false, "")
	if diff := cmp.Diff(before, portrait(t, scope+"-web-1")); diff != "" {
		t.Errorf("the domain was touched (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(volumes, volumesOf(t, h.Pool, scope)); diff != "" {
		t.Errorf("volumes came or went (-before +after):\n%s", diff)
	}
}

func TestRealHost_RenamedMachineIsInvalidAndCanBeDeleted(t *testing.T) {
	const scope = "kvm2-it-renamed"
	h := withOwnPool(t, testhost.Require(t), scope)
	p := realProvider(t, h, h.UnixURI, scope)
	spec := tinySpec(tinyImage(t, idleSector), "web-1")
	m := pollUntilRunning(t, p, spec)
	virsh(t, "destroy", scope+"-web-1")
	virsh(t, "domrename", scope+"-web-1", scope+"-web-2")
	before := portrait(t, scope+"-web-2")

	_, err := p.Create(t.Context(), spec)
	if !errors.Is(err, kvm2.ErrInvalidSpec) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
		t.Errorf("Create() = %v, want Permanent ErrInvalidSpec", err)
	}
	if diff := cmp.Diff(before, portrait(t, scope+"-web-2")); diff != "" {
		t.Errorf("the domain was touched (-before +after):\n%s", diff)
	}
	pollUntilState(t, p, m.ID, kvm2.StateStopped, "Destroyed")
	wantListed(t, p, m.ID)
	pollUntilDeleted(t, p, m.ID)
	wantNothingLeft(t, h, scope, scope+"-web-2", m.UUID)
}

const racers = 8

func TestRealHost_RacingCreatorsMakeOneMachine(t *testing.T) {
	h := testhost.Require(t)
	for name, uri := range hostURIs(h) {
		t.Run(name, func(t *testing.T) { racingCreators(t, h, uri, "kvm2-it-race-"+name) })
	}
}

func racingCreators(t *testing.T, h testhost.Host, uri, scope string) {
	h = withOwnPool(t, h, scope)
	providers := make([]*kvm2.Provider, racers)
	for i := range providers {
		providers[i] = realProvider(t, h, uri, scope)
	}
	image := tinyImage(t, idleSector)
	for _, tt := range []struct{ name, why string }{
		{"with-the-image", "all transfer the image, and one publishes it"},
		{"without-the-image", "it is there, so all are at the same step at the same time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spec := tinySpec(image, tt.name)
			ids := raceProviders(t, providers, func(p *kvm2.Provider) (string, error) { return createUntilRunning(t.Context(), p, spec) })
			slices.Sort(ids)
			if ids = slices.Compact(ids); len(ids) != 1 {
				t.Fatalf("the creators made %q", ids)
			}
			if got := domainsOf(t, scope); !slices.Equal(got, []string{scope + "-" + tt.name}) {
				t.Errorf("domains %q, want one", got)
			}
			wantMachineVolumes(t, h, scope, spec)
			wantDisksInUse(t, h, scope+"-"+tt.name, 3)
			if stored := virsh(t, "dumpxml", scope+"-"+tt.name, "--inactive"); !strings.Contains(stored, `phase="started"`) {
				t.Errorf("the stored configuration does not say that the machine was started:\n%s", stored)
			}

			raceProviders(t, providers, func(p *kvm2.Provider) (string, error) { return "", deleteUntilGone(t.Context(), p, ids[0]) })
			wantNothingLeft(t, h, scope, scope+"-"+tt.name, kvm2.MachineUUID(scope, spec.OwnerUID))
			if t.Failed() {
				t.Log(tt.why)
			}
		})
	}
	for _, p := range providers {
		if err := p.Close(); err != nil { // which waits for transfers that came too late
			t.Errorf("Close() = %v", err)
		}
	}
	_, digest, _ := strings.Cut(image.Checksum, ":")
	if got := volumesOf(t, h.Pool, scope); len(got) != 2 || got[0] != scope+"-image-"+digest || !strings.HasPrefix(got[1], got[0]+"-") {
		t.Errorf("volumes %q, want the image's pointer and its data", got)
	}
}

// raceProviders runs do with all providers at once.
func raceProviders(t *testing.T, providers []*kvm2.Provider, do func(*kvm2.Provider) (string, error)) []string {
	t.Helper()
	results, errs := make([]string, len(providers)), make([]error, len(providers))
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for i, p := range providers {
		wg.Go(func() {
			<-begin
			results[i], errs[i] = do(p)
		})
	}
	close(begin)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return results
}

// often is how often a racer polls: the more, the closer they come to each other.
const often = 50 * time.Millisecond

func createUntilRunning(ctx context.Context, p *kvm2.Provider, spec kvm2.Spec) (id string, err error) {
	return id, untilDone(ctx, func() (bool, error) {
		m, err := p.Create(ctx, spec)
		id = m.ID
		return m.State == kvm2.StateRunning, err
	})
}

func deleteUntilGone(ctx context.Context, p *kvm2.Provider, id string) error {
	return untilDone(ctx, func() (bool, error) {
		err := p.Delete(ctx, id)
		return err == nil, err
	})
}

// untilDone polls from a goroutine other than the test's. Only Transient errors may be polled away.
func untilDone(ctx context.Context, step func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(often)
	defer tick.Stop()
	for {
		done, err := step()
		if err == nil && done {
			return nil
		}
		if err != nil && kvm2.ClassOf(err) != kvm2.ClassTransient {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// wantMachineVolumes checks that a machine has one volume of each kind.
func wantMachineVolumes(t *testing.T, h testhost.Host, scope string, spec kvm2.Spec) {
	t.Helper()
	prefix := scope + "-" + kvm2.MachineUUID(scope, spec.OwnerUID).String() + "-"
	want := []string{prefix + "root", prefix + "seed"}
	for _, d := range spec.Disks {
		want = append(want, prefix+"disk-"+d.Name)
	}
	slices.Sort(want)
	got := volumesOf(t, h.Pool, strings.TrimSuffix(prefix, "-"))
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the machine's volumes (-want +got):\n%s", diff)
	}
}

// wantDisksInUse checks that the running qemu has the pool's files open, and not some that were replaced under it, and
// sees them in their full size.
func wantDisksInUse(t *testing.T, h testhost.Host, domain string, disks int) {
	t.Helper()
	fds := fmt.Sprintf("/proc/%d/fd", qemuPID(t, domain))
	entries, err := os.ReadDir(fds)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(fds, e.Name()))
		if err == nil && strings.HasPrefix(target, h.PoolPath) && strings.HasSuffix(target, " (deleted)") {
			t.Errorf("the machine runs on a file that is not there any more: %s", target)
		}
	}
	var nodes struct {
		Return []struct {
			File  string `json:"file"`
			Image struct {
				Format      string `json:"format"`
				VirtualSize int64  `json:"virtual-size"`
			} `json:"image"`
		} `json:"return"`
	}
	answer := virsh(t, "qemu-monitor-command", domain, `{"execute":"query-named-block-nodes"}`)
	if err := json.Unmarshal([]byte(answer), &nodes); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	seen := map[string]bool{}
	for _, n := range nodes.Return {
		if n.Image.Format != "file" || strings.Contains(n.File, "-image-") {
			continue
		}
		seen[n.File] = true
		if size := fileSize(t, n.File); strings.HasSuffix(n.File, "-seed") && n.Image.VirtualSize != size {
			t.Errorf("the machine sees %s bytes of %q, which has %d", strconv.FormatInt(n.Image.VirtualSize, 10), n.File, size)
		}
	}
	if len(seen) != disks {
		t.Errorf("the machine has %d disks open, want %d: %v", len(seen), disks, seen)
	}
}
