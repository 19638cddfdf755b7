package fake_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

const images = "/var/lib/libvirt/images/"

func TestCreateVolume_AnswersAsLibvirt(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(*harness)
		xml     string
		code    int
		text    string
	}{
		{"malformed", nil, "<volume><name>v", 35, "(storage_volume_definition):1: "},
		{"other root", nil, "<domain/>", 27, "XML error: expecting root element of 'volume', not 'domain'"},
		{"no name", nil, rawXML("", 0, 0), 27, "XML error: missing volume name element"},
		{"no capacity", nil, "<volume><name>v</name></volume>", 27, "XML error: missing capacity element"},
		{"unit", nil, "<volume><name>v</name><capacity unit='nonsense'>1</capacity></volume>", 8, "invalid argument: unknown suffix 'nonsense'"},
		{"slash", nil, rawXML("a/b", 0, 0), 55, "volume name 'a/b' cannot contain '/'"},
		{"dots", nil, rawXML("..", 0, 0), 55, "volume target path '/var/lib/libvirt/images/..' already exists"},
		{
			"format", nil, "<volume><name>v</name><capacity>0</capacity><target><format type='bogusfmt'/></target></volume>", 67,
			"unsupported configuration: unknown volume format type bogusfmt",
		},
		{"exists", func(h *harness) { h.rawVolume("v", 0) }, rawXML("v", 0, 0), 90, "storage volume 'v' exists already"},
		{
			"unknown file", func(h *harness) { h.host.AddFile("default", "v", nil) }, rawXML("v", 0, 0), 55,
			"volume target path '/var/lib/libvirt/images/v' already exists",
		},
		{"inactive pool", func(h *harness) { h.host.StopPool("default") }, rawXML("v", 0, 0), 55, "storage pool 'default' is not active"},
		{
			"raw overlay", nil, "<volume><name>v</name><capacity>0</capacity><backingStore><path>/x</path></backingStore></volume>", 3,
			"backing storage not supported for raw volumes",
		},
		{
			"no backing file", nil, "<volume><name>v</name><capacity>0</capacity><target><format type='qcow2'/></target><backingStore><path>/srv/none</path></backingStore></volume>", 38,
			"inaccessible backing store volume /srv/none: No such file or directory",
		},
		{
			"raw beyond the file system", nil, "<volume><name>v</name><capacity unit='TiB'>17</capacity><allocation>0</allocation></volume>", 38,
			"cannot extend file '/var/lib/libvirt/images/v': File too large",
		},
		{
			"allocation beyond the pool", func(h *harness) { h.host.FillPool("default", 1<<20) }, rawXML("v", 2<<20, 2<<20), 38,
			"cannot allocate 2097152 bytes in file '/var/lib/libvirt/images/v': No space left on device",
		},
		{
			"qcow2 into a full pool", func(h *harness) { h.host.FillPool("default", 0) },
			"<volume><name>v</name><capacity>1048576</capacity><target><format type='qcow2'/></target></volume>", 1, "Could not write qcow2 header: No space left on device",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t)
			if c.prepare != nil {
				c.prepare(h)
			}
			before := h.host.Dump()
			h.wantAnswer(h.conn.CreateVolume(t.Context(), "default", c.xml), c.code, c.text)
			if after := h.host.Dump(); after != before {
				t.Errorf("it left something:\n%s", after)
			}
		})
	}
}

func TestCreateVolume_OtherFormatsAreUnsupported(t *testing.T) {
	h := newHarness(t)
	err := h.conn.CreateVolume(t.Context(), "default", "<volume><name>v</name><capacity>0</capacity><target><format type='vmdk'/></target></volume>")
	if err == nil || err.Error() != `fake: unsupported: volume format "vmdk"` {
		t.Fatalf("got %v", err)
	}
}

func TestCreateVolume_SizesAsQemuImgMakesThem(t *testing.T) {
	for _, c := range []struct{ capacity, physical, allocated int64 }{
		{10 << 20, 196_616, 200_704},
		{100 << 30, 198_208, 200_704},
	} {
		h := newHarness(t)
		h.qcow2Volume("v", c.capacity, "")
		if v := h.volume("v"); v.PhysicalBytes != c.physical || v.AllocatedBytes != c.allocated || v.CapacityBytes != c.capacity {
			t.Errorf("got %+v, want physical %d, allocated %d", v, c.physical, c.allocated)
		}
	}
}

func TestCreateVolume_CapacityIsRoundedUpToKiB(t *testing.T) {
	h := newHarness(t)
	h.qcow2Volume("v", 1000, "")
	if got := h.volume("v").CapacityBytes; got != 1024 {
		t.Errorf("got %d", got)
	}
}

func TestCreateVolume_OverlayWithoutCapacityTakesThatBelow(t *testing.T) {
	h := newHarness(t)
	h.qcow2Volume("base", 10<<20, "")
	h.must(h.conn.CreateVolume(t.Context(), "default", "<volume><name>v</name><target><format type='qcow2'/></target><backingStore><path>"+images+"base</path></backingStore></volume>"))
	v := h.volume("v")
	if v.CapacityBytes != 10<<20 {
		t.Errorf("got capacity %d", v.CapacityBytes)
	}
	if v.BackingFormat != "raw" {
		t.Errorf("got backing format %q, want raw where the XML names none", v.BackingFormat)
	}
}

func TestCreateVolume_Qcow2IsReal(t *testing.T) {
	h := newHarness(t)
	h.qcow2Volume("base", 10<<20, "")
	h.qcow2Volume("v", 20<<20, images+"base")
	h.must(h.conn.CreateVolume(t.Context(), "default", "<volume><name>old</name><capacity unit='MiB'>1</capacity><target><format type='qcow2'/></target></volume>"))
	for name, version := range map[string]int{"base": 3, "v": 3, "old": 2} {
		header, err := qcow2.ParseHeader(h.host.VolumeBytes("default", name))
		h.must(err)
		if header.Version != version || header.BackingFile != (name == "v") {
			t.Errorf("%s: got %+v, want version %d", name, header, version)
		}
	}
}

// The host's tool, where there is one, is the judge of the images that the fake makes.
func TestCreateVolume_QemuImgReadsThem(t *testing.T) {
	tool, err := exec.LookPath("qemu-img")
	if err != nil {
		t.Logf("not checked: %v", err)
		return
	}
	h := newHarness(t)
	h.qcow2Volume("base", 10<<20, "")
	h.qcow2Volume("v", 20<<20, images+"base")
	dir := t.TempDir()
	for _, name := range []string{"base", "v"} {
		h.must(os.WriteFile(filepath.Join(dir, name), h.host.VolumeBytes("default", name), 0o600))
	}
	out, err := exec.CommandContext(t.Context(), tool, "info", "--output=json", filepath.Join(dir, "v")).CombinedOutput()
	h.must(err)
	for _, want := range []string{`"virtual-size": 20971520`, `"backing-filename": "` + images + `base"`, `"backing-filename-format": "qcow2"`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if out, err := exec.CommandContext(t.Context(), tool, "check", filepath.Join(dir, "base")).CombinedOutput(); err != nil {
		t.Errorf("check: %v\n%s", err, out)
	}
}

func TestRefreshPool_FindsAndForgetsFiles(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("gone", 0)
	h.host.AddFile("default", "found", []byte("hi"))
	h.host.RemoveFile("default", "gone")
	_, err := h.conn.Volume(t.Context(), "default", "found")
	h.wantAnswer(err, 50, "no storage vol with matching name 'found'")
	_, err = h.conn.Volume(t.Context(), "default", "gone")
	h.wantAnswer(err, 50, "no storage vol with matching path '/var/lib/libvirt/images/gone'")
	h.wantAnswer(h.upload("gone", nil), 38, "Unable to open stream for '/var/lib/libvirt/images/gone': No such file or directory")
	h.wantAnswer(h.conn.CreateVolume(t.Context(), "default", rawXML("gone", 0, 0)), 90, "exists already")
	h.must(h.conn.RefreshPool(t.Context(), "default"))
	if v := h.volume("found"); v.PhysicalBytes != 2 || v.AllocatedBytes != 4096 || v.Format != "raw" {
		t.Errorf("got %+v", v)
	}
	names, err := h.conn.VolumeNames(t.Context(), "default")
	h.must(err)
	if len(names) != 1 {
		t.Errorf("got %q, want what was found only", names)
	}
}

func TestDeleteVolume_WithoutItsFileSucceeds(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	h.host.RemoveFile("default", "v")
	h.must(h.conn.DeleteVolume(t.Context(), "default", "v"))
}

func TestPool_InactiveAnswers(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	h.host.StopPool("default")
	if h.pool().Active {
		t.Error("the pool is active")
	}
	const text = "Requested operation is not valid: storage pool 'default' is not active"
	_, err := h.conn.Volume(t.Context(), "default", "v")
	h.wantAnswer(err, 55, text)
	_, err = h.conn.VolumeNames(t.Context(), "default")
	h.wantAnswer(err, 55, text)
	h.wantAnswer(h.conn.DeleteVolume(t.Context(), "default", "v"), 55, text)
	h.wantAnswer(h.conn.RefreshPool(t.Context(), "default"), 55, text)
	h.host.StartPool("default")
	h.volume("v")
}

func TestPool_FiguresAreThoseOfTheLastRefresh(t *testing.T) {
	h := newHarness(t, fake.WithPool("default", 1<<30))
	h.host.FillPool("default", 100<<20)
	if got := h.pool().AvailableBytes; got != 1<<30 {
		t.Errorf("got %d available before the refresh, want %d", got, 1<<30)
	}
	h.must(h.conn.RefreshPool(t.Context(), "default"))
	if p := h.pool(); p.AvailableBytes != 100<<20 || p.AllocatedBytes+p.AvailableBytes != p.CapacityBytes {
		t.Errorf("got %+v after the refresh, want 100 MiB available", p)
	}
	h.host.SetPoolCapacity("default", 2<<30)
	h.must(h.conn.RefreshPool(t.Context(), "default"))
	if got := h.pool().CapacityBytes; got != 2<<30 {
		t.Errorf("got capacity %d", got)
	}
}

func TestPool_DeletedFileTakesSpaceUntilItIsClosed(t *testing.T) {
	h := newHarness(t, fake.WithPool("default", 1<<30))
	h.must(h.conn.CreateVolume(t.Context(), "default", rawXML("v", 1<<20, 1<<20)))
	h.started("d", diskXML(images+"v", "raw"))
	h.must(h.conn.DeleteVolume(t.Context(), "default", "v"))
	if got := h.pool().AvailableBytes; got != 1<<30-1<<20 {
		t.Errorf("got %d available while the guest runs", got)
	}
	h.host.PowerOff("d")
	h.must(h.conn.RefreshPool(t.Context(), "default"))
	if got := h.pool().AvailableBytes; got != 1<<30 {
		t.Errorf("got %d available afterwards", got)
	}
}

func TestUploadVolume_OutOfSpace(t *testing.T) {
	const free = 2 << 20
	for _, c := range []struct {
		name, why string
		packet    int
		send      int
		fails     bool
	}{
		{"in the middle", "the next packet tells", 256 << 10, 3 << 20, true},
		{"in the last packet", "there is no next one", 4 << 20, 3 << 20, false},
		{"in the last small packet", "", 256 << 10, free + 1, false},
		{"fits exactly", "", 256 << 10, free, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Log(c.why)
			h := newHarness(t, fake.WithPool("default", free), fake.WithPacketSize(c.packet))
			h.rawVolume("v", 0)
			content := bytes.Repeat([]byte{1}, c.send)
			if err := h.upload("v", content); c.fails {
				h.wantAnswer(err, 38, "Unable to write /var/lib/libvirt/images/v: No space left on device")
			} else {
				h.must(err)
			}
			if got := h.volume("v").PhysicalBytes; got != free {
				t.Errorf("%d bytes are there, want %d", got, free)
			}
		})
	}
}

func TestUploadVolume_ZerosTakeSpace(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	const size = 64 << 20
	h.must(h.conn.UploadVolume(t.Context(), "default", "v", 0, io.LimitReader(zeros{}, size)))
	if v := h.volume("v"); v.PhysicalBytes != size || v.AllocatedBytes != size {
		t.Errorf("got %+v", v)
	}
}

func TestUploadVolume_GapsTakeNoSpace(t *testing.T) {
	const free = 1 << 20
	h := newHarness(t, fake.WithPool("default", free))
	h.rawVolume("v", 0)
	block := bytes.Repeat([]byte{1}, 4096)
	send := func(offset int64, content []byte) {
		h.must(h.conn.UploadVolume(t.Context(), "default", "v", offset, bytes.NewReader(content)))
	}
	send(0, block)
	send(1<<26, block)
	send(1<<25, block)
	send(1<<25+100, block) // one block more
	if v := h.volume("v"); v.PhysicalBytes != 1<<26+4096 || v.AllocatedBytes != 4*4096 {
		t.Errorf("got %+v, want 4 blocks in a file of 64 MiB", v)
	}
	want := append(bytes.Clone(block), block[:100]...)
	if got := h.host.VolumeBytes("default", "v")[1<<25:][:len(want)]; !bytes.Equal(got, want) {
		t.Error("what was written in the middle is not there")
	}
	send(1<<24, bytes.Repeat(block, free/4096)) // more than is free: what was stored already is no room for it
	if v := h.volume("v"); v.AllocatedBytes != free {
		t.Errorf("got %+v, want all of the file system taken", v)
	}
	send(1<<26, block) // where it takes no more space
	if got := h.host.VolumeBytes("default", "v")[1<<26:]; !bytes.Equal(got, block) {
		t.Error("what takes no more space could not be written")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestUploadVolume_ContentDecidesTheFormat(t *testing.T) {
	image, err := qcow2.MinimalImage(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	h := newHarness(t)
	h.rawVolume("v", 0)
	h.must(h.upload("v", image))
	if v := h.volume("v"); v.Format != "qcow2" || v.CapacityBytes != 64<<20 {
		t.Errorf("got %+v, want qcow2 of 64 MiB", v)
	}
	h.must(h.upload("v", bytes.Repeat([]byte{7}, 512)))
	if v := h.volume("v"); v.Format != "raw" || v.CapacityBytes != int64(len(image)) {
		t.Errorf("got %+v, want raw again", v)
	}
}

func TestUploadVolume_ContextEndsAStuckReader(t *testing.T) {
	h := newHarness(t)
	h.rawVolume("v", 0)
	r, w := io.Pipe()
	defer func() { _ = w.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan struct{})
	go func() {
		defer close(cancelled)
		_, _ = w.Write([]byte("x"))
		cancel()
	}()
	err := h.conn.UploadVolume(ctx, "default", "v", 0, r)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-cancelled
	h.wantLost(h.conn, err)
}

func TestVolume_DamagedHeadersAreRawOrHarmless(t *testing.T) {
	image, err := qcow2.MinimalImage(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func([]byte) []byte{
		"cut off":                  func(b []byte) []byte { return b[:50] },
		"version 9":                func(b []byte) []byte { b[7] = 9; return b },
		"backing name far away":    func(b []byte) []byte { b[8], b[19] = 0xff, 1; return b },
		"backing name too long":    func(b []byte) []byte { b[15], b[16] = 1, 0xff; return b },
		"extensions start far off": func(b []byte) []byte { b[15], b[19], b[100] = 104, 4, 0xff; return b },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.host.AddVolume("default", "v", damage(bytes.Clone(image)))
			h.volume("v")
		})
	}
}

func TestVolumes_ManyPools(t *testing.T) {
	h := newHarness(t, fake.WithPool("fast", 1<<30))
	h.must(h.conn.CreateVolume(t.Context(), "fast", rawXML("v", 0, 0)))
	want := []kvm2.Volume{{Name: "v", Path: "/var/lib/libvirt/pools/fast/v", Format: "raw"}}
	if got := h.host.Volumes("fast"); len(got) != 1 || got[0] != want[0] {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := h.host.Volumes("default"); len(got) != 0 {
		t.Errorf("got %+v in the other pool", got)
	}
}

func TestVolumeBytes_IsACopy(t *testing.T) {
	h := newHarness(t)
	h.host.AddVolume("default", "v", []byte("abc"))
	copy(h.host.VolumeBytes("default", "v"), "xyz")
	if got := string(h.host.VolumeBytes("default", "v")); got != "abc" {
		t.Errorf("got %q", got)
	}
}

func TestDownloadVolume_ReadsAll(t *testing.T) {
	h := newHarness(t, fake.WithPacketSize(1000))
	content := bytes.Repeat([]byte("0123456789"), 12_345)
	h.host.AddVolume("default", "v", content)
	var got bytes.Buffer
	h.must(h.conn.DownloadVolume(t.Context(), "default", "v", &got))
	if !bytes.Equal(got.Bytes(), content) {
		t.Errorf("got %d bytes, want the %d that are there", got.Len(), len(content))
	}
	calls := h.host.Calls()
	if last := calls[len(calls)-1]; last.Bytes != int64(len(content)) || last.SHA256 == "" {
		t.Errorf("got %v in the log", last)
	}
}

func TestDownloadVolume_ContextEndsAStuckWriter(t *testing.T) {
	h := newHarness(t)
	h.host.AddVolume("default", "v", []byte("abc"))
	r, w := io.Pipe()
	defer func() { _ = r.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan struct{})
	go func() {
		defer close(cancelled)
		_, _ = io.ReadFull(r, make([]byte, 1))
		cancel()
	}()
	err := h.conn.DownloadVolume(ctx, "default", "v", w)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-cancelled
	h.wantLost(h.conn, err)
}

func TestDownloadVolume_FaultBeforeItsStartMovesNothing(t *testing.T) {
	h := newHarness(t)
	h.host.AddVolume("default", "v", []byte("abc"))
	h.host.AddFault(fake.Fault{Op: kvm2.OpVolumeDownload, Effect: fake.Drop()})
	var got bytes.Buffer
	h.wantLost(h.conn, h.conn.DownloadVolume(t.Context(), "default", "v", &got))
	if got.Len() != 0 {
		t.Errorf("got %d bytes", got.Len())
	}
}

func TestStartDomain_RelativeBackingPathIsBesideTheOverlay(t *testing.T) {
	h := newHarness(t)
	h.qcow2Volume("base", 1<<20, "")
	h.qcow2Volume("v", 1<<20, "base")
	h.started("d", diskXML(images+"v", "qcow2"))
	h.wantState("d", 1, 1)
}
