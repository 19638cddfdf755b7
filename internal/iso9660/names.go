package iso9660

import (
	"cmp"
	"strconv"
	"strings"
	"unicode/utf16"
)

// plainName is a file name of ISO 9660 interchange level 1.
type plainName struct {
	base string // one to eight d-characters: A-Z, 0-9 and _
	ext  string // up to three
}

const (
	maxBase = 8
	maxExt  = 3
)

// String returns the name as a directory record has it, with the version that every file has.
func (n plainName) String() string { return n.base + "." + n.ext + ";1" }

// compare orders names as ECMA-119, 9.3 does. It pads with spaces, which sort before every d-character, so that a name
// sorts before the ones that it begins.
func (n plainName) compare(other plainName) int {
	return cmp.Or(cmp.Compare(n.base, other.base), cmp.Compare(n.ext, other.ext))
}

// plainNames derives a different plain name for each file. Where two would be alike, the second one in the order of
// files ends in a number.
func plainNames(files []File) []plainName {
	names := make([]plainName, len(files))
	taken := make(map[plainName]bool, len(files))
	for i, f := range files {
		names[i] = freeName(derivePlainName(f.Name), taken)
		taken[names[i]] = true
	}
	return names
}

func derivePlainName(name string) plainName {
	base, ext := cutExtension(name)
	n := plainName{base: dCharacters(base, maxBase), ext: dCharacters(ext, maxExt)}
	if n.base == "" {
		n.base = "_"
	}
	return n
}

func freeName(n plainName, taken map[plainName]bool) plainName {
	free := n
	for i := 1; taken[free]; i++ {
		suffix := strconv.Itoa(i)
		free.base = n.base[:min(len(n.base), maxBase-len(suffix))] + suffix
	}
	return free
}

// cutExtension cuts a name at its last period.
func cutExtension(name string) (base, ext string) {
	i := strings.LastIndexByte(name, '.')
	if i < 0 {
		return name, ""
	}
	return name[:i], name[i+1:]
}

// dCharacters returns at most limit characters of an ASCII string, in upper case and with an underscore for each one that
// a plain name cannot hold.
func dCharacters(s string, limit int) string {
	upper := strings.ToUpper(s[:min(len(s), limit)])
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, upper)
}

// ucs2 encodes an ASCII string as Joliet does, in big-endian UCS-2.
func ucs2(s string) []byte {
	var out []byte
	for _, unit := range utf16.Encode([]rune(s)) {
		out = append(out, byte(unit>>8), byte(unit))
	}
	return out
}
