package isotest

import (
	"errors"
	"fmt"
	"strings"
)

// entry is a system use entry (SUSP, 4).
type entry struct {
	signature string
	data      []byte // behind the four bytes that every entry begins with
}

// maxAreas bounds how often a system use area may go on somewhere else, so that a chain that bites its tail ends.
const maxAreas = 16

const (
	fileTypeMask = 0o170000
	typeFile     = 0o100000
	typeDir      = 0o040000
)

// readRockRidge fills v.RockRidge and v.Modes when the root directory's record of itself announces shared system use areas.
func (d *disc) readRockRidge(self, parent record, files []record, v *Volume) error {
	if len(self.systemUse) == 0 {
		return nil
	}
	skip, err := sharingIndicator(self.systemUse)
	if err != nil {
		return err
	}
	selfEntries, err := d.entries(self.systemUse)
	if err != nil {
		return err
	}
	if err := checkExtension(selfEntries); err != nil {
		return err
	}
	parentEntries, err := d.entriesBehind(parent.systemUse, skip)
	if err != nil {
		return err
	}
	for _, entries := range [][]entry{selfEntries, parentEntries} {
		if _, err := modeOfType(typeDir, entries); err != nil {
			return fmt.Errorf("root directory: %w", err)
		}
	}
	v.RockRidge = make(map[string][]byte)
	v.Modes = make(map[string]uint32)
	for _, r := range files {
		if err := d.readRockRidgeFile(r, skip, v); err != nil {
			return fmt.Errorf("%q: %w", r.identifier, err)
		}
	}
	return nil
}

func (d *disc) readRockRidgeFile(r record, skip int, v *Volume) error {
	entries, err := d.entriesBehind(r.systemUse, skip)
	if err != nil {
		return err
	}
	mode, err := modeOfType(typeFile, entries)
	if err != nil {
		return err
	}
	name, err := alternateName(entries)
	if err != nil {
		return err
	}
	if _, ok := v.RockRidge[name]; ok {
		return fmt.Errorf("two files are named %q", name)
	}
	v.RockRidge[name], err = d.content(r)
	v.Modes[name] = mode
	return err
}

// sharingIndicator checks the SP entry, which comes first and says how many bytes to skip in all other records.
func sharingIndicator(area []byte) (skip int, err error) {
	if len(area) < 7 || string(area[:6]) != "SP\x07\x01\xbe\xef" {
		return 0, errors.New("the system use area of the root directory does not begin with SP")
	}
	return int(area[6]), nil
}

func (d *disc) entriesBehind(area []byte, skip int) ([]entry, error) {
	if skip > len(area) {
		return nil, fmt.Errorf("a system use area of %d bytes, of which %d are to be skipped", len(area), skip)
	}
	return d.entries(area[skip:])
}

// entries reads a system use area and the areas that continue it.
func (d *disc) entries(area []byte) ([]entry, error) {
	var all []entry
	for range maxAreas {
		here, next, err := d.parseArea(area)
		if err != nil {
			return nil, err
		}
		all = append(all, here...)
		if next == nil {
			return all, nil
		}
		area = next
	}
	return nil, fmt.Errorf("a system use area goes on %d times", maxAreas)
}

// parseArea reads one area. Where next is not nil, the entries go on there.
func (d *disc) parseArea(area []byte) (entries []entry, next []byte, err error) {
	for len(area) >= 4 {
		length := int(area[2])
		if length < 4 || length > len(area) || area[3] != 1 {
			return nil, nil, fmt.Errorf("system use entry %q has length %d and version %d", area[:2], length, area[3])
		}
		e := entry{signature: string(area[:2]), data: area[4:length]}
		area = area[length:]
		switch e.signature {
		case "ST":
			return entries, next, nil
		case "CE":
			if next != nil {
				return nil, nil, errors.New("a system use area goes on in two places")
			}
			if next, err = d.continuation(e.data); err != nil {
				return nil, nil, err
			}
		default:
			entries = append(entries, e)
		}
	}
	if !allZero(area) {
		return nil, nil, errNotZero
	}
	return entries, next, nil
}

func (d *disc) continuation(data []byte) ([]byte, error) {
	if len(data) != 24 {
		return nil, fmt.Errorf("a CE entry of %d bytes", len(data))
	}
	sector, err := both32(data)
	if err != nil {
		return nil, err
	}
	offset, err := both32(data[8:])
	if err != nil {
		return nil, err
	}
	length, err := both32(data[16:])
	if err != nil {
		return nil, err
	}
	if length == 0 || uint64(offset)+uint64(length) > sectorSize {
		return nil, fmt.Errorf("a continuation of %d bytes at %d does not fit its sector", length, offset)
	}
	b, err := d.claim(sector, sectorSize, "continued system use areas")
	if err != nil {
		return nil, err
	}
	return b[offset : offset+length], nil
}

// checkExtension looks for the ER entry of Rock Ridge, under any of the identifiers that its versions have.
func checkExtension(entries []entry) error {
	for _, e := range entries {
		if e.signature != "ER" || len(e.data) < 4 {
			continue
		}
		identifier, texts := int(e.data[0]), e.data[4:]
		if identifier+int(e.data[1])+int(e.data[2]) != len(texts) {
			return errors.New("the lengths in an ER entry do not add up")
		}
		switch string(texts[:identifier]) {
		case "RRIP_1991A", "IEEE_P1282", "IEEE_1282":
			return nil
		}
	}
	return errors.New("no ER entry of Rock Ridge")
}

// modeOfType returns the POSIX mode, which must have the given file type.
func modeOfType(fileType uint32, entries []entry) (uint32, error) {
	mode, err := posixMode(entries)
	if err != nil {
		return 0, err
	}
	if mode&fileTypeMask != fileType {
		return 0, fmt.Errorf("mode %#o has another file type than %#o", mode, fileType)
	}
	return mode, nil
}

// posixMode reads the PX entry. Its four or five numbers depend on the version of Rock Ridge.
func posixMode(entries []entry) (uint32, error) {
	for _, e := range entries {
		if e.signature != "PX" {
			continue
		}
		if len(e.data) != 32 && len(e.data) != 40 {
			return 0, fmt.Errorf("a PX entry of %d bytes", len(e.data))
		}
		for field := 8; field < len(e.data); field += 8 {
			if _, err := both32(e.data[field:]); err != nil {
				return 0, err
			}
		}
		return both32(e.data)
	}
	return 0, errors.New("no PX entry")
}

// alternateName joins the NM entries.
func alternateName(entries []entry) (string, error) {
	const continues = 0x01
	var name strings.Builder
	more := true
	for _, e := range entries {
		if e.signature != "NM" {
			continue
		}
		if !more || len(e.data) == 0 || e.data[0]&^continues != 0 {
			return "", fmt.Errorf("an NM entry that names no file: %q", e.data)
		}
		more = e.data[0]&continues != 0
		name.Write(e.data[1:])
	}
	if more || name.Len() == 0 || strings.ContainsAny(name.String(), "/\x00") {
		return "", fmt.Errorf("%q is not a whole file name", name.String())
	}
	return name.String(), nil
}
