package iso9660

import (
	"cmp"
	"slices"
)

const (
	sectorSize = 2048

	// The volume begins with sixteen unused sectors, the system area, and three volume descriptors.
	primarySector    = 16
	jolietSector     = 17
	terminatorSector = 18

	// Each directory tree has its path table twice, little-endian and big-endian. With the root alone, one is 10 bytes.
	primaryPathTableLSector = 19
	primaryPathTableMSector = 20
	jolietPathTableLSector  = 21
	jolietPathTableMSector  = 22

	firstDirectorySector = 23
)

// extent is a run of consecutive sectors.
type extent struct {
	sector uint32
	size   uint32 // in bytes
}

func (e extent) offset() int { return int(e.sector) * sectorSize }

// end returns the first sector behind the extent.
func (e extent) end() uint32 { return e.sector + sectors(e.size) }

func sectors(size uint32) uint32 { return (size + sectorSize - 1) / sectorSize }

// placedFile is a file with everything that its directory records say.
type placedFile struct {
	File
	plainName plainName
	content   extent
}

// layout says where in the volume everything is.
type layout struct {
	files       []placedFile // by name
	primaryRoot extent

	// The system use area of the root directory's own record is too small for the reference to Rock Ridge and goes on
	// here. It lies behind that directory because there are readers that only go forward.
	continuation extent

	jolietRoot extent
	sectors    uint32
}

// newLayout places the files, which are sorted by name, behind the two directories.
func newLayout(files []File) *layout {
	l := &layout{files: make([]placedFile, len(files))}
	names := plainNames(files)
	for i, f := range files {
		l.files[i] = placedFile{File: f, plainName: names[i]}
	}
	// The length of a record does not depend on where things are, so the directories can be measured before the files
	// are placed.
	l.primaryRoot = extent{sector: firstDirectorySector, size: directorySize(l.primaryRecords())}
	l.continuation = extent{sector: l.primaryRoot.end(), size: uint32(len(rockRidgeReference()))}
	l.jolietRoot = extent{sector: l.continuation.end(), size: directorySize(l.jolietRecords())}
	next := l.jolietRoot.end()
	for i := range l.files {
		f := &l.files[i]
		f.content = extent{sector: next, size: uint32(len(f.Data))}
		next = f.content.end()
	}
	// An empty last file points one past the end of everything else; a sector there keeps the pointer within the volume.
	if len(l.files) > 0 && len(l.files[len(l.files)-1].Data) == 0 {
		next++
	}
	l.sectors = next
	return l
}

func (l *layout) image(label string) []byte {
	image := make([]byte, int(l.sectors)*sectorSize)
	copy(image[primarySector*sectorSize:], l.primaryDescriptor(label))
	copy(image[jolietSector*sectorSize:], l.jolietDescriptor(label))
	copy(image[terminatorSector*sectorSize:], terminator())
	copy(image[primaryPathTableLSector*sectorSize:], pathTableL(l.primaryRoot))
	copy(image[primaryPathTableMSector*sectorSize:], pathTableM(l.primaryRoot))
	copy(image[jolietPathTableLSector*sectorSize:], pathTableL(l.jolietRoot))
	copy(image[jolietPathTableMSector*sectorSize:], pathTableM(l.jolietRoot))
	copy(image[l.continuation.offset():], rockRidgeReference())
	writeDirectory(image[l.primaryRoot.offset():], l.primaryRecords())
	writeDirectory(image[l.jolietRoot.offset():], l.jolietRecords())
	for _, f := range l.files {
		copy(image[f.content.offset():], f.Data)
	}
	return image
}

// primaryRecords returns the records of the root directory that the primary descriptor names, in their order.
func (l *layout) primaryRecords() [][]byte {
	byPlainName := slices.SortedFunc(slices.Values(l.files), func(a, b placedFile) int {
		return a.plainName.compare(b.plainName)
	})
	self := record{identifier: selfIdentifier, extent: l.primaryRoot, flags: flagDirectory}
	self.systemUse = rockRidgeSelf(l.continuation)
	parent := record{identifier: parentIdentifier, extent: l.primaryRoot, flags: flagDirectory}
	parent.systemUse = rockRidgeParent()
	records := [][]byte{directoryRecord(self), directoryRecord(parent)}
	for _, f := range byPlainName {
		records = append(records, directoryRecord(record{
			identifier: []byte(f.plainName.String()),
			extent:     f.content,
			systemUse:  rockRidgeFile(f.Name),
		}))
	}
	return records
}

// jolietRecords returns the records of the root directory that the Joliet descriptor names, in their order.
func (l *layout) jolietRecords() [][]byte {
	byJolietName := slices.SortedFunc(slices.Values(l.files), func(a, b placedFile) int {
		return compareJoliet(a.Name, b.Name)
	})
	records := [][]byte{
		directoryRecord(record{identifier: selfIdentifier, extent: l.jolietRoot, flags: flagDirectory}),
		directoryRecord(record{identifier: parentIdentifier, extent: l.jolietRoot, flags: flagDirectory}),
	}
	for _, f := range byJolietName {
		records = append(records, directoryRecord(record{identifier: ucs2(f.Name), extent: f.content}))
	}
	return records
}

// directorySize returns the size in bytes of a directory with these records: always whole sectors.
func directorySize(records [][]byte) uint32 {
	end := 0
	for _, r := range records {
		end = recordOffset(end, len(r)) + len(r)
	}
	return sectors(uint32(end)) * sectorSize
}

// writeDirectory writes the records into dir, a zeroed directory.
func writeDirectory(dir []byte, records [][]byte) {
	end := 0
	for _, r := range records {
		end = recordOffset(end, len(r))
		end += copy(dir[end:], r)
	}
}

// recordOffset returns where a record of the given length goes when end is the end of the one before it. A record does
// not cross the end of a sector (ECMA-119, 6.8.1.1).
func recordOffset(end, length int) int {
	if free := sectorSize - end%sectorSize; length > free {
		return end + free
	}
	return end
}

// compareJoliet orders names as ECMA-119, 9.3 does, the part before the last period first, with Joliet's padding of zeros.
func compareJoliet(a, b string) int {
	aBase, aExt := cutExtension(a)
	bBase, bExt := cutExtension(b)
	return cmp.Or(cmp.Compare(aBase, bBase), cmp.Compare(aExt, bExt))
}
