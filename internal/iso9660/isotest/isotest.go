// Package isotest reads flat ISO 9660 volumes back, for tests of what writes them.
//
// It is written from the standards (ECMA-119, Joliet, SUSP and Rock Ridge) and shares no code with the writer, so that the
// two cannot agree on a mistake. It is strict: a volume that a lenient reader would still read is an error where it breaks
// a rule. The one rule that it lets go is the one that everybody breaks: the primary label may be in lower case.
package isotest

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const sectorSize = 2048

// Volume is what the different kinds of readers see of a volume.
type Volume struct {
	// Label and JolietLabel are the labels of the primary and of the Joliet descriptor, without padding.
	Label, JolietLabel string

	// ISO holds the files by their plain names, which end in a version: "USER_DAT.;1".
	ISO map[string][]byte

	// RockRidge holds the files by their Rock Ridge names. It is nil when the volume has no Rock Ridge entries.
	RockRidge map[string][]byte

	// Modes holds the POSIX modes, file type included, by the same names.
	Modes map[string]uint32

	// Joliet holds the files by their Joliet names. It is nil when the volume has no Joliet descriptor.
	Joliet map[string][]byte
}

// Read reads a volume that has files in its root directory and no other directories. An error says which rule the volume
// breaks, or what it has that Read does not know. Any bytes may be given to it.
func Read(image []byte) (Volume, error) {
	v, err := read(image)
	if err != nil {
		return Volume{}, fmt.Errorf("isotest: %w", err)
	}
	return v, nil
}

func read(image []byte) (Volume, error) {
	d := &disc{image: image, owners: make(map[uint32]string)}
	primary, joliet, err := d.readDescriptors()
	if err != nil {
		return Volume{}, err
	}
	var v Volume
	v.Label, err = asciiLabel(primary.label)
	if err != nil {
		return Volume{}, err
	}
	if err := d.readPrimaryTree(primary, &v); err != nil {
		return Volume{}, fmt.Errorf("the primary tree: %w", err)
	}
	if joliet == nil {
		return v, nil
	}
	v.JolietLabel, err = ucs2Label(joliet.label)
	if err != nil {
		return Volume{}, err
	}
	if err := d.readJolietTree(joliet, &v); err != nil {
		return Volume{}, fmt.Errorf("the Joliet tree: %w", err)
	}
	return v, nil
}

// disc is the image and a record of which sector serves what.
type disc struct {
	image   []byte
	sectors uint32            // the volume's size, as its descriptor says
	owners  map[uint32]string // by sector
}

// claim returns size bytes from the start of a sector on, and notes that the sectors belong to owner. It is an error when
// they are outside the volume or belong to another owner.
func (d *disc) claim(sector, size uint32, owner string) ([]byte, error) {
	count := (uint64(size) + sectorSize - 1) / sectorSize
	if uint64(sector)+count > uint64(d.sectors) {
		return nil, fmt.Errorf("%s: sector %d and %d bytes are outside a volume of %d sectors", owner, sector, size, d.sectors)
	}
	for s := sector; s < sector+uint32(count); s++ {
		if other, ok := d.owners[s]; ok && other != owner {
			return nil, fmt.Errorf("sector %d belongs to both %s and %s", s, other, owner)
		}
		d.owners[s] = owner
	}
	start := int64(sector) * sectorSize
	return d.image[start : start+int64(size)], nil
}

// both16 reads a number that is recorded in both byte orders.
func both16(b []byte) (uint16, error) {
	little, big := binary.LittleEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	if little != big {
		return 0, fmt.Errorf("the two byte orders of a number disagree: %d and %d", little, big)
	}
	return little, nil
}

// both32 reads a number that is recorded in both byte orders.
func both32(b []byte) (uint32, error) {
	little, big := binary.LittleEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
	if little != big {
		return 0, fmt.Errorf("the two byte orders of a number disagree: %d and %d", little, big)
	}
	return little, nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

var errNotZero = errors.New("unused bytes are not zero")
