package fake

import "bytes"

// A file is a file on the host. Its content is kept in chunks; what was never written is not kept and reads as zeros.
type file struct {
	inode  int64
	path   string
	size   int64
	chunks map[int64][]byte

	reserved int64 // bytes that were allocated up front
	written  int64 // the end of what was written; it is written from the start on
	opened   int   // guests and transfers that hold it open
}

const (
	chunkBytes = 64 << 10
	blockBytes = 4 << 10 // file systems allocate whole blocks
)

func (h *Host) newFile(path string) *file {
	h.inodes++
	return &file{inode: h.inodes, path: path, chunks: map[int64][]byte{}}
}

// allocated is what the file takes up on disk.
func (f *file) allocated() int64 { return max(f.reserved, wholeBlocks(f.written)) }

func wholeBlocks(n int64) int64 { return (n + blockBytes - 1) / blockBytes * blockBytes }

// write puts p at offset.
func (f *file) write(p []byte, offset int64) {
	end := offset + int64(len(p))
	f.size, f.written = max(f.size, end), max(f.written, end)
	for len(p) > 0 {
		index, at := offset/chunkBytes, offset%chunkBytes
		n := min(chunkBytes-at, int64(len(p)))
		if f.chunks[index] != nil || !allZero(p[:n]) {
			copy(f.chunk(index)[at:], p[:n])
		}
		p, offset = p[n:], offset+n
	}
}

func (f *file) chunk(index int64) []byte {
	if f.chunks[index] == nil {
		f.chunks[index] = make([]byte, chunkBytes)
	}
	return f.chunks[index]
}

func allZero(p []byte) bool { return bytes.Equal(p, make([]byte, len(p))) }

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
