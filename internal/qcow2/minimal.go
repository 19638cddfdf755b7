package qcow2

import (
	"encoding/binary"
	"fmt"
)

const minimalClusterBits = 16

// MinimalImage returns an image, version 3, of the given virtual size in bytes, which reads as zeros. It stands on its own
// and passes qemu-img check. The size must be a positive multiple of 512 and at most [MaxVirtualSize].
func MinimalImage(virtualSize int64) ([]byte, error) {
	if virtualSize <= 0 || virtualSize > MaxVirtualSize || virtualSize%512 != 0 {
		return nil, fmt.Errorf("qcow2: a virtual size of %d bytes is not a positive multiple of 512 up to %d",
			virtualSize, int64(MaxVirtualSize))
	}
	const (
		clusterSize = 1 << minimalClusterBits

		// Clusters: the header, the table of reference counts, its one block, and the L1 table.
		refcountTable = 1 * clusterSize
		refcountBlock = 2 * clusterSize
		l1Table       = 3 * clusterSize

		refcountOrder = 4 // 16 bits each
	)
	f := fields{
		Magic:                 [4]byte([]byte(Magic)),
		Version:               3,
		ClusterBits:           minimalClusterBits,
		Size:                  uint64(virtualSize),
		L1TableOffset:         l1Table,
		RefcountTableOffset:   refcountTable,
		RefcountTableClusters: 1,
		RefcountOrder:         refcountOrder,
		HeaderLength:          minHeaderLengthV3,
	}
	f.L1Size = uint32(f.l1EntriesNeeded())
	end := (l1Table + 8*int(f.L1Size) + clusterSize - 1) &^ (clusterSize - 1)
	// What is not written is zero: the extension that ends the header, and an L1 table that leads nowhere.
	out := make([]byte, end)
	if _, err := binary.Encode(out, binary.BigEndian, f); err != nil {
		return nil, err
	}
	binary.BigEndian.PutUint64(out[refcountTable:], refcountBlock)
	for cluster := range end / clusterSize {
		binary.BigEndian.PutUint16(out[refcountBlock+2*cluster:], 1)
	}
	return out, nil
}
