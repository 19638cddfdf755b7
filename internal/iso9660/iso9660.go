// Package iso9660 writes small read-only file systems for a machine to find at its first boot.
//
// A volume is ISO 9660 (ECMA-119) with one flat directory, which three kinds of readers see under the same names:
//
//   - Linux reads the Rock Ridge names (IEEE P1282, over SUSP, IEEE P1281);
//   - Windows reads the Joliet names (UCS-2, level 3);
//   - readers that know neither see the plain names, in upper case and cut to eight and three characters.
//
// The same volume always has the same bytes: nothing in it depends on the clock, on chance or on the order of the files.
package iso9660

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

const (
	// MaxLabel is the longest volume label in bytes: Joliet has room for 16 characters.
	MaxLabel = 16

	// MaxName is the longest file name in bytes: Joliet ends at 64 characters.
	MaxName = 64

	// MaxFiles bounds the number of files of a volume.
	MaxFiles = 1024

	// MaxSize bounds the content of all files of a volume together, in bytes. A volume is built in memory.
	MaxSize = 64 << 20
)

// jolietForbidden are the printable characters that a Joliet name may not contain.
const jolietForbidden = `*/:;?\`

// File is a file in the root directory of a volume.
type File struct {
	// Name is printable ASCII of at most [MaxName] bytes, without any of * / : ; ? \ and not ending in a period or a space,
	// because a reader of the Joliet names would not see such a name as it is.
	Name string

	// Data is the content. It may be empty.
	Data []byte
}

// Build returns a volume with the given label and files. The order of the files does not matter.
//
// The label is printable ASCII of at most [MaxLabel] bytes and is kept as it is. The standard wants upper case in the
// primary label, but cloud-init looks for "cidata", and every reader takes lower case.
func Build(label string, files []File) ([]byte, error) {
	if err := validateLabel(label); err != nil {
		return nil, err
	}
	if err := validateFiles(files); err != nil {
		return nil, err
	}
	sorted := slices.SortedFunc(slices.Values(files), func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
	return newLayout(sorted).image(label), nil
}

func validateLabel(label string) error {
	if label == "" {
		return errors.New("iso9660: the volume label is empty")
	}
	if len(label) > MaxLabel {
		return fmt.Errorf("iso9660: the volume label has %d bytes, more than %d", len(label), MaxLabel)
	}
	if !isPrintableASCII(label) {
		return fmt.Errorf("iso9660: the volume label %q is not printable ASCII", label)
	}
	if strings.Trim(label, " ") != label {
		return fmt.Errorf("iso9660: the volume label %q begins or ends with a space, which readers take for padding", label)
	}
	return nil
}

func validateFiles(files []File) error {
	if len(files) > MaxFiles {
		return fmt.Errorf("iso9660: %d files, more than %d", len(files), MaxFiles)
	}
	seen := make(map[string]bool, len(files))
	size := 0
	for _, f := range files {
		if err := validateName(f.Name); err != nil {
			return err
		}
		if seen[f.Name] {
			return fmt.Errorf("iso9660: two files are named %q", f.Name)
		}
		seen[f.Name] = true
		if size += len(f.Data); size > MaxSize {
			return fmt.Errorf("iso9660: the files have more than %d bytes together", MaxSize)
		}
	}
	return nil
}

func validateName(name string) error {
	if name == "" {
		return errors.New("iso9660: a file name is empty")
	}
	if len(name) > MaxName {
		return fmt.Errorf("iso9660: the file name %q... has %d bytes, more than %d", name[:MaxName], len(name), MaxName)
	}
	if !isPrintableASCII(name) {
		return fmt.Errorf("iso9660: the file name %q is not printable ASCII", name)
	}
	if i := strings.IndexAny(name, jolietForbidden); i >= 0 {
		return fmt.Errorf("iso9660: the file name %q contains %q, which Joliet does not allow", name, name[i])
	}
	if last := name[len(name)-1]; last == '.' || last == ' ' {
		return fmt.Errorf("iso9660: the file name %q ends in %q, which readers of Joliet names cut off", name, last)
	}
	return nil
}

func isPrintableASCII(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
