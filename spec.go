package kvm2

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxUserDataBytes bounds UserData, VendorData and NetworkConfig, each. cloud-init itself has no limit; a seed is
// written anew by every Create until the machine exists, so it should stay small.
const MaxUserDataBytes = 1 << 20

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30
	tib = int64(1) << 40

	maxDisks  = 16
	maxNICs   = 8
	maxLabels = 64
)

var (
	nameForm   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	diskForm   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	digestForm = regexp.MustCompile(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)
)

// Validate reports everything that is wrong with s, joined; each fault names its field, and is of class Permanent,
// ErrInvalidSpec. Create validates by itself.
func (s Spec) Validate() error {
	v := &specFaults{}
	v.identity(s)
	v.image(s.Image)
	v.hardware(s)
	v.disks(s.Disks)
	v.nics(s.NICs)
	v.bootstrap(s)
	return errors.Join(v.faults...)
}

// specFaults collects what is wrong with a Spec.
type specFaults struct{ faults []error }

func (v *specFaults) add(field, format string, args ...any) {
	v.faults = append(v.faults, invalidf("%s: %w", field, fmt.Errorf(format, args...)))
}

func (v *specFaults) identity(s Spec) {
	if !nameForm.MatchString(s.Name) {
		v.add("name", "%q: want 1 to 63 lower-case letters, digits and dashes, a letter or digit at both ends (a DNS label)", clip(s.Name))
	}
	if s.OwnerUID == "" {
		v.add("ownerUID", "is missing: want the unique ID of the object that the machine belongs to")
	} else if len(s.OwnerUID) > 128 || strings.ContainsFunc(s.OwnerUID, func(r rune) bool { return r <= ' ' || r > '~' }) {
		v.add("ownerUID", "%q: want at most 128 printable ASCII characters without spaces", clip(s.OwnerUID))
	}
	if len(s.Labels) > maxLabels {
		v.add("labels", "%d labels: want at most %d", len(s.Labels), maxLabels)
	}
	for _, key := range slices.Sorted(maps.Keys(s.Labels)) {
		value := s.Labels[key]
		if key == "" || len(key) > 128 || !printable(key) {
			v.add("labels", "key %q: want 1 to 128 bytes of printable text", clip(key))
		}
		if len(value) > 256 || !printable(value) {
			v.add("labels", "value of %q: want at most 256 bytes of printable text", clip(key))
		}
	}
}

// printable reports whether s is text that XML can carry unchanged.
func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) })
}

func (v *specFaults) image(i Image) {
	if i.Volume != "" {
		v.imageVolume(i)
		return
	}
	if i.URL == "" {
		v.add("image.url", "is missing: want http://, https://, file:///PATH or a scheme of your own, or else image.volume")
	} else {
		v.fileURL("image.url", i.URL)
	}
	if i.ChecksumURL != "" {
		v.imageSums(i)
		return
	}
	if !digestForm.MatchString(i.Checksum) {
		v.add("image.checksum", "%q: want sha256: and 64, or sha512: and 128 lower-case hexadecimal digits, or else image.checksumURL", clip(i.Checksum))
	}
}

// fileURL checks the form of a URL. Which schemes there are, the Provider knows.
func (v *specFaults) fileURL(field, rawURL string) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		v.add(field, "is not a URL") // url's own message quotes it all, with a password
	case u.Scheme == "":
		v.add(field, "has no scheme: want http://, https://, file:///PATH or a scheme of your own")
	case u.Scheme == "http" || u.Scheme == "https":
		if u.Hostname() == "" {
			v.add(field, "names no host")
		}
	case u.Scheme == "file" && (u.Host != "" || !path.IsAbs(u.Path)):
		v.add(field, "want file:///PATH with an absolute path")
	}
}

func (v *specFaults) imageSums(i Image) {
	v.fileURL("image.checksumURL", i.ChecksumURL)
	if u, err := url.Parse(i.ChecksumURL); err == nil && u.Scheme == "http" {
		v.add("image.checksumURL", "scheme %q: want https, file or a scheme of your own: nothing else vouches for the image", u.Scheme)
	}
	if i.Checksum != "" {
		v.add("image.checksumURL", "stands beside image.checksum: want one of them")
	}
	if i.URL != "" && baseName(i.URL) == "" {
		v.add("image.url", "ends in no file name, by which image.checksumURL could be searched")
	}
}

func (v *specFaults) imageVolume(i Image) {
	switch {
	case i.URL != "":
		v.add("image.volume", "stands beside image.url: want one of them")
	case i.Checksum != "" || i.ChecksumURL != "":
		v.add("image.volume", "stands beside a checksum, which is for images by URL")
	}
	switch {
	case len(i.Volume) > 255 || strings.Contains(i.Volume, "/") || i.Volume == "." || i.Volume == ".." || !printable(i.Volume):
		v.add("image.volume", "%q: want the name of a volume: at most 255 bytes of printable text without a slash", clip(i.Volume))
	case isOwnVolume(i.Volume):
		v.add("image.volume", "%q is called as kvm2 calls the volumes that it makes and removes: want one of your own", clip(i.Volume))
	}
}

func (v *specFaults) hardware(s Spec) {
	if s.CPUs < 1 || s.CPUs > 512 {
		v.add("cpus", "%d: want 1 to 512", s.CPUs)
	}
	if s.MemoryBytes < 64*mib || s.MemoryBytes > 16*tib || s.MemoryBytes%kib != 0 {
		v.add("memoryBytes", "%d: want 64 MiB (%d) to 16 TiB (%d), a multiple of 1024", s.MemoryBytes, 64*mib, 16*tib)
	}
	if s.RootDiskBytes < mib || s.RootDiskBytes > 64*tib || s.RootDiskBytes%512 != 0 {
		v.add("rootDiskBytes", "%d: want 1 MiB (%d) to 64 TiB (%d), a multiple of 512", s.RootDiskBytes, mib, 64*tib)
	}
	if s.Firmware != FirmwareDefault && s.Firmware != FirmwareBIOS && s.Firmware != FirmwareEFI {
		v.add("firmware", "%q: want %q, %q or nothing", clip(string(s.Firmware)), FirmwareBIOS, FirmwareEFI)
	}
}

func (v *specFaults) disks(disks []Disk) {
	if len(disks) > maxDisks {
		v.add("disks", "%d disks: want at most %d", len(disks), maxDisks)
		return
	}
	seen := map[string]bool{}
	for i, d := range disks {
		field := fmt.Sprintf("disks[%d]", i)
		if !diskForm.MatchString(d.Name) {
			v.add(field+".name", "%q: want 1 to 32 lower-case letters, digits and dashes, a letter or digit at both ends", clip(d.Name))
		} else if seen[d.Name] {
			v.add(field+".name", "%q stands twice", d.Name)
		}
		seen[d.Name] = true
		if d.SizeBytes < mib || d.SizeBytes > 64*tib || d.SizeBytes%512 != 0 {
			v.add(field+".sizeBytes", "%d: want 1 MiB (%d) to 64 TiB (%d), a multiple of 512", d.SizeBytes, mib, 64*tib)
		}
	}
}

func (v *specFaults) nics(nics []NIC) {
	if len(nics) > maxNICs {
		v.add("nics", "%d interfaces: want at most %d", len(nics), maxNICs)
		return
	}
	for i, n := range nics {
		if n.Network != "" && !objectForm.MatchString(n.Network) {
			v.add(fmt.Sprintf("nics[%d].network", i), "%q: want letters, digits and _.:+-", clip(n.Network))
		}
	}
}

func (v *specFaults) bootstrap(s Spec) {
	for _, d := range []struct {
		field string
		data  []byte
	}{{"userData", s.UserData}, {"vendorData", s.VendorData}, {"networkConfig", s.NetworkConfig}} {
		if len(d.data) > MaxUserDataBytes {
			v.add(d.field, "%d bytes: want at most %d", len(d.data), MaxUserDataBytes)
		}
	}
}

// withDefaults fills what the Config decides.
func (s Spec) withDefaults(c Config) Spec {
	nics := make([]NIC, max(1, len(s.NICs)))
	copy(nics, s.NICs)
	for i := range nics {
		fill(&nics[i].Network, c.Network)
	}
	s.NICs = nics
	if s.Firmware == FirmwareDefault {
		s.Firmware = FirmwareBIOS
		if c.Arch == archARM {
			s.Firmware = FirmwareEFI
		}
	}
	return s
}
