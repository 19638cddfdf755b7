//go:build integration

package kvm2_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/internal/testhost"
)

// anotherProvider is a second process of a scope that a realProvider cleans up.
func anotherProvider(t *testing.T, h testhost.Host, uri, scope string, edit func(*kvm2.Config), opts ...kvm2.Option) *kvm2.Provider {
	t.Helper()
	cfg := kvm2.Config{URI: uri, Scope: scope, Pool: h.Pool, Network: h.Network, DomainType: "qemu"}
	if edit != nil {
		edit(&cfg)
	}
	p, err := kvm2.New(cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeProvider(t, p) })
	return p
}

// wantKeptOnHost prunes and checks that the one image stays for a reason.
func wantKeptOnHost(t *testing.T, p *kvm2.Provider, reason kvm2.KeepReason, users int) {
	t.Helper()
	report, err := p.PruneImages(t.Context(), kvm2.PruneOptions{})
	if err != nil || len(report.Images) != 1 || report.Images[0].Kept != reason || report.Images[0].Users != users {
		t.Errorf("PruneImages() = %+v, %v; want the image kept, %q, with %d users", report, err, reason, users)
	}
}

func TestRealHost_ImageOfAnotherProcessIsWaitedForAndPruned(t *testing.T) {
	h := testhost.Require(t)
	const scope = "kvm2-it-prune"
	images := serveImage(t, h.Image)
	images.hold = make(chan struct{})
	first := realProvider(t, h, h.UnixURI, scope)
	second := anotherProvider(t, h, h.SSHURI, scope, nil)
	spec := realSpec(h, images.URL, "web-1", "owner-1")
	other := realSpec(h, images.URL, "web-2", "owner-2")

	poll(t, time.Minute, func() bool { return creating(t, first, spec).DoneBytes > 1<<20 })
	var last kvm2.ImageProgress
	poll(t, time.Minute, func() bool {
		last = creating(t, second, other)
		return last.Phase == kvm2.ImageWaiting && last.DoneBytes > 1<<20
	})
	t.Logf("the other process sees %+v", last)
	wantKeptOnHost(t, second, kvm2.KeepTransferring, 0)
	close(images.hold)
	m2 := pollUntilRunning(t, second, other)
	m1 := pollUntilRunning(t, first, spec)
	if got := images.requests.Load(); got != 1 {
		t.Errorf("the image was requested %d times, want once", got)
	}
	wantKeptOnHost(t, second, kvm2.KeepInUse, 2)
	pollUntilDeleted(t, first, m1.ID)
	wantKeptOnHost(t, first, kvm2.KeepInUse, 1)
	pollUntilDeleted(t, second, m2.ID)

	report, err := second.PruneImages(t.Context(), kvm2.PruneOptions{})
	if err != nil || len(report.Images) != 1 || len(report.Images[0].Removed) != 2 || report.Images[0].FreedBytes < fileSize(t, h.Image)/2 {
		t.Errorf("PruneImages() = %+v, %v; want both volumes of the image removed", report, err)
	}
	if left := volumesOf(t, h.Pool, scope); len(left) != 0 {
		t.Errorf("volumes left: %q", left)
	}
}

// creating polls once, and returns the image's progress.
func creating(t *testing.T, p *kvm2.Provider, spec kvm2.Spec) kvm2.ImageProgress {
	t.Helper()
	m, err := p.Create(t.Context(), spec)
	if err != nil || m.Image == nil {
		t.Fatalf("Create() = %+v, %v; want it to wait for its image", m, err)
	}
	return *m.Image
}

func TestRealHost_DeadTransferIsTakenOver(t *testing.T) {
	h := testhost.Require(t)
	const scope = "kvm2-it-takeover"
	images := serveImage(t, h.Image)
	_ = realProvider(t, h, h.UnixURI, scope)
	p := anotherProvider(t, h, h.UnixURI, scope, func(c *kvm2.Config) { c.Images.StallTimeout = kvm2.Duration(8 * time.Second) })
	dead := scope + "-image-" + h.ImageSHA256 + "-0123456789abcdef"
	virsh(t, "vol-create-as", h.Pool, dead, "1048576", "--format", "raw")

	m := pollUntilRunning(t, p, realSpec(h, images.URL, "web-1", "owner-1"))
	var names []string
	for _, v := range volumesOf(t, h.Pool, scope) {
		if strings.HasPrefix(v, scope+"-image-") {
			names = append(names, v)
		}
	}
	if len(names) != 2 || names[0] == dead || names[1] == dead {
		t.Errorf("image volumes: %q, want the image's two, without the dead one", names)
	}
	pollUntilDeleted(t, p, m.ID)
}

// meddler has something done before a root disk is made, once.
type meddler struct {
	kvm2.Dialer
	once   *sync.Once
	before func()
}

func (m meddler) Dial(ctx context.Context) (kvm2.Conn, error) {
	conn, err := m.Dialer.Dial(ctx)
	return meddledConn{conn, m}, err
}

type meddledConn struct {
	kvm2.Conn
	meddler meddler
}

func (c meddledConn) CreateVolume(ctx context.Context, pool, xml string) error {
	if strings.Contains(xml, "-root</name>") {
		c.meddler.once.Do(c.meddler.before)
	}
	return c.Conn.CreateVolume(ctx, pool, xml)
}

func TestRealHost_ImageDeletedBeforeTheRootDiskIsFetchedAgain(t *testing.T) {
	h := testhost.Require(t)
	const scope = "kvm2-it-gone"
	images := serveImage(t, h.Image)
	_ = realProvider(t, h, h.UnixURI, scope)
	dialer, err := kvm2.NewDialer(kvm2.Config{URI: h.UnixURI, Scope: scope})
	if err != nil {
		t.Fatal(err)
	}
	deleteData := func() {
		for _, v := range volumesOf(t, h.Pool, scope) {
			if strings.HasPrefix(v, scope+"-image-"+h.ImageSHA256+"-") {
				virsh(t, "vol-delete", v, "--pool", h.Pool)
			}
		}
	}
	p := anotherProvider(t, h, h.UnixURI, scope, nil, kvm2.WithDialer(meddler{dialer, &sync.Once{}, deleteData}))
	spec := realSpec(h, images.URL, "web-1", "owner-1")
	var m kvm2.Machine
	conflicts := 0
	poll(t, 2*time.Minute, func() bool {
		m, err = p.Create(t.Context(), spec)
		if err != nil {
			conflicts++
			if kvm2.ClassOf(err) != kvm2.ClassTransient {
				t.Fatalf("Create() = %v", err)
			}
			t.Logf("Create() = %v", err)
		}
		return err == nil && m.State == kvm2.StateRunning
	})
	if got := images.requests.Load(); got != 2 || conflicts != 1 {
		t.Errorf("the image was requested %d times, Create failed %d times; want it fetched again after one failure", got, conflicts)
	}
	pollUntilDeleted(t, p, m.ID)
}
