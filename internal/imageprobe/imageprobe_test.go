package imageprobe_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/imageprobe"
	"github.com/kvm2/kvm2/internal/iso9660"
	"github.com/kvm2/kvm2/internal/qcow2"
)

const gib = 1 << 30

// disk returns the head of a disk without anything on it, with the given bytes put in.
func disk(puts ...put) []byte {
	head := make([]byte, imageprobe.HeadSize)
	for _, p := range puts {
		copy(head[p.offset:], p.content)
	}
	return head
}

type put struct {
	offset  int
	content string
}

var bootSector = put{510, "\x55\xaa"}

// qcow2Image returns an image of 1 GiB with the given bytes put in.
func qcow2Image(t testing.TB, puts ...put) []byte {
	t.Helper()
	image, err := qcow2.MinimalImage(gib)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range puts {
		copy(image[p.offset:], p.content)
	}
	return image[:imageprobe.HeadSize]
}

func TestProbe_AcceptsDiskImages(t *testing.T) {
	tests := []struct {
		name string
		head []byte
		want imageprobe.Info
		why  string
	}{
		{
			name: "qcow2", head: qcow2Image(t),
			want: imageprobe.Info{Format: imageprobe.FormatQCOW2, VirtualSize: gib},
		},
		{
			name: "qcow2 with a boot sector's bytes", head: qcow2Image(t, bootSector),
			want: imageprobe.Info{Format: imageprobe.FormatQCOW2, VirtualSize: gib}, why: "its magic comes first",
		},
		{name: "MBR", head: disk(bootSector), want: imageprobe.Info{Format: imageprobe.FormatRaw}},
		{
			name: "GPT behind a protective MBR", head: disk(bootSector, put{512, "EFI PART"}),
			want: imageprobe.Info{Format: imageprobe.FormatRaw},
		},
		{name: "GPT alone", head: disk(put{512, "EFI PART"}), want: imageprobe.Info{Format: imageprobe.FormatRaw}},
		{
			name: "file system with a boot sector", head: disk(bootSector, put{1080, "\x53\xef"}),
			want: imageprobe.Info{Format: imageprobe.FormatRaw}, why: "a disk may boot without partitions",
		},
		{name: "a boot sector and no more", head: disk(bootSector)[:512], want: imageprobe.Info{Format: imageprobe.FormatRaw}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := imageprobe.Probe(tt.head)
			if err != nil {
				t.Fatalf("Probe: %v; %s", err, tt.why)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("info differs (-want +got):\n%s%s", diff, tt.why)
			}
		})
	}
}

func isoImage(t *testing.T) []byte {
	t.Helper()
	image, err := iso9660.Build("installer", nil)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func TestProbe_RefusesWhatIsKnownByName(t *testing.T) {
	iso := isoImage(t)
	hybrid := bytes.Clone(iso)
	copy(hybrid[510:], bootSector.content)
	tests := []struct {
		name string
		head []byte
		want string // the kind
		why  string
	}{
		{name: "ISO", head: iso, want: "ISO 9660"},
		{name: "hybrid ISO", head: hybrid, want: "ISO 9660", why: "it begins as a disk does"},
		{name: "UDF", head: disk(put{0x8001, "BEA01"}), want: "UDF"},
		{name: "qcow1", head: disk(put{0, "QFI\xfb\x00\x00\x00\x01"}), want: "qcow1"},
		{name: "VMDK", head: disk(put{0, "KDMV"}), want: "VMDK"},
		{name: "VMDK of ESX 3", head: disk(put{0, "COWD"}), want: "VMDK"},
		{name: "VMDK descriptor", head: []byte("# Disk DescriptorFile\nversion=1\n"), want: "VMDK"},
		{name: "VHD", head: disk(put{0, "conectix"}), want: "VHD"},
		{name: "VHDX", head: disk(put{0, "vhdxfile"}), want: "VHDX"},
		{name: "VDI", head: disk(put{0, "<<< Oracle VM VirtualBox Disk Image >>>\n"}, put{64, "\x7f\x10\xda\xbe"}), want: "VDI"},
		{name: "QED", head: disk(put{0, "QED\x00"}), want: "QED"},
		{name: "Parallels", head: disk(put{0, "WithoutFreeSpace"}), want: "Parallels"},
		{name: "Parallels, extended", head: disk(put{0, "WithouFreSpacExt"}), want: "Parallels"},
		{name: "Bochs", head: disk(put{0, "Bochs Virtual HD Image"}), want: "Bochs"},
		{name: "Android", head: disk(put{0, "\x3a\xff\x26\xed"}), want: "Android sparse"},
		{name: "WIM", head: disk(put{0, "MSWIM\x00\x00\x00"}), want: "WIM"},
		{name: "LUKS", head: disk(put{0, "LUKS\xba\xbe"}), want: "LUKS"},
		{name: "gzip", head: disk(put{0, "\x1f\x8b\x08"}), want: "gzip"},
		{name: "bzip2", head: disk(put{0, "BZh91AY&SY"}), want: "bzip2"},
		{name: "xz", head: disk(put{0, "\xfd7zXZ\x00"}), want: "xz"},
		{name: "zstd", head: disk(put{0, "\x28\xb5\x2f\xfd"}), want: "zstd"},
		{name: "lz4", head: disk(put{0, "\x04\x22\x4d\x18"}), want: "lz4"},
		{name: "lzip", head: disk(put{0, "LZIP"}), want: "lzip"},
		{name: "zip", head: disk(put{0, "PK\x03\x04"}), want: "zip"},
		{name: "7z", head: disk(put{0, "7z\xbc\xaf\x27\x1c"}), want: "7z"},
		{name: "OVA", head: disk(put{0, "machine.ovf"}, put{257, "ustar"}), want: "tar (OVA)"},
		{name: "cpio", head: disk(put{0, "070701"}), want: "cpio"},
		{name: "ELF", head: disk(put{0, "\x7fELF"}), want: "ELF"},
		{name: "Linux kernel", head: disk(put{0, "MZ"}, bootSector, put{0x202, "HdrS"}), want: "Linux kernel", why: "it has a boot sector"},
		{name: "EFI program", head: disk(put{0, "MZ"}), want: "PE"},
		{name: "PDF", head: disk(put{0, "%PDF-1.7"}), want: "PDF"},
		{name: "ext4", head: disk(put{1080, "\x53\xef"}), want: "ext4"},
		{name: "XFS", head: disk(put{0, "XFSB\x00"}), want: "XFS"},
		{name: "SquashFS", head: disk(put{0, "hsqs"}), want: "SquashFS"},
		{name: "EROFS", head: disk(put{1024, "\xe2\xe1\xf5\xe0"}), want: "EROFS"},
		{name: "HTML", head: []byte("\n <!DOCTYPE html><html><title>Sign in</title>"), want: "HTML"},
		{name: "HTML in capitals", head: []byte("<HTML><BODY>404</BODY></HTML>"), want: "HTML"},
		{name: "HTML without a frame", head: []byte("<title>404</title>"), want: "HTML"},
		{name: "HTML with a byte order mark", head: []byte("\ufeff<!doctype html>"), want: "HTML"},
		{name: "HTML behind a comment", head: []byte("<!-- proxy -->\n<html>"), want: "HTML"},
		{name: "HTML in Latin-1", head: []byte("<html><body>Zugriff verweigert, gr\xfc\xdfe"), want: "HTML"},
		{name: "XHTML", head: []byte(`<?xml version="1.0"?><!DOCTYPE html>`), want: "HTML"},
		{name: "XML", head: []byte(`<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`), want: "XML"},
		{name: "XML without a declaration", head: []byte(`<domain type="kvm"/>`), want: "XML"},
		{name: "JSON", head: []byte(`{"errors":[{"status":404}]}`), want: "JSON"},
		{name: "JSON list", head: []byte(`[{"status":404}]`), want: "JSON"},
		{name: "Git LFS", head: []byte("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), want: "Git LFS pointer"},
		{name: "text", head: []byte("Not Found\n"), want: "text"},
		{name: "text with bytes of other scripts", head: []byte("не найдено\n"), want: "text"},
		{
			name: "text that ends in half a character", head: bytes.Repeat([]byte("ä"), imageprobe.HeadSize)[:imageprobe.HeadSize-1],
			want: "text", why: "the head ends anywhere",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			info, err := imageprobe.Probe(tt.head)
			refused, ok := errors.AsType[*imageprobe.RefusedError](err)
			if !ok {
				t.Fatalf("Probe returned %+v and %v, want a RefusedError; %s", info, err, tt.why)
			}
			if refused.Kind != tt.want {
				t.Errorf("refused as %q, want %q; %s", refused.Kind, tt.want, tt.why)
			}
			if errors.Is(err, imageprobe.ErrUnrecognised) {
				t.Error("what is known counts as not recognised")
			}
		})
	}
}

func TestProbe_ErrorsSayWhatToDo(t *testing.T) {
	tests := []struct {
		name string
		head []byte
		want string
	}{
		{
			name: "other format", head: disk(put{0, "KDMV"}),
			want: "this is a VMDK image; kvm2 takes qcow2 or raw: convert it with qemu-img convert -O qcow2",
		},
		{
			name: "compressed", head: disk(put{0, "\xfd7zXZ\x00"}),
			want: "this is a file compressed with xz; kvm2 takes qcow2 or raw: decompress it first, or give kvm2 a way to by WithDecompressor",
		},
		{
			name: "archive", head: disk(put{257, "ustar"}),
			want: "this is a tar (OVA) archive; kvm2 takes qcow2 or raw: unpack it and take the disk image inside",
		},
		{
			name: "installer", head: isoImage(t),
			want: "this is an ISO 9660 image; kvm2 takes qcow2 or raw: take the cloud image of the distribution, not its installer",
		},
		{
			name: "document", head: []byte("<html>password=secret</html>"),
			want: "this is an HTML page; kvm2 takes qcow2 or raw: " +
				"perhaps the server answered with a login or error page; check the URL",
		},
		{
			name: "file system", head: disk(put{1080, "\x53\xef"}),
			want: "this is an ext2, ext3 or ext4 file system; kvm2 takes qcow2 or raw: " +
				"a machine boots from a whole disk with a boot loader, not from a file system alone",
		},
		{name: "nothing to do", head: disk(put{0, "\x7fELF"}), want: "this is an ELF program; kvm2 takes qcow2 or raw"},
		{
			name: "empty", head: nil,
			want: "this is not a disk image that can be recognised; kvm2 takes qcow2 or raw: it is empty",
		},
		{
			name: "short", head: []byte{1, 2, 3},
			want: "this is not a disk image that can be recognised; kvm2 takes qcow2 or raw: it has no more than 3 bytes",
		},
		{
			name: "zeros", head: disk(),
			want: "this is not a disk image that can be recognised; kvm2 takes qcow2 or raw: " +
				"it begins with zeros and has no boot sector",
		},
		{
			name: "anything", head: disk(put{0, "\x01\x02 unknown\nbytes and more of them"}),
			want: "this is not a disk image that can be recognised; kvm2 takes qcow2 or raw: " +
				`it begins with "\x01\x02 unknown\nbytes" and has no boot sector`,
		},
		{
			name: "qcow2 with a backing file", head: qcow2Image(t, put{8, "\x00\x00\x00\x00\x00\x00\x02\x00"}, put{512, "/etc/shadow"}),
			want: "qcow2 image refused: the image names a backing file: it would let the image read files of the host",
		},
		{
			name: "qcow2 cut off", head: qcow2Image(t)[:50],
			want: "qcow2 image refused: the image's header goes on behind the 50 bytes that are there",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := imageprobe.Probe(tt.head)
			if err == nil || err.Error() != tt.want {
				t.Errorf("error is %q, want %q", err, tt.want)
			}
		})
	}
}

func TestProbe_UnknownBytesAreUnrecognised(t *testing.T) {
	for name, head := range map[string][]byte{
		"empty": nil, "short": {0xFF}, "zeros": disk(), "noise": disk(put{0, "\xde\xad\xbe\xef"}),
		"bzip2 in name alone": disk(put{0, "BZh9\x00"}),
		"bzip2 of no level":   disk(put{0, "BZhx1AY&SY"}),
	} {
		if _, err := imageprobe.Probe(head); !errors.Is(err, imageprobe.ErrUnrecognised) {
			t.Errorf("%s: error is %v, want ErrUnrecognised", name, err)
		}
	}
}

func TestProbe_QCOW2RefusalsCanBeLookedInto(t *testing.T) {
	_, err := imageprobe.Probe(qcow2Image(t, put{32, "\x00\x00\x00\x02"}))
	refused, ok := errors.AsType[*qcow2.RefusedError](err)
	if !ok || refused.Feature != "encryption" {
		t.Errorf("error is %v, want a refusal for encryption", err)
	}
}

func TestCompression_ByFirstBytes(t *testing.T) {
	tests := map[string]string{
		"\x1f\x8b\x08":                    "gzip",
		"\x1f\x8b":                        "",
		"BZh11AY&SY":                      "bzip2",
		"BZh9\x17\x72\x45\x38\x50\x90":    "bzip2", // an empty file
		"BZh":                             "",
		"BZh9":                            "",
		"BZh91AY&S":                       "",
		"BZh01AY&SY":                      "",
		"\xfd7zXZ\x00":                    "xz",
		"\xfd7zXZ":                        "",
		"\x28\xb5\x2f\xfd":                "zstd",
		"\x28\xb5\x2f":                    "",
		"PK\x03\x04":                      "",
		"":                                "",
		"QFI\xfb\x00\x00\x00\x03\x1f\x8b": "",
	}
	for head, want := range tests {
		if got := imageprobe.Compression([]byte(head)); got != want {
			t.Errorf("Compression(%q) is %q, want %q", head, got, want)
		}
	}
}

// TestTools_ImagesThatQemuImgWrites skips where qemu-img is not installed.
func TestTools_ImagesThatQemuImgWrites(t *testing.T) {
	path, err := exec.LookPath("qemu-img")
	if err != nil {
		t.Skip("qemu-img is not installed")
	}
	t.Chdir(t.TempDir())
	if err := os.WriteFile("raw", append(disk(bootSector), make([]byte, 1<<20)...), 0o600); err != nil {
		t.Fatal(err)
	}
	for format, want := range map[string]string{
		"vmdk": "VMDK", "vdi": "VDI", "vhdx": "VHDX", "vpc": "VHD", "qed": "QED", "parallels": "Parallels", "qcow": "qcow1",
	} {
		image := filepath.Join(t.TempDir(), "image")
		args := []string{"convert", "-f", "raw", "-O", format, "raw", image}
		if out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput(); err != nil {
			t.Fatalf("qemu-img %q: %v\n%s", args, err, out)
		}
		content, err := os.ReadFile(image)
		if err != nil {
			t.Fatal(err)
		}
		_, err = imageprobe.Probe(content[:min(len(content), imageprobe.HeadSize)])
		if refused, ok := errors.AsType[*imageprobe.RefusedError](err); !ok || refused.Kind != want {
			t.Errorf("%s: error is %v, want a refusal of %q", format, err, want)
		}
	}
}

// FuzzProbe checks that no bytes make Probe panic, that every answer is one of those promised, and that errors stay short
// enough to be read.
func FuzzProbe(f *testing.F) {
	f.Add([]byte{})
	f.Add(disk(bootSector)[:1024])
	f.Add(qcow2Image(f)[:256])
	f.Add(disk(put{1080, "\x53\xef"})[:2048])
	f.Add([]byte("<!doctype html>"))
	f.Add([]byte("BZh91AY&SY"))
	f.Add([]byte("text \xc3"))
	f.Fuzz(func(t *testing.T, head []byte) {
		info, err := imageprobe.Probe(head)
		if err == nil {
			wantUsable(t, info, head)
			return
		}
		if info != (imageprobe.Info{}) {
			t.Errorf("%+v came with an error", info)
		}
		_, isKnown := errors.AsType[*imageprobe.RefusedError](err)
		_, isQCOW2 := errors.AsType[*qcow2.RefusedError](err)
		if !isKnown && !isQCOW2 && !errors.Is(err, imageprobe.ErrUnrecognised) {
			t.Errorf("error %v is none of those promised", err)
		}
		if text := err.Error(); len(text) > 300 || !utf8.ValidString(text) || strings.ContainsAny(text, "\n\x00") {
			t.Errorf("text is %q", text)
		}
		if kind := imageprobe.Compression(head); kind != "" && !isKnown {
			t.Errorf("compressed with %s, and the error is %v", kind, err)
		}
	})
}

func wantUsable(t *testing.T, info imageprobe.Info, head []byte) {
	t.Helper()
	isQCOW2 := bytes.HasPrefix(head, []byte(qcow2.Magic))
	switch info.Format {
	case imageprobe.FormatQCOW2:
		if !isQCOW2 || info.VirtualSize <= 0 {
			t.Errorf("info %+v of a head that begins with %q", info, head[:min(len(head), 8)])
		}
	case imageprobe.FormatRaw:
		if isQCOW2 || info.VirtualSize != 0 {
			t.Errorf("info %+v of a head that begins with %q", info, head[:min(len(head), 8)])
		}
	default:
		t.Errorf("format %q", info.Format)
	}
}
