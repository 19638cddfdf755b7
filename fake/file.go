package fake

import (
	"cmp"
	"path"
	"slices"
)

// A file is a file on the host. Its content is kept in chunks; what was never written, and a chunk of zeros, is not kept
// and reads as zeros. The chunks are small, since images and seeds are mostly zeros with a few bytes in between.
type file struct {
	inode  int64
	path   string
	size   int64
	chunks map[int64]*[chunkBytes]byte

	stored []extent // what takes up space on disk: sorted, apart from each other, in whole blocks
	opened int      // guests and transfers that hold it open
	locked bool     // a guest writes to it

	pool     *pool // on whose file system it takes up space; nil: none yet, or no more
	unlinked bool  // it is deleted
}

// extent is a range of a file.
type extent struct{ from, to int64 }

const (
	chunkBytes = 512
	blockBytes = 4 << 10 // file systems allocate whole blocks
)

func (h *Host) newFile(path string) *file {
	h.inodes++
	return &file{inode: h.inodes, path: path, chunks: map[int64]*[chunkBytes]byte{}}
}

// allocated is what the file takes up on disk.
func (f *file) allocated() int64 {
	var n int64
	for _, e := range f.stored {
		n += e.to - e.from
	}
	return n
}

// store makes a range take up space.
func (f *file) store(from, to int64) {
	if from >= to {
		return
	}
	f.stored = append(f.stored, extent{from / blockBytes * blockBytes, wholeBlocks(to)})
	slices.SortFunc(f.stored, func(a, b extent) int { return cmp.Compare(a.from, b.from) })
	merged := f.stored[:1]
	for _, e := range f.stored[1:] {
		if last := &merged[len(merged)-1]; e.from <= last.to {
			last.to = max(last.to, e.to)
		} else {
			merged = append(merged, e)
		}
	}
	f.stored = merged
}

// room is how much can be written at offset when so much of the file system is free.
func (f *file) room(offset, free int64) int64 {
	end := offset / blockBytes * blockBytes
	for _, e := range f.stored {
		gap := max(0, e.from-end)
		if gap > free {
			break
		}
		if e.to > end {
			free, end = free-gap, e.to
		}
	}
	return max(0, end+free-offset)
}

func wholeBlocks(n int64) int64 { return (n + blockBytes - 1) / blockBytes * blockBytes }

// write puts p at offset.
func (f *file) write(p []byte, offset int64) {
	f.grow(offset, offset+int64(len(p)))
	for len(p) > 0 {
		index, at := offset/chunkBytes, offset%chunkBytes
		n := min(chunkBytes-at, int64(len(p)))
		if f.chunks[index] != nil || !allZero(p[:n]) {
			copy(f.chunk(index)[at:], p[:n])
		}
		p, offset = p[n:], offset+n
	}
}

// grow accounts for a write of a range.
func (f *file) grow(from, to int64) {
	before := f.allocated()
	f.size = max(f.size, to)
	f.store(from, to)
	if f.pool == nil {
		return
	}
	f.pool.taken += f.allocated() - before
	if !f.unlinked {
		f.pool.changed[path.Base(f.path)] = true
	}
}

// close is the end of one guest's or transfer's use.
func (f *file) close() {
	f.opened--
	f.release()
}

// release gives the file's space back if it is deleted and nobody holds it open.
func (f *file) release() {
	if f.unlinked && f.opened == 0 && f.pool != nil {
		f.pool.taken -= f.allocated()
		f.pool = nil
	}
}

func (f *file) chunk(index int64) *[chunkBytes]byte {
	if f.chunks[index] == nil {
		f.chunks[index] = new([chunkBytes]byte)
	}
	return f.chunks[index]
}

func allZero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// read copies what is at offset into p, and returns how much there was.
func (f *file) read(p []byte, offset int64) int {
	p = p[:max(0, min(int64(len(p)), f.size-offset))]
	clear(p)
	for done := int64(0); done < int64(len(p)); {
		index, at := (offset+done)/chunkBytes, (offset+done)%chunkBytes
		n := min(chunkBytes-at, int64(len(p))-done)
		if chunk := f.chunks[index]; chunk != nil {
			copy(p[done:done+n], chunk[at:])
		}
		done += n
	}
	return len(p)
}

// content returns a copy of all of it.
func (f *file) content() []byte {
	p := make([]byte, f.size)
	f.read(p, 0)
	return p
}
