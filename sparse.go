package kvm2

import (
	"bytes"
	"errors"
	"io"
)

// minHole is how long a run of zeros must be not to be sent. Beginning another range costs three round trips and a look of
// libvirtd at the whole pool; 8 MiB of zeros cost about as much over a link of 100 MB/s and 25 ms.
const minHole = 8 * mib

// dataRanges cuts a file into the ranges that are to be sent: it leaves out runs of more than hole zeros. Begin moves on to
// the next range, Read reads it to its end. The file's last byte is always in a range, so that the copy gets its length.
type dataRanges struct {
	source interface{ next() ([]byte, error) }
	hole   int64

	offset int64  // of what follows
	zeros  int64  // that come first
	data   []byte // then come these, which neither begin nor end with a zero
	tail   int64  // and then so many zeros
	err    error  // of the source
}

// begin skips the zeros before the next range and returns its offset; io.EOF after the last range.
func (d *dataRanges) begin() (int64, error) {
	for len(d.data) == 0 {
		if err := d.advance(); err != nil {
			return 0, err
		}
	}
	if d.zeros >= d.hole { // of one more, the last may have become data
		d.offset += d.zeros
		d.zeros = 0
	}
	return d.offset, nil
}

// Read reads the current range. It does not wait for the end of the hole that ends it.
func (d *dataRanges) Read(p []byte) (int, error) {
	for len(d.data) == 0 && d.zeros <= d.hole {
		if err := d.advance(); err != nil {
			return 0, err
		}
	}
	if d.zeros > d.hole {
		return 0, io.EOF
	}
	n := int(min(d.zeros, int64(len(p))))
	clear(p[:n])
	d.zeros -= int64(n)
	m := copy(p[n:], d.data)
	d.data = d.data[m:]
	d.offset += int64(n + m)
	return n + m, nil
}

// advance goes on to what follows the data: zeros, and the source's next piece or, at its end, the last of the zeros.
func (d *dataRanges) advance() error {
	d.zeros, d.tail = d.zeros+d.tail, 0
	if d.err == nil {
		d.take()
		return nil
	}
	if !errors.Is(d.err, io.EOF) || d.zeros == 0 {
		return d.err
	}
	d.zeros, d.data = d.zeros-1, lastZero[:]
	return nil
}

var lastZero [1]byte

// take takes the source's next piece apart.
func (d *dataRanges) take() {
	var piece []byte
	if piece, d.err = d.source.next(); d.err != nil {
		return
	}
	rest := trimZeros(piece)
	d.zeros += int64(len(piece) - len(rest))
	d.data = bytes.TrimRight(rest, "\x00")
	d.tail = int64(len(rest) - len(d.data))
}

var zeroPage [4 << 10]byte

// trimZeros cuts off the zeros at the beginning, whole pages at a time first: holes are to be passed over fast.
func trimZeros(b []byte) []byte {
	for len(b) >= len(zeroPage) && bytes.Equal(b[:len(zeroPage)], zeroPage[:]) {
		b = b[len(zeroPage):]
	}
	return bytes.TrimLeft(b, "\x00")
}
