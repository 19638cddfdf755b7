package kvm2

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/kvm2/kvm2/internal/imageprobe"
)

// Decompressor reads compressed image files of one format.
type Decompressor struct {
	// Name is the format's name in errors, for example "xz".
	Name string
	// Magic begins every file of the format: 1 to 64 bytes.
	Magic []byte
	// NewReader returns what is in a compressed file. What it returns is closed if it is an io.Closer, and must not
	// read any more then. Errors of either mean that the file is not what it should be. The file's checksum is known to
	// be right only at its end, so the memory that it can make the reader take should be bounded. NewReader is called by
	// several goroutines.
	NewReader func(file io.Reader) (io.Reader, error)
}

// WithDecompressor adds a compression format beside gzip and bzip2, or takes the place of one of those. Of several
// whose magic fits, the one that was added last is taken.
func WithDecompressor(d Decompressor) Option {
	return func(o *options) {
		if d.Name == "" || len(d.Magic) == 0 || len(d.Magic) > maxMagic || d.NewReader == nil {
			o.fault("WithDecompressor: %q: want a name, a magic of 1 to %d bytes and a NewReader", clip(d.Name), maxMagic)
			return
		}
		d.Magic = bytes.Clone(d.Magic)
		o.sources.decompressors = slices.Concat([]Decompressor{d}, o.sources.decompressors)
	}
}

const maxMagic = 64

// decompressor finds the format of a file by its first bytes.
func (s imageSources) decompressor(head []byte) (Decompressor, bool) {
	for _, d := range s.decompressors {
		if bytes.HasPrefix(head, d.Magic) {
			return d, true
		}
	}
	switch name := imageprobe.Compression(head); name {
	case "gzip":
		return Decompressor{Name: name, NewReader: func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }}, true
	case "bzip2":
		return Decompressor{Name: name, NewReader: func(r io.Reader) (io.Reader, error) { return bzip2.NewReader(r), nil }}, true
	}
	return Decompressor{}, false
}

// fileReader reads an image file while hashing and counting it.
type fileReader struct {
	size int64 // 0 while unknown
	step func(int)

	mu     sync.Mutex // a decompressor may read in a goroutine of its own
	body   io.Reader
	digest hash.Hash
	n      int64
	err    error // that ended it; not io.EOF

	counting sync.Mutex
	stopped  bool
}

func (t *imageTransfer) newFileReader(src source) *fileReader {
	return &fileReader{body: src.body, size: src.size, digest: newDigest(t.image.Checksum), step: func(n int) {
		t.stalls.moved()
		t.progress.add(n)
	}}
}

func newDigest(checksum string) hash.Hash {
	if strings.HasPrefix(checksum, "sha512:") {
		return sha512.New()
	}
	return sha256.New()
}

func (f *fileReader) Read(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return 0, f.err
	}
	n, err := f.body.Read(p)
	f.digest.Write(p[:n])
	f.n += int64(n)
	f.count(n)
	if err != nil && !errors.Is(err, io.EOF) {
		f.err = transient(nil, "image: %w", err)
		if _, ok := errors.AsType[*Error](err); ok {
			f.err = err
		}
		err = f.err
	}
	return n, err
}

// count reports a read.
func (f *fileReader) count(n int) {
	f.counting.Lock()
	defer f.counting.Unlock()
	if !f.stopped {
		f.step(n)
	}
}

// stop ends the reports: a Read that is still under way belongs to no attempt any more.
func (f *fileReader) stop() {
	f.counting.Lock()
	defer f.counting.Unlock()
	f.stopped = true
}

// failure is the error that reading the file ended with, if it did.
func (f *fileReader) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// judge reads the file to its end, whatever a decompressor left of it, and makes sure that it is the right one. If it
// is, what remains is err, which its content gave rise to: a damaged file is what matters, not where it broke.
func (f *fileReader) judge(checksum string, err error) error {
	if err != nil && !errors.Is(err, errUnpack) {
		return err
	}
	if _, err := io.Copy(io.Discard, f); err != nil {
		return err
	}
	if f.size > 0 && f.n != f.size {
		return transient(nil, "image transfer: the source sent %d of %d bytes", f.n, f.size)
	}
	if got := hex.EncodeToString(f.digest.Sum(nil)); !strings.HasSuffix(checksum, ":"+got) {
		return permanent(ErrImage, "%w: want %s, got %s", errWrongChecksum, checksum, got)
	}
	return err
}

// imageContent is what is in an image file: the image as machines need it.
type imageContent struct {
	*bufio.Reader
	unpacked *unpackedReader // nil: the file is the image
}

// close frees what a decompressor holds. It may be called again.
func (c *imageContent) close() {
	if c.unpacked != nil {
		c.unpacked.close()
	}
}

// look unpacks a file and judges what is in it by its head.
func (t *imageTransfer) look(file *fileReader) (*imageContent, imageprobe.Info, error) {
	content, err := t.unpack(file)
	if err != nil {
		return nil, imageprobe.Info{}, file.judge(t.image.Checksum, err)
	}
	info, err := probe(content.Reader)
	if err != nil {
		content.close()
		return nil, imageprobe.Info{}, file.judge(t.image.Checksum, err)
	}
	return content, info, nil
}

// unpack returns what is in a file: what a decompressor makes of it, or the file itself.
func (t *imageTransfer) unpack(file *fileReader) (*imageContent, error) {
	in := bufio.NewReaderSize(file, imageprobe.HeadSize)
	head, err := in.Peek(maxMagic)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	d, ok := t.sources.decompressor(head)
	if !ok {
		return &imageContent{Reader: in}, nil
	}
	out := &unpackedReader{file: file, format: d.Name, most: t.cfg.Images.MaxExpandedBytes}
	out.r, err = d.NewReader(in)
	if err != nil {
		return nil, out.blame(err)
	}
	return &imageContent{Reader: bufio.NewReaderSize(out, imageprobe.HeadSize), unpacked: out}, nil
}

var errUnpack = errors.New("the file cannot be decompressed")

// unpackedReader is what a decompressor makes of a file, within bounds. Read is called by one goroutine; after an
// upload that failed it may still be under way when close is called.
type unpackedReader struct {
	r      io.Reader
	file   *fileReader
	format string
	n      int64
	most   int64

	mu      sync.Mutex
	reading bool
	closed  bool
}

func (u *unpackedReader) Read(p []byte) (int, error) {
	if !u.enter() {
		return 0, io.ErrClosedPipe
	}
	defer u.leave()
	n, err := u.r.Read(p)
	if u.n += int64(n); u.n > u.most {
		return 0, permanent(ErrImage, "the file holds more than %d bytes when decompressed: images.maxExpandedBytes allows no more", u.most)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = u.blame(err)
	}
	return n, err
}

func (u *unpackedReader) enter() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reading = !u.closed
	return u.reading
}

func (u *unpackedReader) leave() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reading = false
	if u.closed {
		u.free()
	}
}

// close closes the decompressor, or has the Read that is under way do it.
func (u *unpackedReader) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed && !u.reading {
		u.free()
	}
	u.closed = true
}

func (u *unpackedReader) free() {
	if c, ok := u.r.(io.Closer); ok {
		_ = c.Close()
	}
}

// blame tells an error of the source from one of the compressed bytes.
func (u *unpackedReader) blame(err error) error {
	if failure := u.file.failure(); failure != nil {
		return failure
	}
	return permanent(ErrImage, "%w (%s): %q", errUnpack, u.format, clip(err.Error()))
}
