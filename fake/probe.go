package fake

import (
	"encoding/binary"
	"path"

	"github.com/kvm2/kvm2/internal/qcow2"
)

// A head is what the first bytes of a file say about it.
type head struct {
	format        string
	capacity      int64
	backingPath   string
	backingFormat string
}

// The places of the qcow2 header that matter here (QEMU's docs/interop/qcow2).
const (
	qcow2Version       = 4
	qcow2BackingOffset = 8
	qcow2BackingSize   = 16
	qcow2Size          = 24
	qcow2HeaderLength  = 100
	qcow2HeaderV2      = 72
	qcow2HeaderV3      = 104
	qcow2BackingFormat = 0xE2792ACA // the header extension's type
)

// probeBytes is how far a header can reach: it has to fit into the first cluster, which is 64 KiB by default.
const probeBytes = 64 << 10

// probe looks at a file as libvirt does when a pool is refreshed.
func probe(f *file) head {
	b := make([]byte, probeBytes)
	b = b[:f.read(b, 0)]
	if len(b) < qcow2HeaderV2 || string(b[:qcow2Version]) != qcow2.Magic || !isQcow2Version(b) {
		return head{format: "raw", capacity: f.size}
	}
	h := head{format: "qcow2", capacity: int64(binary.BigEndian.Uint64(b[qcow2Size:]))}
	if h.backingPath = backingName(b); h.backingPath != "" {
		h.backingFormat = backingFormat(b)
	}
	return h
}

func isQcow2Version(b []byte) bool {
	v := binary.BigEndian.Uint32(b[qcow2Version:])
	return v == 2 || v == 3 && len(b) >= qcow2HeaderV3
}

func backingName(b []byte) string {
	offset := binary.BigEndian.Uint64(b[qcow2BackingOffset:])
	length := uint64(binary.BigEndian.Uint32(b[qcow2BackingSize:]))
	if offset == 0 || offset > uint64(len(b)) || length > uint64(len(b))-offset {
		return ""
	}
	return string(b[offset : offset+length])
}

// backingFormat finds the header extension that names the backing store's format; without it libvirt takes raw.
func backingFormat(b []byte) string {
	at := uint64(extensionsStart(b))
	for at+8 <= uint64(len(b)) {
		kind, length := binary.BigEndian.Uint32(b[at:]), uint64(binary.BigEndian.Uint32(b[at+4:]))
		at += 8
		if kind == 0 || length > uint64(len(b))-at {
			break
		}
		if kind == qcow2BackingFormat {
			return string(b[at : at+length])
		}
		at += (length + 7) &^ 7
	}
	return "raw"
}

func extensionsStart(b []byte) int {
	if binary.BigEndian.Uint32(b[qcow2Version:]) == 2 {
		return qcow2HeaderV2
	}
	return int(binary.BigEndian.Uint32(b[qcow2HeaderLength:]))
}

// newQcow2 returns the content of an image as qemu-img makes it, which is as good as empty.
func newQcow2(capacity int64, version uint32, backing head) ([]byte, error) {
	b, err := qcow2.MinimalImage(max(capacity, 512))
	if err != nil {
		return nil, err
	}
	const l1Table, l1Reach = 3 << 16, 512 << 20 // one entry of 8 bytes leads to 512 MiB
	b = b[:l1Table+8*max(1, (capacity+l1Reach-1)/l1Reach)]
	binary.BigEndian.PutUint64(b[qcow2Size:], uint64(capacity))
	binary.BigEndian.PutUint32(b[qcow2Version:], version)
	if version == 2 {
		clear(b[qcow2HeaderV2:qcow2HeaderV3])
	}
	if backing.backingPath != "" {
		addBacking(b, backing)
	}
	return b, nil
}

func addBacking(b []byte, backing head) {
	at := extensionsStart(b)
	binary.BigEndian.PutUint32(b[at:], qcow2BackingFormat)
	binary.BigEndian.PutUint32(b[at+4:], uint32(len(backing.backingFormat)))
	at += 8 + copy(b[at+8:], backing.backingFormat)
	at = (at + 7) &^ 7
	at += 8 // the extension that ends the header is all zeros
	binary.BigEndian.PutUint64(b[qcow2BackingOffset:], uint64(at))
	binary.BigEndian.PutUint32(b[qcow2BackingSize:], uint32(len(backing.backingPath)))
	copy(b[at:], backing.backingPath)
}

// relativeTo resolves a backing path, which may be relative to the directory of the overlay.
func relativeTo(overlay, backing string) string {
	if path.IsAbs(backing) {
		return path.Clean(backing)
	}
	return path.Join(path.Dir(overlay), backing)
}
