// Package imageprobe tells from the first bytes of a file whether it is a disk image that kvm2 can use.
//
// The answer comes from the bytes alone, never from a name or a content type: a server that answers with an error page
// still calls it debian-13.qcow2.
package imageprobe

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/kvm2/kvm2/internal/qcow2"
)

// HeadSize is how many bytes of a file [Probe] wants to see.
const HeadSize = 64 << 10

// Format is a disk image format in the words of qemu-img and of libvirt's <format> element.
type Format string

// The formats that kvm2 takes.
const (
	FormatQCOW2 Format = "qcow2"
	FormatRaw   Format = "raw"
)

// Info is what the head of an image says.
type Info struct {
	Format Format

	// VirtualSize is the size of the disk in bytes. It is 0 for a raw image, whose size is that of its file.
	VirtualSize int64
}

// ErrUnrecognised is the error for bytes that are neither a disk image nor anything else that is known.
var ErrUnrecognised = errors.New("this is not a disk image that can be recognised; kvm2 takes qcow2 or raw")

// RefusedError says that a file is something else than a disk image that kvm2 takes.
type RefusedError struct {
	// Kind names what the file is, always by the same words: "VMDK", "HTML".
	Kind string

	what string // the kind in a sentence: "an HTML page"
	hint string // what could be done about it, or ""
}

// Error returns what the file is, what kvm2 takes, and what could be done about it.
func (e *RefusedError) Error() string {
	text := fmt.Sprintf("this is %s; kvm2 takes qcow2 or raw", e.what)
	if e.hint == "" {
		return text
	}
	return text + ": " + e.hint
}

// Probe tells what image begins with head: the first [HeadSize] bytes of a file, or the whole file when it is shorter.
//
// A qcow2 image must stand on its own: the error wraps a [*qcow2.RefusedError] when it does not. A raw image has no
// header; it is taken for one only when it has a boot sector or a GUID partition table, because anything at all could be
// called raw. What is known to be something else is refused with a [*RefusedError], what is not known with an error that
// wraps [ErrUnrecognised].
//
// One format cannot be told from a raw image: a fixed-size VHD, which is a raw image with a footer.
func Probe(head []byte) (Info, error) {
	if len(head) == 0 {
		return Info{}, fmt.Errorf("%w: it is empty", ErrUnrecognised)
	}
	if hasAt(head, 0, qcow2.Magic) && !hasAt(head, 0, magicQCOW1) {
		return probeQCOW2(head)
	}
	if k, ok := recognise(head); ok {
		return Info{}, k.refused()
	}
	if hasBootSector(head) || hasGPT(head) {
		return Info{Format: FormatRaw}, nil
	}
	if k, ok := recogniseUnbootable(head); ok {
		return Info{}, k.refused()
	}
	return Info{}, unrecognised(head)
}

func probeQCOW2(head []byte) (Info, error) {
	header, err := qcow2.ParseHeader(head)
	if err == nil {
		err = header.CheckStandalone()
	}
	if err != nil {
		return Info{}, fmt.Errorf("qcow2 image refused: %w", err)
	}
	return Info{Format: FormatQCOW2, VirtualSize: header.VirtualSize}, nil
}

const diskSector = 512

func hasBootSector(head []byte) bool {
	return hasAt(head, diskSector-2, "\x55\xaa")
}

// hasGPT looks for the header of a GUID partition table where it is on a disk with sectors of 512 bytes, which are the
// ones that a machine's disk has.
func hasGPT(head []byte) bool {
	return hasAt(head, diskSector, "EFI PART")
}

func unrecognised(head []byte) error {
	if len(head) < diskSector {
		return fmt.Errorf("%w: it has no more than %d bytes", ErrUnrecognised, len(head))
	}
	if len(bytes.TrimLeft(head, "\x00")) == 0 {
		return fmt.Errorf("%w: it begins with zeros and has no boot sector", ErrUnrecognised)
	}
	const shown = 16
	return fmt.Errorf("%w: it begins with %q and has no boot sector", ErrUnrecognised, head[:shown])
}

func hasAt(head []byte, offset int, magic string) bool {
	return len(head) >= offset+len(magic) && string(head[offset:offset+len(magic)]) == magic
}
