package isotest

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

const (
	flagDirectory = 0x02

	recordHeader = 33 // bytes before the identifier
)

// record is a directory record (ECMA-119, 9.1).
type record struct {
	sector, size uint32
	flags        byte
	identifier   []byte
	systemUse    []byte
}

func (r record) isDirectory() bool { return r.flags == flagDirectory }

// parseRecord reads a directory record that fills b.
func parseRecord(b []byte) (record, error) {
	var r record
	var err error
	if len(b) < recordHeader+1 || int(b[0]) != len(b) || len(b)%2 != 0 {
		return r, fmt.Errorf("a record of %d bytes", len(b))
	}
	if !allZero(b[1:2]) || !allZero(b[26:28]) {
		return r, errors.New("extended attributes or interleaving")
	}
	if r.sector, err = both32(b[2:]); err != nil {
		return r, err
	}
	if r.size, err = both32(b[10:]); err != nil {
		return r, err
	}
	if err := checkTime(b[18:25]); err != nil {
		return r, err
	}
	if r.flags = b[25]; r.flags != 0 && r.flags != flagDirectory {
		return r, fmt.Errorf("file flags %#x", r.flags)
	}
	volume, err := both16(b[28:])
	if err != nil {
		return r, err
	}
	if volume != 1 {
		return r, fmt.Errorf("volume number %d", volume)
	}
	end := recordHeader + int(b[32])
	systemUse := end + (end % 2)
	if b[32] == 0 || systemUse > len(b) {
		return r, fmt.Errorf("an identifier of %d bytes in a record of %d", b[32], len(b))
	}
	if !allZero(b[end:systemUse]) {
		return r, errNotZero
	}
	r.identifier = b[recordHeader:end]
	r.systemUse = b[systemUse:]
	return r, nil
}

// checkTime checks a time of seven numbers, which are all zero when it is not specified (ECMA-119, 9.1.5).
func checkTime(b []byte) error {
	if allZero(b) {
		return nil
	}
	month, day, hour, minute, second := b[1], b[2], b[3], b[4], b[5]
	if month < 1 || month > 12 || day < 1 || day > 31 || hour > 23 || minute > 59 || second > 59 {
		return fmt.Errorf("the time % d does not exist", b[:6])
	}
	return checkZone(b[6])
}

// readDirectory returns the records of a root directory: its own, its parent's (which is itself) and those of the files.
func (d *disc) readDirectory(root record, name string) (self, parent record, files []record, err error) {
	if root.size == 0 || root.size%sectorSize != 0 {
		return self, parent, nil, fmt.Errorf("a root directory of %d bytes", root.size)
	}
	b, err := d.claim(root.sector, root.size, name+" root directory")
	if err != nil {
		return self, parent, nil, err
	}
	var records []record
	for ; len(b) > 0; b = b[sectorSize:] {
		inSector, err := parseSector(b[:sectorSize])
		if err != nil {
			return self, parent, nil, err
		}
		records = append(records, inSector...)
	}
	if len(records) < 2 {
		return self, parent, nil, errors.New("the records of the directory itself and of its parent are missing")
	}
	for i, r := range records[:2] {
		if string(r.identifier) != string([]byte{byte(i)}) || !r.isDirectory() || r.sector != root.sector || r.size != root.size {
			return self, parent, nil, fmt.Errorf("record %d does not name the root directory", i)
		}
	}
	for _, r := range records[2:] {
		if r.isDirectory() {
			return self, parent, nil, fmt.Errorf("%q is a directory", r.identifier)
		}
	}
	return records[0], records[1], records[2:], nil
}

// parseSector reads the records of one sector of a directory. Records do not go on in the next sector; behind the last
// one there are zeros.
func parseSector(b []byte) ([]record, error) {
	var records []record
	for len(b) > 0 && b[0] != 0 {
		length := int(b[0])
		if length > len(b) {
			return nil, errors.New("a record crosses the end of its sector")
		}
		r, err := parseRecord(b[:length])
		if err != nil {
			return nil, err
		}
		records = append(records, r)
		b = b[length:]
	}
	if !allZero(b) {
		return nil, errNotZero
	}
	return records, nil
}

// content returns a file's bytes. Two records may name the very same extent.
func (d *disc) content(r record) ([]byte, error) {
	return d.claim(r.sector, r.size, fmt.Sprintf("the file of %d bytes in sector %d", r.size, r.sector))
}

// plainForm is a file identifier of interchange level 1 (ECMA-119, 7.5 and 10.1).
var plainForm = regexp.MustCompile(`^([A-Z0-9_]{0,8})\.([A-Z0-9_]{0,3});1$`)

func (d *disc) readPrimaryTree(t *tree, v *Volume) error {
	if err := d.checkPathTables(t, "primary"); err != nil {
		return err
	}
	self, parent, files, err := d.readDirectory(t.root, "primary")
	if err != nil {
		return err
	}
	v.ISO = make(map[string][]byte)
	var last string
	for _, r := range files {
		name := string(r.identifier)
		parts := plainForm.FindStringSubmatch(name)
		if parts == nil || parts[1]+parts[2] == "" {
			return fmt.Errorf("%q is not a file identifier", name)
		}
		// Padded with spaces to their full length, names compare byte by byte (ECMA-119, 9.3).
		key := fmt.Sprintf("%-8s%-3s", parts[1], parts[2])
		if key <= last {
			return fmt.Errorf("%q is out of order", name)
		}
		last = key
		if v.ISO[name], err = d.content(r); err != nil {
			return err
		}
	}
	return d.readRockRidge(self, parent, files, v)
}

const jolietMaxName = 128 // bytes

func (d *disc) readJolietTree(t *tree, v *Volume) error {
	if err := d.checkPathTables(t, "Joliet"); err != nil {
		return err
	}
	_, _, files, err := d.readDirectory(t.root, "Joliet")
	if err != nil {
		return err
	}
	v.Joliet = make(map[string][]byte)
	var last string
	for _, r := range files {
		name, err := decodeUCS2(r.identifier)
		if err != nil {
			return err
		}
		name = strings.TrimSuffix(name, ";1")
		if len(r.identifier) > jolietMaxName || name == "" || strings.ContainsAny(name, `*/:;?\`) {
			return fmt.Errorf("%q is not a Joliet name", name)
		}
		// As in the primary tree, but padded with zeros.
		stem, ext := name, ""
		if dot := strings.LastIndex(name, "."); dot >= 0 {
			stem, ext = name[:dot], name[dot+1:]
		}
		key := stem + "\x00" + ext
		if key <= last {
			return fmt.Errorf("%q is out of order", name)
		}
		last = key
		if v.Joliet[name], err = d.content(r); err != nil {
			return err
		}
	}
	return nil
}
