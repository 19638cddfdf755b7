package imageprobe

import (
	"bytes"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvm2/kvm2/internal/qcow2"
)

// kind is something that a file can be instead of a disk image that kvm2 takes.
type kind struct {
	name string
	what string // in a sentence, with its article
	hint string
}

func (k kind) refused() *RefusedError {
	return &RefusedError{Kind: k.name, what: k.what, hint: k.hint}
}

func diskImage(name, what string) kind {
	return kind{name, what + " image", "convert it with qemu-img convert -O qcow2"}
}

func compressed(name string) kind {
	return kind{name, "a file compressed with " + name, "decompress it first, or give kvm2 a way to by WithDecompressor"}
}

func archive(name, what string) kind {
	return kind{name, what + " archive", "unpack it and take the disk image inside"}
}

func opticalDisc(name, what string) kind {
	return kind{name, what + " image", "take the cloud image of the distribution, not its installer"}
}

func document(name, what string) kind {
	return kind{name, what, "perhaps the server answered with a login or error page; check the URL"}
}

func fileSystem(name, what string) kind {
	return kind{name, what + " file system", "a machine boots from a whole disk with a boot loader, not from a file system alone"}
}

// signature is a kind and the bytes by which it is known.
type signature struct {
	kind
	offset int
	magic  string
}

const (
	magicGzip  = "\x1f\x8b\x08" // 8 is the only method there is
	magicBzip2 = "BZh"
	magicXZ    = "\xfd7zXZ\x00"
	magicZstd  = "\x28\xb5\x2f\xfd"
	magicQCOW1 = qcow2.Magic + "\x00\x00\x00\x01"
)

// signatures are looked for in their order, boot sector or not. ISO 9660 comes first: an image that boots from a CD and
// from a stick alike begins as a disk does.
var signatures = []signature{
	{opticalDisc("ISO 9660", "an ISO 9660"), 0x8001, "CD001"},
	{opticalDisc("UDF", "a UDF"), 0x8001, "BEA01"},

	{diskImage("qcow1", "a qcow1"), 0, magicQCOW1},
	{diskImage("VMDK", "a VMDK"), 0, "KDMV"},
	{diskImage("VMDK", "a VMDK"), 0, "COWD"},
	{diskImage("VMDK", "the descriptor of a VMDK"), 0, "# Disk DescriptorFile"},
	{diskImage("VHD", "a VHD"), 0, "conectix"},
	{diskImage("VHDX", "a VHDX"), 0, "vhdxfile"},
	{diskImage("VDI", "a VDI"), 64, "\x7f\x10\xda\xbe"},
	{diskImage("QED", "a QED"), 0, "QED\x00"},
	{diskImage("Parallels", "a Parallels"), 0, "WithoutFreeSpace"},
	{diskImage("Parallels", "a Parallels"), 0, "WithouFreSpacExt"},
	{diskImage("Bochs", "a Bochs"), 0, "Bochs Virtual HD Image"},
	{kind{"Android sparse", "an Android sparse image", "convert it with simg2img"}, 0, "\x3a\xff\x26\xed"},
	{kind{"WIM", "a WIM image", "it installs Windows; take the image of an installed disk"}, 0, "MSWIM\x00\x00\x00"},
	{kind{"LUKS", "a LUKS volume", "a machine could not read it without a key, and kvm2 has none to give"}, 0, "LUKS\xba\xbe"},

	{compressed("gzip"), 0, magicGzip},
	{compressed("xz"), 0, magicXZ},
	{compressed("zstd"), 0, magicZstd},
	{compressed("lz4"), 0, "\x04\x22\x4d\x18"},
	{compressed("lzip"), 0, "LZIP"},
	{archive("zip", "a zip"), 0, "PK\x03\x04"},
	{archive("7z", "a 7z"), 0, "7z\xbc\xaf\x27\x1c"},
	{archive("tar (OVA)", "a tar (OVA)"), 257, "ustar"},
	{kind{"cpio", "a cpio archive", "perhaps it is an initial RAM disk; take the disk image"}, 0, "07070"},

	{kind{"ELF", "an ELF program", ""}, 0, "\x7fELF"},
	{kind{"Linux kernel", "a Linux kernel", "take the disk image"}, 0x202, "HdrS"},
	{document("PDF", "a PDF document"), 0, "%PDF-"},
}

// unbootable are looked for where there is no boot sector: with one, a file system may fill the whole disk and boot.
var unbootable = []signature{
	{fileSystem("ext4", "an ext2, ext3 or ext4"), 1024 + 56, "\x53\xef"},
	{fileSystem("XFS", "an XFS"), 0, "XFSB"},
	{fileSystem("SquashFS", "a SquashFS"), 0, "hsqs"},
	{fileSystem("EROFS", "an EROFS"), 1024, "\xe2\xe1\xf5\xe0"},
	{kind{"PE", "a program of Windows or EFI", ""}, 0, "MZ"},
}

// Compression names the compression of a file by its first bytes: "gzip", "bzip2", "xz" or "zstd". It is empty for
// anything else.
func Compression(head []byte) string {
	switch {
	case hasAt(head, 0, magicGzip):
		return "gzip"
	case isBzip2(head):
		return "bzip2"
	case hasAt(head, 0, magicXZ):
		return "xz"
	case hasAt(head, 0, magicZstd):
		return "zstd"
	default:
		return ""
	}
}

// isBzip2 wants the first block too, or the end of the stream: three letters alone are too little to go by.
func isBzip2(head []byte) bool {
	const block, end = "1AY&SY", "\x17\x72\x45\x38\x50\x90"
	if !hasAt(head, 0, magicBzip2) || len(head) < 4 || head[3] < '1' || head[3] > '9' {
		return false
	}
	return hasAt(head, 4, block) || hasAt(head, 4, end)
}

// recognise finds what is known by its bytes whether or not there is a boot sector.
func recognise(head []byte) (kind, bool) {
	if isBzip2(head) {
		return compressed("bzip2"), true
	}
	return find(signatures, head)
}

// recogniseUnbootable finds what else there is where there is no boot sector: most often the document with which a server
// answers when it has no image.
func recogniseUnbootable(head []byte) (kind, bool) {
	start := strings.ToLower(string(head[:min(len(head), 1024)]))
	start = strings.TrimLeftFunc(strings.TrimPrefix(start, "\ufeff"), unicode.IsSpace)
	switch {
	case isHTML(start):
		return document("HTML", "an HTML page"), true
	case strings.HasPrefix(start, "<?xml"):
		return document("XML", "an XML document"), true
	case !isText(head):
		return find(unbootable, head)
	case strings.HasPrefix(start, "<"):
		return document("XML", "an XML document"), true
	case strings.HasPrefix(start, "{"), strings.HasPrefix(start, "[{"):
		return document("JSON", "a JSON document"), true
	case strings.HasPrefix(start, "version https://git-lfs"):
		return kind{"Git LFS pointer", "a Git LFS pointer", "it stands for the image, which was not fetched"}, true
	default:
		return document("text", "plain text"), true
	}
}

func find(signatures []signature, head []byte) (kind, bool) {
	for _, s := range signatures {
		if hasAt(head, s.offset, s.magic) {
			return s.kind, true
		}
	}
	return kind{}, false
}

// isHTML looks at the beginning of a document, in lower case. Comments and an XML declaration may come before the element
// that tells.
func isHTML(start string) bool {
	if !strings.HasPrefix(start, "<") {
		return false
	}
	return strings.Contains(start, "<!doctype html") || strings.Contains(start, "<html") ||
		strings.HasPrefix(start, "<head>") || strings.HasPrefix(start, "<body") || strings.HasPrefix(start, "<title>")
}

// isText tells whether b is UTF-8 without control characters. At its end, a character may be cut in two.
func isText(b []byte) bool {
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		if r == utf8.RuneError && size == 1 {
			return !utf8.FullRune(b)
		}
		if unicode.IsControl(r) && !bytes.ContainsRune([]byte("\t\n\v\f\r\x1b"), r) {
			return false
		}
		b = b[size:]
	}
	return true
}
