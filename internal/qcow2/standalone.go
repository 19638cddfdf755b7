package qcow2

import (
	"fmt"
	"math/bits"
	"strings"
)

// RefusedError says why an image is refused. Its text is a sentence for the person who chose the image, and quotes nothing
// but numbers from it.
type RefusedError struct {
	// Feature is what the image has, lacks or gets wrong, in a word or two that do not change: "backing file".
	Feature string

	reason string
}

// Error returns the reason as a sentence without a period at its end.
func (e *RefusedError) Error() string { return e.reason }

func refuse(feature, format string, args ...any) *RefusedError {
	return &RefusedError{Feature: feature, reason: fmt.Sprintf(format, args...)}
}

func refuseTruncated(length int) *RefusedError {
	return refuse("truncated", "the image's header goes on behind the %d bytes that are there", length)
}

// CheckStandalone returns a [*RefusedError] unless the image holds a whole disk by itself and QEMU can read it without
// repair: nothing that it says makes QEMU open another file, ask for a key, or run into damage.
//
// A dirty image is accepted. Its reference counts may be stale, but they matter only to a writer, and kvm2 uses an image
// as the read-only base of overlays.
func (h Header) CheckStandalone() error {
	if h.BackingFile {
		return refuse("backing file", "the image names a backing file: it would let the image read files of the host")
	}
	if h.ExternalDataFile {
		return refuse("external data file",
			"the image keeps its data in an external file: it would let the image read and write files of the host")
	}
	if h.Encrypted {
		return refuse("encryption", "the image is encrypted: a machine could not read it without a key, and kvm2 has none to give")
	}
	if h.IncompatibleFeatures&FeatureCorrupt != 0 {
		return refuse("corrupt", "the image is marked as corrupt: QEMU found its metadata damaged and would not write to it")
	}
	const known = FeatureDirty | FeatureCorrupt | FeatureExternalDataFile | FeatureCompressionType | FeatureExtendedL2
	if unknown := h.IncompatibleFeatures &^ known; unknown != 0 {
		return refuse("unknown features", "the image needs features that are not known (incompatible feature %s): "+
			"what they make QEMU do cannot be judged", bitNumbers(unknown))
	}
	return h.checkVirtualSize()
}

func (h Header) checkVirtualSize() error {
	if h.VirtualSize == 0 {
		return refuse("virtual size", "the image has a virtual size of 0 bytes: there is no disk in it")
	}
	if h.VirtualSize > MaxVirtualSize {
		return refuse("virtual size", "the image has a virtual size of %d bytes: more than %d is taken for damage",
			h.VirtualSize, int64(MaxVirtualSize))
	}
	return nil
}

// bitNumbers lists the bits that are set, for example "bits 5, 63".
func bitNumbers(mask uint64) string {
	var numbers []string
	for ; mask != 0; mask &= mask - 1 {
		numbers = append(numbers, fmt.Sprint(bits.TrailingZeros64(mask)))
	}
	if len(numbers) == 1 {
		return "bit " + numbers[0]
	}
	return "bits " + strings.Join(numbers, ", ")
}
