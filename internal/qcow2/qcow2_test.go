package qcow2_test

import (
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/qcow2"
)

const (
	gib = 1 << 30
	tib = 1 << 40
)

// edit changes the bytes of an image.
type edit func(image []byte)

func set(offset int, content ...byte) edit {
	return func(image []byte) { copy(image[offset:], content) }
}

func set32(offset int, v uint32) edit {
	return set(offset, binary.BigEndian.AppendUint32(nil, v)...)
}

func set64(offset int, v uint64) edit {
	return set(offset, binary.BigEndian.AppendUint64(nil, v)...)
}

// extension writes a header extension of a version 3 image, where the one that ends them is.
func extension(kind uint32, content string) edit {
	b := binary.BigEndian.AppendUint32(nil, kind)
	b = binary.BigEndian.AppendUint32(b, uint32(len(content)))
	return set(104, append(b, content...)...)
}

var version2 = set32(4, 2)

// edited returns a good image of 1 GiB with edits.
func edited(t testing.TB, edits ...edit) []byte {
	t.Helper()
	image, err := qcow2.MinimalImage(gib)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range edits {
		e(image)
	}
	return image
}

func TestParseHeader_ReadsTheFields(t *testing.T) {
	good := qcow2.Header{Version: 3, VirtualSize: gib, ClusterBits: 16, L1Entries: 2}
	with := func(change func(h *qcow2.Header)) qcow2.Header {
		h := good
		change(&h)
		return h
	}
	tests := []struct {
		name  string
		edits []edit
		want  qcow2.Header
		why   string
	}{
		{name: "plain", want: good},
		{name: "version 2", edits: []edit{version2}, want: with(func(h *qcow2.Header) { h.Version = 2 })},
		{
			name: "version 2 has no features", edits: []edit{version2, set64(72, 1<<32)}, why: "extensions begin there",
			want: with(func(h *qcow2.Header) { h.Version = 2 }),
		},
		{name: "backing file", edits: []edit{set64(8, 512)}, want: with(func(h *qcow2.Header) { h.BackingFile = true })},
		{
			name: "backing file behind the header without an extension of type 0", edits: []edit{set64(8, 108), set32(104, 9)},
			want: with(func(h *qcow2.Header) { h.BackingFile = true }),
		},
		{
			name: "external data file, by its feature", edits: []edit{set64(72, 1<<2)},
			want: with(func(h *qcow2.Header) { h.ExternalDataFile, h.IncompatibleFeatures = true, 1<<2 }),
		},
		{
			name: "external data file, by its name", edits: []edit{extension(0x44415441, "/etc/shadow")},
			want: with(func(h *qcow2.Header) { h.ExternalDataFile = true }),
		},
		{
			name: "external data file, raw", edits: []edit{set64(88, 1<<1)},
			want: with(func(h *qcow2.Header) { h.ExternalDataFile = true }),
		},
		{
			name: "name of a data file in version 2", edits: []edit{version2, set(72, []byte("DATA\x00\x00\x00\x01x")...)},
			want: with(func(h *qcow2.Header) { h.Version, h.ExternalDataFile = 2, true }), why: "QEMU reads extensions there too",
		},
		{name: "AES", edits: []edit{set32(32, 1)}, want: with(func(h *qcow2.Header) { h.Encrypted = true })},
		{name: "LUKS", edits: []edit{set32(32, 2)}, want: with(func(h *qcow2.Header) { h.Encrypted = true })},
		{
			name: "LUKS header alone", edits: []edit{extension(0x0537be77, strings.Repeat("\x00", 16))},
			want: with(func(h *qcow2.Header) { h.Encrypted = true }),
		},
		{
			name: "features", edits: []edit{set64(72, 1<<63|1<<1|1)},
			want: with(func(h *qcow2.Header) { h.IncompatibleFeatures = 1<<63 | 1<<1 | 1 }),
		},
		{
			name: "zstd", edits: []edit{set64(72, 1<<3), set32(100, 112), set(104, 1)},
			want: with(func(h *qcow2.Header) { h.IncompatibleFeatures, h.CompressionType = 1<<3, 1 }),
		},
		{
			name: "extended L2 entries", edits: []edit{set64(72, 1<<4), set32(36, 4)}, why: "an entry leads to half as much",
			want: with(func(h *qcow2.Header) { h.IncompatibleFeatures, h.L1Entries = 1<<4, 4 }),
		},
		{
			name: "longer header", edits: []edit{set32(100, 512), set(112, []byte("a field of the future")...)},
			want: good, why: "fields behind the known ones may be ignored",
		},
		{
			name: "other extensions", edits: []edit{extension(0x6803f857, strings.Repeat("feature name", 20))},
			want: good,
		},
		{name: "size 0", edits: []edit{set64(24, 0)}, want: with(func(h *qcow2.Header) { h.VirtualSize = 0 })},
		{name: "snapshots", edits: []edit{set32(60, 2), set64(64, 4<<16)}, want: good},
		{name: "wide reference counts", edits: []edit{set32(96, 6)}, want: good},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := qcow2.ParseHeader(edited(t, tt.edits...))
			if err != nil {
				t.Fatalf("ParseHeader: %v; %s", err, tt.why)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("header differs (-want +got):\n%s%s", diff, tt.why)
			}
		})
	}
}

// wantRefused checks that an error is a refusal for the feature, in a sentence that can be shown to people.
func wantRefused(t *testing.T, err error, feature string) {
	t.Helper()
	refused, ok := errors.AsType[*qcow2.RefusedError](err)
	if !ok {
		t.Fatalf("error is %v, want a RefusedError for %q", err, feature)
	}
	if refused.Feature != feature {
		t.Errorf("refused for %q (%v), want %q", refused.Feature, err, feature)
	}
	if text := err.Error(); !strings.HasPrefix(text, "the ") || strings.ContainsAny(text, "\n%") || strings.HasSuffix(text, ".") {
		t.Errorf("text %q is not a plain sentence", text)
	}
}

func TestParseHeader_RefusesBrokenHeaders(t *testing.T) {
	const l1At, refcountsAt = 40, 48
	tests := []struct {
		name  string
		edits []edit
		want  string // the feature
		why   string
	}{
		{name: "another magic", edits: []edit{set(0, 'X')}, want: "magic"},
		{name: "version 1", edits: []edit{set32(4, 1)}, want: "version"},
		{name: "version 4", edits: []edit{set32(4, 4)}, want: "version"},
		{name: "clusters of 256 bytes", edits: []edit{set32(20, 8)}, want: "cluster size"},
		{name: "clusters of 4 MiB", edits: []edit{set32(20, 22)}, want: "cluster size"},
		{name: "clusters of 2^(2^32-1) bytes", edits: []edit{set32(20, math.MaxUint32)}, want: "cluster size"},
		{
			name: "extended L2 entries in small clusters", want: "cluster size",
			edits: []edit{set64(72, 1<<4), set32(20, 13), set32(36, 1<<20)},
		},
		{name: "header of 96 bytes", edits: []edit{set32(100, 96)}, want: "header length"},
		{name: "header of 108 bytes", edits: []edit{set32(100, 108)}, want: "header length", why: "not a multiple of 8"},
		{name: "header longer than a cluster", edits: []edit{set32(100, 1<<16+8)}, want: "header length"},
		{name: "header longer than the image", edits: []edit{set32(100, math.MaxUint32-7)}, want: "truncated"},
		{name: "reference counts of 128 bits", edits: []edit{set32(96, 7)}, want: "reference counts"},
		{name: "no reference counts", edits: []edit{set32(56, 0)}, want: "reference counts"},
		{name: "reference counts in the header", edits: []edit{set64(refcountsAt, 0)}, want: "reference counts"},
		{name: "reference counts inside a cluster", edits: []edit{set64(refcountsAt, 1<<16+512)}, want: "reference counts"},
		{name: "reference counts at a negative offset", edits: []edit{set64(refcountsAt, 1<<63)}, want: "reference counts"},
		{
			name: "unknown compression", edits: []edit{set64(72, 1<<3), set32(100, 112), set(104, 2)},
			want: "compression type",
		},
		{name: "compression without its feature", edits: []edit{set32(100, 112), set(104, 1)}, want: "compression type"},
		{name: "feature without its compression", edits: []edit{set64(72, 1<<3)}, want: "compression type"},
		{
			name: "compression left out", edits: []edit{set64(72, 1<<3), set(104, 1)}, want: "compression type",
			why: "the header ends before it",
		},
		{name: "negative size", edits: []edit{set64(24, 1<<63)}, want: "virtual size"},
		{name: "L1 table too small", edits: []edit{set32(36, 1)}, want: "L1 table"},
		{name: "L1 table too small by one byte of disk", edits: []edit{set64(24, gib+1)}, want: "L1 table"},
		{name: "no L1 table", edits: []edit{set32(36, 0)}, want: "L1 table"},
		{name: "L1 table too large", edits: []edit{set32(36, 4<<20+1)}, want: "L1 table"},
		{name: "L1 table in the header", edits: []edit{set64(l1At, 0)}, want: "L1 table"},
		{name: "L1 table inside a cluster", edits: []edit{set64(l1At, 3<<16+8)}, want: "L1 table"},
		{name: "L1 table too small for extended entries", edits: []edit{set64(72, 1<<4)}, want: "L1 table"},
		{
			name: "L1 table too small for the largest size", edits: []edit{set64(24, math.MaxInt64), set32(20, 9), set32(36, 4<<20)},
			want: "L1 table",
		},
		{name: "too many snapshots", edits: []edit{set32(60, 65537), set64(64, 1<<16)}, want: "snapshots"},
		{name: "snapshots in the header", edits: []edit{set32(60, 1)}, want: "snapshots"},
		{name: "extension longer than the cluster", edits: []edit{set(104, 1, 2, 3, 4, 0, 1, 0, 0)}, want: "header extensions"},
		{name: "extension of 4 GiB", edits: []edit{set(104, 1, 2, 3, 4, 255, 255, 255, 255)}, want: "header extensions"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, err := qcow2.ParseHeader(edited(t, tt.edits...))
			wantRefused(t, err, tt.want)
			if h != (qcow2.Header{}) {
				t.Errorf("a header came with the error: %+v", h)
			}
		})
	}
}

func TestParseHeader_RefusesWhatIsCutOff(t *testing.T) {
	v3 := edited(t)
	tests := []struct {
		name  string
		image []byte
		want  string
		why   string
	}{
		{name: "nothing", image: nil, want: "magic"},
		{name: "part of the magic", image: v3[:3], want: "magic"},
		{name: "magic alone", image: v3[:4], want: "truncated"},
		{name: "version 2", image: edited(t, version2)[:71], want: "truncated"},
		{name: "version 2 without extensions", image: edited(t, version2)[:72], want: "truncated"},
		{name: "version 3", image: v3[:103], want: "truncated"},
		{name: "version 3 without extensions", image: v3[:104], want: "truncated"},
		{
			name: "in an extension", image: edited(t, extension(0x6803f857, strings.Repeat("x", 500)))[:400], want: "truncated",
			why: "the next one could name a data file",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := qcow2.ParseHeader(tt.image)
			wantRefused(t, err, tt.want)
		})
	}
}

func TestParseHeader_NeedsNoMoreThanHeaderAndExtensions(t *testing.T) {
	whole := edited(t, extension(0x6803f857, "12345678"))
	h, err := qcow2.ParseHeader(whole[:104+8+8+8])
	if err != nil || h.VirtualSize != gib {
		t.Errorf("header %+v, error %v", h, err)
	}
}

func TestHeader_CompatIsLibvirtsWord(t *testing.T) {
	for version, want := range map[int]string{2: "0.10", 3: "1.1"} {
		if got := (qcow2.Header{Version: version}).Compat(); got != want {
			t.Errorf("version %d is %q, want %q", version, got, want)
		}
	}
}

func TestCheckStandalone_AcceptsWholeDisks(t *testing.T) {
	good := qcow2.Header{Version: 3, VirtualSize: gib, ClusterBits: 16, L1Entries: 2}
	tests := []struct {
		name   string
		change func(h *qcow2.Header)
		why    string
	}{
		{name: "plain", change: func(*qcow2.Header) {}},
		{name: "version 2", change: func(h *qcow2.Header) { h.Version = 2 }},
		{
			name: "dirty", change: func(h *qcow2.Header) { h.IncompatibleFeatures = qcow2.FeatureDirty },
			why: "stale reference counts matter only to a writer",
		},
		{name: "compression", change: func(h *qcow2.Header) { h.IncompatibleFeatures = qcow2.FeatureCompressionType }},
		{name: "extended L2 entries", change: func(h *qcow2.Header) { h.IncompatibleFeatures = qcow2.FeatureExtendedL2 }},
		{name: "largest", change: func(h *qcow2.Header) { h.VirtualSize = qcow2.MaxVirtualSize }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := good
			tt.change(&h)
			if err := h.CheckStandalone(); err != nil {
				t.Errorf("refused: %v; %s", err, tt.why)
			}
		})
	}
}

func TestCheckStandalone_Refuses(t *testing.T) {
	tests := []struct {
		name   string
		change func(h *qcow2.Header)
		want   string // the feature
		text   string
	}{
		{
			name: "backing file", change: func(h *qcow2.Header) { h.BackingFile = true }, want: "backing file",
			text: "the image names a backing file: it would let the image read files of the host",
		},
		{
			name: "external data file", change: func(h *qcow2.Header) { h.ExternalDataFile = true }, want: "external data file",
			text: "the image keeps its data in an external file: it would let the image read and write files of the host",
		},
		{
			name: "encryption", change: func(h *qcow2.Header) { h.Encrypted = true }, want: "encryption",
			text: "the image is encrypted: a machine could not read it without a key, and kvm2 has none to give",
		},
		{
			name: "corrupt", change: func(h *qcow2.Header) { h.IncompatibleFeatures = qcow2.FeatureCorrupt | qcow2.FeatureDirty },
			want: "corrupt",
			text: "the image is marked as corrupt: QEMU found its metadata damaged and would not write to it",
		},
		{
			name: "one unknown feature", change: func(h *qcow2.Header) { h.IncompatibleFeatures = 1 << 5 }, want: "unknown features",
			text: "the image needs features that are not known (incompatible feature bit 5): what they make QEMU do cannot be judged",
		},
		{
			name: "unknown features", change: func(h *qcow2.Header) { h.IncompatibleFeatures = 1<<63 | 1<<40 | 1 },
			want: "unknown features",
			text: "the image needs features that are not known (incompatible feature bits 40, 63): " +
				"what they make QEMU do cannot be judged",
		},
		{
			name: "no disk", change: func(h *qcow2.Header) { h.VirtualSize = 0 }, want: "virtual size",
			text: "the image has a virtual size of 0 bytes: there is no disk in it",
		},
		{
			name: "absurd size", change: func(h *qcow2.Header) { h.VirtualSize = 64*tib + 1 }, want: "virtual size",
			text: "the image has a virtual size of 70368744177665 bytes: more than 70368744177664 is taken for damage",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := qcow2.Header{Version: 3, VirtualSize: gib, ClusterBits: 16, L1Entries: 2}
			tt.change(&h)
			err := h.CheckStandalone()
			wantRefused(t, err, tt.want)
			if err.Error() != tt.text {
				t.Errorf("text is %q, want %q", err, tt.text)
			}
		})
	}
}

func TestMinimalImage_StandsOnItsOwn(t *testing.T) {
	for _, size := range []int64{512, 512 << 20, 512<<20 + 512, 10 * gib, 3 * tib, qcow2.MaxVirtualSize} {
		image, err := qcow2.MinimalImage(size)
		if err != nil {
			t.Fatal(err)
		}
		h, err := qcow2.ParseHeader(image)
		if err != nil {
			t.Fatalf("size %d: ParseHeader: %v", size, err)
		}
		if err := h.CheckStandalone(); err != nil {
			t.Errorf("size %d: CheckStandalone: %v", size, err)
		}
		if h.VirtualSize != size || h.Compat() != "1.1" {
			t.Errorf("size %d: header %+v", size, h)
		}
	}
}

func TestMinimalImage_RefusesSizesThatAreNoDisk(t *testing.T) {
	for _, size := range []int64{0, -512, 1, 511, 513, qcow2.MaxVirtualSize + 512, math.MaxInt64} {
		if image, err := qcow2.MinimalImage(size); err == nil || image != nil {
			t.Errorf("size %d: %d bytes, error %v", size, len(image), err)
		}
	}
}

// FuzzParseHeader checks that no bytes make ParseHeader panic, and that what it returns is within the bounds it promises.
func FuzzParseHeader(f *testing.F) {
	for _, edits := range [][]edit{
		nil,
		{version2},
		{set64(8, 512)},
		{set64(72, 1<<3), set32(100, 112), set(104, 1)},
		{set64(72, 1<<4), set32(36, 4)},
		{extension(0x44415441, "/etc/shadow")},
		{extension(0x6803f857, strings.Repeat("x", 100))},
		{set64(24, math.MaxInt64)},
	} {
		f.Add(edited(f, edits...)[:512])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := qcow2.ParseHeader(b)
		if err != nil {
			if _, ok := errors.AsType[*qcow2.RefusedError](err); !ok {
				t.Errorf("error %v is not a RefusedError", err)
			}
			return
		}
		if h.Version != 2 && h.Version != 3 {
			t.Errorf("version %d", h.Version)
		}
		if h.ClusterBits < 9 || h.ClusterBits > 21 {
			t.Errorf("cluster bits %d", h.ClusterBits)
		}
		if h.VirtualSize < 0 {
			t.Errorf("virtual size %d", h.VirtualSize)
		}
		if h.Version == 2 && (h.IncompatibleFeatures != 0 || h.CompressionType != 0) {
			t.Errorf("version 2 with fields of version 3: %+v", h)
		}
		// An L1 entry leads to at most a cluster of 8-byte entries, each of which leads to a cluster.
		covered := float64(h.L1Entries) * math.Exp2(float64(2*h.ClusterBits-3))
		if covered < float64(h.VirtualSize) {
			t.Errorf("%d L1 entries of 2^%d clusters do not cover %d bytes", h.L1Entries, h.ClusterBits, h.VirtualSize)
		}
		if err := h.CheckStandalone(); err != nil {
			return
		}
		if h.BackingFile || h.ExternalDataFile || h.Encrypted || h.VirtualSize == 0 || h.VirtualSize > qcow2.MaxVirtualSize {
			t.Errorf("accepted %+v", h)
		}
	})
}
