package isotest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf16"
)

const (
	firstDescriptor = 16 // its sector

	typePrimary       = 1
	typeSupplementary = 2
	typeTerminator    = 255
)

// tree is what a volume descriptor says of its directory tree.
type tree struct {
	label   []byte
	root    record
	sectors uint32

	pathTableSize          uint32
	pathTableL, pathTableM uint32
	moreTableL, moreTableM uint32 // optional second copies; 0 for none
}

// readDescriptors reads the volume descriptors up to their terminator. The Joliet tree is nil when there is none.
func (d *disc) readDescriptors() (primary, joliet *tree, err error) {
	for sector := firstDescriptor; ; sector++ {
		start := sector * sectorSize
		if start+sectorSize > len(d.image) {
			return nil, nil, errors.New("the image ends before the volume descriptors do")
		}
		b := d.image[start : start+sectorSize]
		if string(b[1:6]) != "CD001" || b[6] != 1 {
			return nil, nil, fmt.Errorf("sector %d is not a volume descriptor", sector)
		}
		switch {
		case b[0] == typePrimary && primary == nil:
			primary, err = parsePrimaryDescriptor(b)
		case b[0] == typeSupplementary && joliet == nil:
			joliet, err = parseJolietDescriptor(b)
		case b[0] == typeTerminator:
			return primary, joliet, d.finishDescriptors(sector, b, primary, joliet)
		default:
			err = fmt.Errorf("unexpected type %d", b[0])
		}
		if err != nil {
			return nil, nil, fmt.Errorf("volume descriptor in sector %d: %w", sector, err)
		}
	}
}

func (d *disc) finishDescriptors(sector int, terminator []byte, primary, joliet *tree) error {
	if !allZero(terminator[7:]) {
		return fmt.Errorf("terminator: %w", errNotZero)
	}
	if primary == nil {
		return errors.New("no primary volume descriptor")
	}
	if joliet != nil && joliet.sectors != primary.sectors {
		return fmt.Errorf("the descriptors give the volume %d and %d sectors", primary.sectors, joliet.sectors)
	}
	if uint64(primary.sectors)*sectorSize > uint64(len(d.image)) {
		return fmt.Errorf("the image has %d bytes, too few for %d sectors", len(d.image), primary.sectors)
	}
	d.sectors = primary.sectors
	_, err := d.claim(0, uint32(sector+1)*sectorSize, "the volume descriptors")
	return err
}

// parseDescriptor reads the fields that primary and supplementary descriptors share (ECMA-119, 8.4 and 8.5).
func parseDescriptor(b []byte) (*tree, error) {
	var t tree
	var err error
	if !allZero(b[7:8]) || !allZero(b[72:80]) || !allZero(b[882:883]) || !allZero(b[1395:]) {
		return nil, errNotZero
	}
	t.label = b[40:72]
	if t.sectors, err = both32(b[80:]); err != nil {
		return nil, err
	}
	if err := checkConstants(b); err != nil {
		return nil, err
	}
	if t.pathTableSize, err = both32(b[132:]); err != nil {
		return nil, err
	}
	t.pathTableL = binary.LittleEndian.Uint32(b[140:])
	t.moreTableL = binary.LittleEndian.Uint32(b[144:])
	t.pathTableM = binary.BigEndian.Uint32(b[148:])
	t.moreTableM = binary.BigEndian.Uint32(b[152:])
	if t.root, err = parseRecord(b[156:190]); err != nil {
		return nil, fmt.Errorf("root directory: %w", err)
	}
	if len(t.root.identifier) != 1 || t.root.identifier[0] != 0 || !t.root.isDirectory() {
		return nil, errors.New("the root directory's record is none of a root directory")
	}
	for offset := 813; offset < 881; offset += 17 {
		if err := checkLongTime(b[offset : offset+17]); err != nil {
			return nil, err
		}
	}
	if b[881] != 1 {
		return nil, fmt.Errorf("file structure version %d", b[881])
	}
	return &t, nil
}

// checkConstants checks the numbers that every volume of this kind has in common.
func checkConstants(b []byte) error {
	constants := []struct {
		offset int
		want   uint16
		name   string
	}{
		{120, 1, "volumes in the set"},
		{124, 1, "number of the volume"},
		{128, sectorSize, "size of a logical block"},
	}
	for _, c := range constants {
		got, err := both16(b[c.offset:])
		if err != nil {
			return err
		}
		if got != c.want {
			return fmt.Errorf("%s: %d, not %d", c.name, got, c.want)
		}
	}
	return nil
}

func parsePrimaryDescriptor(b []byte) (*tree, error) {
	if !allZero(b[88:120]) {
		return nil, errNotZero
	}
	return parseDescriptor(b)
}

func parseJolietDescriptor(b []byte) (*tree, error) {
	escape := string(bytes.TrimRight(b[88:120], "\x00"))
	if escape != "%/@" && escape != "%/C" && escape != "%/E" {
		return nil, fmt.Errorf("the escape sequence %q is none of Joliet's", escape)
	}
	return parseDescriptor(b)
}

// checkLongTime checks the form of a time of sixteen digits and a zone (ECMA-119, 8.4.26.1).
func checkLongTime(b []byte) error {
	for _, c := range b[:16] {
		if c < '0' || c > '9' {
			return fmt.Errorf("the time %q has characters that are no digits", b[:16])
		}
	}
	return checkZone(b[16])
}

// checkZone checks an offset from UTC, which counts quarters of an hour from -12 to +13 hours.
func checkZone(b byte) error {
	if zone := int8(b); zone < -48 || zone > 52 {
		return fmt.Errorf("time zone %d", zone)
	}
	return nil
}

// checkPathTables checks that every path table of a tree holds its root directory and nothing else (ECMA-119, 9.4).
func (d *disc) checkPathTables(t *tree, name string) error {
	const rootOnly = 10
	if t.pathTableSize != rootOnly {
		return fmt.Errorf("path table of %d bytes, not %d", t.pathTableSize, rootOnly)
	}
	tables := []struct {
		sector   uint32
		order    binary.ByteOrder
		name     string
		optional bool
	}{
		{t.pathTableL, binary.LittleEndian, "L", false},
		{t.moreTableL, binary.LittleEndian, "optional L", true},
		{t.pathTableM, binary.BigEndian, "M", false},
		{t.moreTableM, binary.BigEndian, "optional M", true},
	}
	for _, table := range tables {
		if table.optional && table.sector == 0 {
			continue
		}
		owner := name + " path table " + table.name
		b, err := d.claim(table.sector, rootOnly, owner)
		if err != nil {
			return err
		}
		if b[0] != 1 || b[1] != 0 || b[8] != 0 || b[9] != 0 || table.order.Uint16(b[6:]) != 1 {
			return fmt.Errorf("%s does not describe a root directory", owner)
		}
		if sector := table.order.Uint32(b[2:]); sector != t.root.sector {
			return fmt.Errorf("%s has the root directory in sector %d, not %d", owner, sector, t.root.sector)
		}
	}
	return nil
}

func asciiLabel(b []byte) (string, error) {
	for _, c := range b {
		if c < ' ' || c > '~' {
			return "", fmt.Errorf("the label %q is not printable", b)
		}
	}
	return strings.TrimRight(string(b), " "), nil
}

func ucs2Label(b []byte) (string, error) {
	label, err := decodeUCS2(b)
	if err != nil {
		return "", fmt.Errorf("the Joliet label: %w", err)
	}
	return strings.TrimRight(label, " "), nil
}

func decodeUCS2(b []byte) (string, error) {
	if len(b)%2 != 0 {
		return "", fmt.Errorf("an odd number of bytes: %d", len(b))
	}
	units := make([]uint16, 0, len(b)/2)
	for ; len(b) > 0; b = b[2:] {
		unit := binary.BigEndian.Uint16(b)
		if unit < ' ' || utf16.IsSurrogate(rune(unit)) {
			return "", fmt.Errorf("%#04x is not a character", unit)
		}
		units = append(units, unit)
	}
	return string(utf16.Decode(units)), nil
}
