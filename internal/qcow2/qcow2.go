// Package qcow2 reads the header of a qcow2 image, version 2 or 3, and tells whether the image stands on its own.
//
// It is strict because a header is an attack surface: QEMU opens whatever files an image names. The format is described in
// docs/interop/qcow2 of QEMU; numbers are big-endian.
package qcow2

import (
	"encoding/binary"
	"math"
)

// Magic begins every qcow2 image, and every image of the qcow format before it, which has version 1.
const Magic = "QFI\xfb"

// MaxVirtualSize bounds the virtual size of an image that [Header.CheckStandalone] accepts, in bytes. It is 64 TiB, which
// no machine's root disk comes near: a larger number is damage, or made to break the arithmetic of a reader.
const MaxVirtualSize = 64 << 40

// Header holds the fields of an image's header that decide how it may be used.
type Header struct {
	Version     int   // 2 or 3
	VirtualSize int64 // in bytes; not negative
	ClusterBits int   // 9 to 21: the cluster size is 1 << ClusterBits bytes

	// BackingFile is whether the image names another image that it is an overlay of.
	BackingFile bool

	// ExternalDataFile is whether any field says that the guest's data are in another file.
	ExternalDataFile bool

	// Encrypted is whether the guest's data are encrypted.
	Encrypted bool

	// IncompatibleFeatures are the bits that a reader must know to read the image. They are zero in version 2.
	IncompatibleFeatures uint64

	// CompressionType is how compressed clusters are compressed: 0 for zlib, 1 for zstd.
	CompressionType int

	// L1Entries is the number of entries of the active L1 table. They cover the virtual size.
	L1Entries int
}

// Compat returns the version in the words of qemu-img and of libvirt's <compat> element: "0.10" for version 2 and "1.1"
// for version 3.
func (h Header) Compat() string {
	if h.Version == 2 {
		return "0.10"
	}
	return "1.1"
}

// The bits of IncompatibleFeatures that the format defines.
const (
	FeatureDirty            uint64 = 1 << 0
	FeatureCorrupt          uint64 = 1 << 1
	FeatureExternalDataFile uint64 = 1 << 2
	FeatureCompressionType  uint64 = 1 << 3
	FeatureExtendedL2       uint64 = 1 << 4
)

const (
	headerLengthV2    = 72
	minHeaderLengthV3 = 104

	minClusterBits           = 9
	maxClusterBits           = 21 // QEMU opens no image with larger clusters
	minClusterBitsExtendedL2 = 14

	maxL1Entries     = 32 << 20 / 8 // QEMU opens no image with an L1 table of more than 32 MiB
	maxRefcountOrder = 6
	maxSnapshots     = 65536 // QEMU opens no image with more

	autoclearRawExternalData uint64 = 1 << 1

	compressionZstd = 1
)

// fields is the header as it is recorded.
type fields struct {
	Magic                 [4]byte
	Version               uint32
	BackingFileOffset     uint64
	BackingFileSize       uint32
	ClusterBits           uint32
	Size                  uint64
	CryptMethod           uint32
	L1Size                uint32
	L1TableOffset         uint64
	RefcountTableOffset   uint64
	RefcountTableClusters uint32
	Snapshots             uint32
	SnapshotsOffset       uint64

	// From here on, version 3 only.
	IncompatibleFeatures uint64
	CompatibleFeatures   uint64
	AutoclearFeatures    uint64
	RefcountOrder        uint32
	HeaderLength         uint32

	// CompressionType is zero where HeaderLength leaves it out.
	CompressionType uint8
}

// ParseHeader reads the header from b, the beginning of an image: its first cluster, or less of it as long as the header
// extensions end within b. 64 KiB is enough in practice.
//
// It returns a [*RefusedError] for a header that is cut short, breaks a rule of the format, or has a field that QEMU does
// not accept. Whether kvm2 wants such an image is for [Header.CheckStandalone] to say.
func ParseHeader(b []byte) (Header, error) {
	f, err := parseFields(b)
	if err != nil {
		return Header{}, err
	}
	for _, check := range []func(fields) error{
		checkClusterBits, checkFeatures, checkSize, checkTables, checkSnapshots,
	} {
		if err := check(f); err != nil {
			return Header{}, err
		}
	}
	ext, err := parseExtensions(b, f)
	if err != nil {
		return Header{}, err
	}
	rawExternalData := f.AutoclearFeatures&autoclearRawExternalData != 0
	return Header{
		Version:              int(f.Version),
		VirtualSize:          int64(f.Size),
		ClusterBits:          int(f.ClusterBits),
		BackingFile:          f.BackingFileOffset != 0,
		ExternalDataFile:     f.has(FeatureExternalDataFile) || rawExternalData || ext.dataFile,
		Encrypted:            f.CryptMethod != 0 || ext.encryption,
		IncompatibleFeatures: f.IncompatibleFeatures,
		CompressionType:      int(f.CompressionType),
		L1Entries:            int(f.L1Size),
	}, nil
}

func (f fields) has(feature uint64) bool { return f.IncompatibleFeatures&feature != 0 }

func (f fields) clusterSize() uint64 { return 1 << f.ClusterBits }

// parseFields reads the fixed fields, checks the ones that say how many there are, and sets what is implied for version 2.
func parseFields(b []byte) (fields, error) {
	if len(b) < len(Magic) || string(b[:len(Magic)]) != Magic {
		return fields{}, refuse("magic", "the image does not begin as a qcow2 image does")
	}
	if len(b) < headerLengthV2 {
		return fields{}, refuseTruncated(len(b))
	}
	switch version := binary.BigEndian.Uint32(b[4:]); version {
	case 2:
		return parseV2(b)
	case 3:
		return parseV3(b)
	default:
		return fields{}, refuse("version", "the image has version %d of the format; only versions 2 and 3 are known", version)
	}
}

func parseV2(b []byte) (fields, error) {
	f, err := decode(b[:headerLengthV2])
	if err != nil {
		return fields{}, err
	}
	f.RefcountOrder = 4
	f.HeaderLength = headerLengthV2
	return f, nil
}

func parseV3(b []byte) (fields, error) {
	if len(b) < minHeaderLengthV3 {
		return fields{}, refuseTruncated(len(b))
	}
	length := binary.BigEndian.Uint32(b[100:])
	if length < minHeaderLengthV3 || length%8 != 0 {
		return fields{}, refuse("header length",
			"the header says that it has %d bytes; it must be %d or more and a multiple of 8", length, minHeaderLengthV3)
	}
	if uint64(length) > uint64(len(b)) {
		return fields{}, refuseTruncated(len(b))
	}
	return decode(b[:length])
}

// decode reads the fields that are in header and leaves the others zero.
func decode(header []byte) (fields, error) {
	var f fields
	padded := make([]byte, binary.Size(f))
	copy(padded, header)
	_, err := binary.Decode(padded, binary.BigEndian, &f)
	return f, err
}

func checkClusterBits(f fields) error {
	if f.ClusterBits < minClusterBits || f.ClusterBits > maxClusterBits {
		return refuse("cluster size", "the image has clusters of 2^%d bytes; QEMU knows 2^%d to 2^%d",
			f.ClusterBits, minClusterBits, maxClusterBits)
	}
	if f.has(FeatureExtendedL2) && f.ClusterBits < minClusterBitsExtendedL2 {
		return refuse("cluster size", "the image has extended L2 entries and clusters of 2^%d bytes; those need 2^%d or more",
			f.ClusterBits, minClusterBitsExtendedL2)
	}
	if uint64(f.HeaderLength) > f.clusterSize() {
		return refuse("header length", "the header says that it has %d bytes; it must fit a cluster of %d",
			f.HeaderLength, f.clusterSize())
	}
	return nil
}

func checkFeatures(f fields) error {
	if f.RefcountOrder > maxRefcountOrder {
		return refuse("reference counts", "the image has reference counts of 2^%d bits; the format ends at 2^%d",
			f.RefcountOrder, maxRefcountOrder)
	}
	if f.CompressionType > compressionZstd {
		return refuse("compression type", "the image compresses clusters by method %d, which is not known", f.CompressionType)
	}
	if f.has(FeatureCompressionType) != (f.CompressionType != 0) {
		return refuse("compression type", "the image contradicts itself on how its clusters are compressed")
	}
	return nil
}

// checkSize checks that the virtual size is a number that can be worked with, and that the L1 table covers it.
func checkSize(f fields) error {
	if f.Size > math.MaxInt64 {
		return refuse("virtual size", "the image says that it has %d bytes, which no disk has", f.Size)
	}
	if f.L1Size > maxL1Entries {
		return refuse("L1 table", "the image has an L1 table of %d entries; QEMU takes up to %d", f.L1Size, maxL1Entries)
	}
	if need := f.l1EntriesNeeded(); uint64(f.L1Size) < need {
		return refuse("L1 table", "the image has an L1 table of %d entries; its virtual size of %d bytes needs %d",
			f.L1Size, f.Size, need)
	}
	return nil
}

// l1EntriesNeeded returns how many L1 entries cover the virtual size. One entry leads to one cluster of L2 entries, which
// lead to one cluster of data each.
func (f fields) l1EntriesNeeded() uint64 {
	l2EntryBits := uint32(3)
	if f.has(FeatureExtendedL2) {
		l2EntryBits = 4
	}
	coveredBits := f.ClusterBits + f.ClusterBits - l2EntryBits
	need := f.Size >> coveredBits
	if f.Size&(1<<coveredBits-1) != 0 {
		need++
	}
	return need
}

func checkTables(f fields) error {
	if f.L1Size > 0 && !f.isClusterOffset(f.L1TableOffset) {
		return refuse("L1 table", "the L1 table is said to be at byte %d, which is not the start of a cluster behind the header",
			f.L1TableOffset)
	}
	if f.RefcountTableClusters == 0 || !f.isClusterOffset(f.RefcountTableOffset) {
		return refuse("reference counts", "the table of reference counts is said to have %d clusters at byte %d; "+
			"it must have one and start at a cluster behind the header", f.RefcountTableClusters, f.RefcountTableOffset)
	}
	return nil
}

func checkSnapshots(f fields) error {
	if f.Snapshots > maxSnapshots {
		return refuse("snapshots", "the image has %d snapshots; QEMU takes up to %d", f.Snapshots, maxSnapshots)
	}
	if f.Snapshots > 0 && !f.isClusterOffset(f.SnapshotsOffset) {
		return refuse("snapshots", "the snapshots are said to be at byte %d, which is not the start of a cluster behind the header",
			f.SnapshotsOffset)
	}
	return nil
}

// isClusterOffset tells whether a cluster other than the first, which is the header's, starts at offset.
func (f fields) isClusterOffset(offset uint64) bool {
	return offset != 0 && offset%f.clusterSize() == 0 && offset <= math.MaxInt64
}

// The types of the header extensions that matter here.
const (
	extensionEnd        = 0x00000000
	extensionDataFile   = 0x44415441
	extensionEncryption = 0x0537be77
)

// extensions is which of the header extensions that matter here are there.
type extensions struct {
	dataFile   bool
	encryption bool
}

// parseExtensions reads the header extensions. They follow the header and end with an extension of type 0, at the name of
// the backing file, or at the end of the first cluster. An area that does not end within b is refused: what lies behind
// could name a file of the host.
func parseExtensions(b []byte, f fields) (extensions, error) {
	var ext extensions
	end := f.extensionsEnd()
	for offset := uint64(f.HeaderLength); offset+8 <= end; {
		if offset+8 > uint64(len(b)) {
			return extensions{}, refuseTruncated(len(b))
		}
		kind, length := binary.BigEndian.Uint32(b[offset:]), uint64(binary.BigEndian.Uint32(b[offset+4:]))
		if kind == extensionEnd {
			return ext, nil
		}
		offset += 8
		if length > end-offset {
			return extensions{}, refuse("header extensions", "the header has an extension of %d bytes, which does not fit", length)
		}
		offset += (length + 7) &^ 7
		ext.dataFile = ext.dataFile || kind == extensionDataFile
		ext.encryption = ext.encryption || kind == extensionEncryption
	}
	return ext, nil
}

func (f fields) extensionsEnd() uint64 {
	if f.BackingFileOffset != 0 {
		return min(f.BackingFileOffset, f.clusterSize())
	}
	return f.clusterSize()
}
