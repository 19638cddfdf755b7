package iso9660

import (
	"encoding/binary"
	"strings"
)

// Numbers are recorded little-endian, big-endian or both, one after the other (ECMA-119, 7.2 and 7.3).

func both16(v uint16) []byte {
	return binary.BigEndian.AppendUint16(binary.LittleEndian.AppendUint16(nil, v), v)
}

func both32(v uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, v), v)
}

const (
	flagDirectory = 0x02

	// volumeNumber: a volume set of one volume, which is the first.
	volumeNumber = 1
)

var (
	selfIdentifier   = []byte{0}
	parentIdentifier = []byte{1}
)

// recordingTime is 1970-01-01 00:00:00 UTC. The standard allows zeros for "not specified", but readers make dates of the
// year 1899 out of them.
var recordingTime = []byte{70, 1, 1, 0, 0, 0, 0}

// record is what varies in a directory record.
type record struct {
	identifier []byte
	extent     extent
	flags      byte
	systemUse  []byte
}

// directoryRecord encodes a directory record (ECMA-119, 9.1). Identifier and system use area are padded to an even length.
func directoryRecord(r record) []byte {
	out := []byte{0, 0} // its length, set below; no extended attributes
	out = append(out, both32(r.extent.sector)...)
	out = append(out, both32(r.extent.size)...)
	out = append(out, recordingTime...)
	out = append(out, r.flags, 0, 0) // not interleaved
	out = append(out, both16(volumeNumber)...)
	out = append(out, byte(len(r.identifier)))
	out = padEven(append(out, r.identifier...))
	out = padEven(append(out, r.systemUse...))
	out[0] = byte(len(out))
	return out
}

func padEven(b []byte) []byte {
	if len(b)%2 == 0 {
		return b
	}
	return append(b, 0)
}

// pathTableL returns the path table of a tree that is its root alone, little-endian (ECMA-119, 9.4).
func pathTableL(root extent) []byte {
	return pathTable(root, binary.LittleEndian)
}

// pathTableM returns the same table, big-endian.
func pathTableM(root extent) []byte {
	return pathTable(root, binary.BigEndian)
}

const pathTableSize = 10

func pathTable(root extent, order binary.AppendByteOrder) []byte {
	out := []byte{byte(len(selfIdentifier)), 0}
	out = order.AppendUint32(out, root.sector)
	out = order.AppendUint16(out, 1) // the root is its own parent, directory number 1
	return padEven(append(out, selfIdentifier...))
}

// The first byte of a volume descriptor is its type.
const (
	typePrimary       = 1
	typeSupplementary = 2
	typeTerminator    = 255

	descriptorVersion = 1
	standardID        = "CD001"

	// jolietEscape announces UCS-2 level 3.
	jolietEscape = "%/E"
)

// descriptor is what varies in the primary and the supplementary volume descriptor.
type descriptor struct {
	kind       byte
	text       func(s string, length int) []byte // encodes a text field
	label      string
	escape     string
	pathTableL uint32
	pathTableM uint32
	root       extent
	sectors    uint32
}

func (l *layout) primaryDescriptor(label string) []byte {
	return volumeDescriptor(descriptor{
		kind:       typePrimary,
		text:       spacePadded,
		label:      label,
		pathTableL: primaryPathTableLSector,
		pathTableM: primaryPathTableMSector,
		root:       l.primaryRoot,
		sectors:    l.sectors,
	})
}

func (l *layout) jolietDescriptor(label string) []byte {
	return volumeDescriptor(descriptor{
		kind:       typeSupplementary,
		text:       spacePaddedUCS2,
		label:      label,
		escape:     jolietEscape,
		pathTableL: jolietPathTableLSector,
		pathTableM: jolietPathTableMSector,
		root:       l.jolietRoot,
		sectors:    l.sectors,
	})
}

// volumeDescriptor encodes a primary or supplementary volume descriptor (ECMA-119, 8.4 and 8.5), up to its last field that
// is not zero.
func volumeDescriptor(d descriptor) []byte {
	out := descriptorHeader(d.kind)
	out = append(out, 0)                 // unused, or volume flags: the escape sequence is a registered one
	out = append(out, d.text("", 32)...) // system identifier
	out = append(out, d.text(d.label, 32)...)
	out = append(out, make([]byte, 8)...) // unused
	out = append(out, both32(d.sectors)...)
	out = append(out, zeroPadded(d.escape, 32)...)
	out = append(out, both16(1)...) // volumes in the set
	out = append(out, both16(volumeNumber)...)
	out = append(out, both16(sectorSize)...)
	out = append(out, both32(pathTableSize)...)
	out = binary.LittleEndian.AppendUint32(out, d.pathTableL)
	out = binary.LittleEndian.AppendUint32(out, 0) // no second copy
	out = binary.BigEndian.AppendUint32(out, d.pathTableM)
	out = binary.BigEndian.AppendUint32(out, 0)
	out = append(out, directoryRecord(record{identifier: selfIdentifier, extent: d.root, flags: flagDirectory})...)
	// The identifiers of volume set, publisher, preparer and application, then the names of three files about the volume.
	for _, length := range []int{128, 128, 128, 128, 37, 37, 37} {
		out = append(out, d.text("", length)...)
	}
	// Times of creation, modification, expiry and effect.
	for range 4 {
		out = append(out, unspecifiedTime()...)
	}
	return append(out, descriptorVersion) // of the file structure
}

func terminator() []byte { return descriptorHeader(typeTerminator) }

func descriptorHeader(kind byte) []byte {
	out := append([]byte{kind}, standardID...)
	return append(out, descriptorVersion)
}

// unspecifiedTime is sixteen digits zero and the zone zero (ECMA-119, 8.4.26.1).
func unspecifiedTime() []byte {
	return append([]byte(strings.Repeat("0", 16)), 0)
}

func spacePadded(s string, length int) []byte {
	return []byte(s + strings.Repeat(" ", length-len(s)))
}

// spacePaddedUCS2 fills a field of an odd length up to its last byte, which is zero.
func spacePaddedUCS2(s string, length int) []byte {
	return zeroPadded(string(ucs2(s+strings.Repeat(" ", length/2-len(s)))), length)
}

func zeroPadded(s string, length int) []byte {
	out := make([]byte, length)
	copy(out, s)
	return out
}
