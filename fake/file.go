package fake

import "path"

// A file is a file on the host. Its content is kept in chunks; what was never written, and a chunk of zeros, is not kept
// and reads as zeros. The chunks are small, since images and seeds are mostly zeros with a few bytes in between.
type file struct {
	inode  int64
	path   string
	size   int64
	chunks map[int64]*[chunkBytes]byte

	reserved int64 // bytes that were allocated up front
	written  int64 // the end of what was written; it is written from the start on
	opened   int   // guests and transfers that hold it open
	locked   bool  // a guest writes to it

	pool     *pool // on whose file system it takes up space; nil: none yet, or no more
	unlinked bool  // it is deleted
}

const (
	chunkBytes = 512
	blockBytes = 4 << 10 // file systems allocate whole blocks
)

func (h *Host) newFile(path string) *file {
	h.inodes++
	return &file{inode: h.inodes, path: path, chunks: map[int64]*[chunkBytes]byte{}}
}

// allocated is what the file takes up on disk.
func (f *file) allocated() int64 { return max(f.reserved, wholeBlocks(f.written)) }

func wholeBlocks(n int64) int64 { return (n + blockBytes - 1) / blockBytes * blockBytes }

// write puts p at offset.
func (f *file) write(p []byte, offset int64) {
	f.grow(offset + int64(len(p)))
	for len(p) > 0 {
		index, at := offset/chunkBytes, offset%chunkBytes
		n := min(chunkBytes-at, int64(len(p)))
		if f.chunks[index] != nil || !allZero(p[:n]) {
			copy(f.chunk(index)[at:], p[:n])
		}
		p, offset = p[n:], offset+n
	}
}

// grow accounts for a write that ends at end.
func (f *file) grow(end int64) {
	before := f.allocated()
	f.size, f.written = max(f.size, end), max(f.written, end)
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
