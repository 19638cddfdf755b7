package kvm2_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
)

const (
	oneMiB = int64(1) << 20
	oneGiB = int64(1) << 30
	oneTiB = int64(1) << 40
)

var (
	hex64  = strings.Repeat("0123456789abcdef", 4)
	hex128 = strings.Repeat("0123456789abcdef", 8)
)

// validSpec is a Spec without optional fields.
func validSpec() kvm2.Spec {
	return kvm2.Spec{
		Name: "web-1", OwnerUID: "owner-1",
		Image: kvm2.Image{URL: "https://images.example/debian.qcow2", Checksum: "sha256:" + hex64},
		CPUs:  2, MemoryBytes: oneGiB, RootDiskBytes: 10 * oneGiB,
	}
}

// specCase is an edit of a valid Spec.
type specCase struct {
	name string
	edit func(*kvm2.Spec)
	why  string
}

func edited(edit func(*kvm2.Spec)) kvm2.Spec {
	s := validSpec()
	edit(&s)
	return s
}

func TestSpecValidate_Accepts(t *testing.T) {
	tests := []specCase{
		{name: "no optional field", edit: func(*kvm2.Spec) {}},
		{name: "shortest name", edit: func(s *kvm2.Spec) { s.Name = "a" }},
		{name: "digits", edit: func(s *kvm2.Spec) { s.Name = "0" }, why: "RFC 1123 allows a leading digit"},
		{name: "longest name", edit: func(s *kvm2.Spec) { s.Name = strings.Repeat("a", 63) }},
		{name: "longest owner", edit: func(s *kvm2.Spec) { s.OwnerUID = strings.Repeat("~", 128) }},
		{name: "owner with slash and upper case", edit: func(s *kvm2.Spec) { s.OwnerUID = "NS/Name:0" }, why: "owners are opaque"},
		{name: "sha512", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha512:" + hex128 }},
		{name: "http", edit: func(s *kvm2.Spec) { s.Image.URL = "http://host:8080/i?token=x" }},
		{name: "scheme in upper case", edit: func(s *kvm2.Spec) { s.Image.URL = "HTTPS://host/i" }, why: "schemes are not case-sensitive (RFC 3986)"},
		{name: "URL with a password", edit: func(s *kvm2.Spec) { s.Image.URL = "https://user:password@host/i" }},
		{name: "file", edit: func(s *kvm2.Spec) { s.Image.URL = "file:///srv/images/debian.qcow2" }},
		{name: "another scheme", edit: func(s *kvm2.Spec) { s.Image.URL = "embed:///i" }, why: "the Provider knows which there are"},
		{name: "file of checksums", edit: func(s *kvm2.Spec) {
			s.Image = kvm2.Image{URL: "http://host/i.qcow2?token=x", ChecksumURL: "https://host/SHA256SUMS"}
		}, why: "mirrors may be plain http, what vouches for them not"},
		{name: "local file of checksums", edit: func(s *kvm2.Spec) {
			s.Image = kvm2.Image{URL: "file:///srv/i.qcow2", ChecksumURL: "file:///srv/SHA512SUMS"}
		}},
		{name: "volume", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: "Debian 13 (golden).qcow2"} }},
		{name: "longest volume", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: strings.Repeat("v", 255)} }},
		{name: "smallest sizes", edit: func(s *kvm2.Spec) { s.CPUs, s.MemoryBytes, s.RootDiskBytes = 1, 64*oneMiB, oneMiB }},
		{name: "largest sizes", edit: func(s *kvm2.Spec) { s.CPUs, s.MemoryBytes, s.RootDiskBytes = 512, 16*oneTiB, 64*oneTiB }},
		{name: "odd sizes", edit: func(s *kvm2.Spec) { s.MemoryBytes, s.RootDiskBytes = 64*oneMiB+1024, oneMiB+512 }},
		{name: "firmwares", edit: func(s *kvm2.Spec) { s.Firmware = kvm2.FirmwareEFI }},
		{name: "most labels", edit: func(s *kvm2.Spec) { s.Labels = numberedLabels(64) }},
		{name: "largest label", edit: func(s *kvm2.Spec) {
			s.Labels = map[string]string{strings.Repeat("k", 128): strings.Repeat("v", 256)}
		}},
		{name: "label with other scripts and signs", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"größe/<&>": `日本 "quoted"`} }},
		{name: "empty label value", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"a": ""} }},
		{name: "most disks", edit: func(s *kvm2.Spec) { s.Disks = numberedDisks(16) }},
		{name: "longest disk name", edit: func(s *kvm2.Spec) { s.Disks = []kvm2.Disk{{Name: strings.Repeat("d", 32), SizeBytes: 64 * oneTiB}} }},
		{name: "most interfaces", edit: func(s *kvm2.Spec) { s.NICs = make([]kvm2.NIC, 8) }},
		{name: "network with signs", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{Network: "Lan_1.a:b+c-d"}} }},
		{name: "most data", edit: func(s *kvm2.Spec) {
			most := bytes.Repeat([]byte{0}, kvm2.MaxUserDataBytes)
			s.UserData, s.VendorData, s.NetworkConfig = most, most, most
		}, why: "data are opaque: they may be compressed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := edited(tt.edit).Validate(); err != nil {
				t.Errorf("Validate() = %v, want nil; %s", err, tt.why)
			}
		})
	}
}

func numberedLabels(n int) map[string]string {
	labels := map[string]string{}
	for i := range n {
		labels[fmt.Sprintf("key-%d", i)] = "value"
	}
	return labels
}

func numberedDisks(n int) []kvm2.Disk {
	var disks []kvm2.Disk
	for i := range n {
		disks = append(disks, kvm2.Disk{Name: fmt.Sprintf("disk-%d", i), SizeBytes: oneGiB})
	}
	return disks
}

// refusedSpecs are Specs with one fault each, by the field that is at fault.
func refusedSpecs() map[string][]specCase {
	refused := map[string][]specCase{
		"ownerUID": {
			{name: "missing", edit: func(s *kvm2.Spec) { s.OwnerUID = "" }, why: "without an owner two machines would be one"},
			{name: "with a space", edit: func(s *kvm2.Spec) { s.OwnerUID = "a b" }},
			{name: "too long", edit: func(s *kvm2.Spec) { s.OwnerUID = strings.Repeat("o", 129) }},
			{name: "control character", edit: func(s *kvm2.Spec) { s.OwnerUID = "a\nb" }},
			{name: "non-ASCII", edit: func(s *kvm2.Spec) { s.OwnerUID = "größe" }, why: "one text in two Unicode forms would be two owners"},
			{name: "not UTF-8", edit: func(s *kvm2.Spec) { s.OwnerUID = "a\xffb" }},
		},
		"labels": {
			{name: "too many", edit: func(s *kvm2.Spec) { s.Labels = numberedLabels(65) }},
			{name: "empty key", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"": "v"} }},
			{name: "long key", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{strings.Repeat("k", 129): "v"} }},
			{name: "long value", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": strings.Repeat("v", 257)} }},
			{name: "control character in key", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"a\x00b": "v"} }, why: "XML cannot carry it"},
			{name: "control character in value", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": "a\x1bb"} }},
			{name: "line break in value", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": "a\nb"} }, why: "XML attributes turn it into a space"},
			{name: "value not UTF-8", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": "a\xff"} }},
			{name: "value with a noncharacter", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": "a\uffff"} }},
			{name: "value with a replacement character", edit: func(s *kvm2.Spec) { s.Labels = map[string]string{"k": "a\ufffd"} }, why: "it stands for text that was lost already"},
		},
		"image.url": {
			{name: "missing", edit: func(s *kvm2.Spec) { s.Image.URL = "" }},
			{name: "no file name to look up", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host/dir/", ChecksumURL: "https://host/s"} }},
			{name: "no path to look up", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host", ChecksumURL: "https://host/s"} }},
			{name: "unparsable", edit: func(s *kvm2.Spec) { s.Image.URL = "https://host/%zz" }},
			{name: "control character", edit: func(s *kvm2.Spec) { s.Image.URL = "https://host/a\nb" }},
			{name: "a bare path", edit: func(s *kvm2.Spec) { s.Image.URL = "/srv/i.qcow2" }},
			{name: "no host", edit: func(s *kvm2.Spec) { s.Image.URL = "https:///i" }},
			{name: "a port and no host", edit: func(s *kvm2.Spec) { s.Image.URL = "https://:443/i" }},
			{name: "no slashes", edit: func(s *kvm2.Spec) { s.Image.URL = "https:host/i" }},
			{name: "file with host", edit: func(s *kvm2.Spec) { s.Image.URL = "file://host/i" }, why: "it would be taken for a file of this machine"},
			{name: "relative file", edit: func(s *kvm2.Spec) { s.Image.URL = "file:i.qcow2" }},
			{name: "file without path", edit: func(s *kvm2.Spec) { s.Image.URL = "file://" }},
		},
		"image.checksumURL": {
			{name: "beside a checksum", edit: func(s *kvm2.Spec) { s.Image.ChecksumURL = "https://host/SHA256SUMS" }, why: "which of the two would count?"},
			{name: "plain http", edit: func(s *kvm2.Spec) {
				s.Image = kvm2.Image{URL: "http://host/i", ChecksumURL: "http://host/SHA256SUMS"}
			}, why: "whoever can change the one can change the other"},
			{name: "no host", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host/i", ChecksumURL: "https:///SHA256SUMS"} }},
			{name: "a bare path", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host/i", ChecksumURL: "/SHA256SUMS"} }},
			{name: "unparsable", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host/i", ChecksumURL: "https://host/%zz"} }},
		},
		"image.volume": {
			{name: "beside a URL", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{URL: "https://host/i", Volume: "v"} }},
			{name: "beside a checksum", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Checksum: "sha256:" + hex64, Volume: "v"} }},
			{name: "beside a file of checksums", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{ChecksumURL: "https://host/s", Volume: "v"} }},
			{name: "slash", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: "../v"} }},
			{name: "dots", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: ".."} }},
			{name: "control character", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: "a\nb"} }},
			{name: "too long", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: strings.Repeat("v", 256)} }},
			{name: "a machine's root disk", edit: func(s *kvm2.Spec) {
				s.Image = kvm2.Image{Volume: "prod-" + kvm2.MachineUUID("prod", "a").String() + "-root"}
			}, why: "it goes with the machine"},
			{name: "a snapshot of it", edit: func(s *kvm2.Spec) {
				s.Image = kvm2.Image{Volume: "a-b-" + kvm2.MachineUUID("prod", "a").String() + "-root.snap"}
			}},
			{name: "a data disk", edit: func(s *kvm2.Spec) {
				s.Image = kvm2.Image{Volume: "prod-" + kvm2.MachineUUID("prod", "a").String() + "-disk-data"}
			}},
			{name: "an image", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: "prod-image-" + hex64} }},
			{name: "an image's data", edit: func(s *kvm2.Spec) { s.Image = kvm2.Image{Volume: "prod-image-" + hex128 + "-0123456789abcdef"} }},
		},
		"image.checksum": {
			{name: "missing", edit: func(s *kvm2.Spec) { s.Image.Checksum = "" }, why: "it is what identifies the image"},
			{name: "no algorithm", edit: func(s *kvm2.Spec) { s.Image.Checksum = hex64 }},
			{name: "md5", edit: func(s *kvm2.Spec) { s.Image.Checksum = "md5:" + hex64[:32] }},
			{name: "upper case", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:" + strings.ToUpper(hex64) }, why: "one image must have one name in the pool"},
			{name: "upper-case algorithm", edit: func(s *kvm2.Spec) { s.Image.Checksum = "SHA256:" + hex64 }},
			{name: "too short", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:" + hex64[1:] }},
			{name: "too long", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:" + hex64 + "0" }},
			{name: "length of the other", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha512:" + hex64 }},
			{name: "not hexadecimal", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:g" + hex64[1:] }},
			{name: "line break", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:" + hex64 + "\n" }},
			{name: "path", edit: func(s *kvm2.Spec) { s.Image.Checksum = "sha256:../" + hex64[3:] }, why: "it becomes part of a file name"},
		},
		"cpus": {
			{name: "zero", edit: func(s *kvm2.Spec) { s.CPUs = 0 }},
			{name: "negative", edit: func(s *kvm2.Spec) { s.CPUs = -1 }},
			{name: "absurd", edit: func(s *kvm2.Spec) { s.CPUs = 513 }},
			{name: "largest int", edit: func(s *kvm2.Spec) { s.CPUs = math.MaxInt }},
		},
		"firmware": {
			{name: "unknown", edit: func(s *kvm2.Spec) { s.Firmware = "uefi" }},
			{name: "upper case", edit: func(s *kvm2.Spec) { s.Firmware = "EFI" }},
		},
		"nics": {
			{name: "too many", edit: func(s *kvm2.Spec) { s.NICs = make([]kvm2.NIC, 9) }},
		},
		"nics[1].network": {
			{name: "with a slash", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{}, {Network: "a/b"}} }},
			{name: "with markup", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{}, {Network: "a'/><x"}} }},
			{name: "with a space", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{}, {Network: "a b"}} }},
			{name: "leading dash", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{}, {Network: "-a"}} }},
			{name: "too long", edit: func(s *kvm2.Spec) { s.NICs = []kvm2.NIC{{}, {Network: strings.Repeat("n", 129)}} }},
		},
		"disks": {
			{name: "too many", edit: func(s *kvm2.Spec) { s.Disks = numberedDisks(17) }, why: "targets go on to vdz, and the seed takes one"},
		},
		"userData":      {{name: "too large", edit: func(s *kvm2.Spec) { s.UserData = make([]byte, kvm2.MaxUserDataBytes+1) }}},
		"vendorData":    {{name: "too large", edit: func(s *kvm2.Spec) { s.VendorData = make([]byte, kvm2.MaxUserDataBytes+1) }}},
		"networkConfig": {{name: "too large", edit: func(s *kvm2.Spec) { s.NetworkConfig = make([]byte, kvm2.MaxUserDataBytes+1) }}},
	}
	for what, name := range badLabels(63) {
		refused["name"] = append(refused["name"], specCase{name: what, edit: func(s *kvm2.Spec) { s.Name = name }})
	}
	for what, name := range badLabels(32) {
		edit := func(s *kvm2.Spec) {
			s.Disks = []kvm2.Disk{{Name: "ok", SizeBytes: oneMiB}, {Name: name, SizeBytes: oneMiB}}
		}
		refused["disks[1].name"] = append(refused["disks[1].name"], specCase{name: what, edit: edit})
	}
	refused["disks[1].name"] = append(refused["disks[1].name"], specCase{name: "twice", edit: func(s *kvm2.Spec) {
		s.Disks = []kvm2.Disk{{Name: "data", SizeBytes: oneMiB}, {Name: "data", SizeBytes: oneMiB}}
	}, why: "they would share a volume"})
	for what, n := range badSizes(64*oneMiB, 16*oneTiB, 1024) {
		refused["memoryBytes"] = append(refused["memoryBytes"], specCase{name: what, edit: func(s *kvm2.Spec) { s.MemoryBytes = n }})
	}
	for what, n := range badSizes(oneMiB, 64*oneTiB, 512) {
		refused["rootDiskBytes"] = append(refused["rootDiskBytes"], specCase{name: what, edit: func(s *kvm2.Spec) { s.RootDiskBytes = n }})
		edit := func(s *kvm2.Spec) { s.Disks = []kvm2.Disk{{Name: "data", SizeBytes: n}} }
		refused["disks[0].sizeBytes"] = append(refused["disks[0].sizeBytes"], specCase{name: what, edit: edit})
	}
	return refused
}

// badLabels are names that are no DNS labels of at most that many characters.
func badLabels(most int) map[string]string {
	return map[string]string{
		"empty": "", "too long": strings.Repeat("a", most+1), "slash": "a/b", "dots": "..", "a dot": "a.b",
		"upper case": "Web", "underscore": "a_b", "space": "a b", "leading dash": "-a", "trailing dash": "a-", "only a dash": "-",
		"control character": "a\x07b", "NUL": "a\x00", "line break at the end": "a\n", "non-ASCII letter": "größe",
		"full-width digit": "a１", "not UTF-8": "a\xff", "markup": "<a/>", "percent": "a%2fb",
	}
}

// badSizes are sizes outside a range, or not a multiple of unit.
func badSizes(least, most, unit int64) map[string]int64 {
	return map[string]int64{
		"zero": 0, "negative": -least, "too small": least - unit, "too large": most + unit, "absurd": math.MaxInt64,
		"most negative": math.MinInt64, "unaligned": least + 1, "unaligned at the top": most - 1,
	}
}

func TestSpecValidate_RefusesAndNamesTheField(t *testing.T) {
	for field, tests := range refusedSpecs() {
		for _, tt := range tests {
			t.Run(field+" "+tt.name, func(t *testing.T) {
				err := edited(tt.edit).Validate()
				if !errors.Is(err, kvm2.ErrInvalidSpec) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
					t.Fatalf("Validate() = %v, want a Permanent ErrInvalidSpec; %s", err, tt.why)
				}
				if want := "invalid: " + field + ": "; !strings.HasPrefix(err.Error(), want) {
					t.Errorf("Validate() = %q, want it to begin with %q", err, want)
				}
				wantCleanText(t, err)
			})
		}
	}
}

// wantCleanText fails when an error's text could break a log or flood it.
func wantCleanText(t testing.TB, err error) {
	t.Helper()
	text := err.Error()
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }) || strings.ToValidUTF8(text, "") != text {
		t.Errorf("%q holds control characters or is not UTF-8", text)
	}
	for line := range strings.SplitSeq(text, "\n") {
		if len(line) > 1200 {
			t.Errorf("a line of the text has %d bytes", len(line))
		}
	}
}

func TestSpecValidate_LongValuesAreClipped(t *testing.T) {
	long := strings.Repeat("é", 100_000)
	s := validSpec()
	s.Name, s.OwnerUID, s.Firmware = long, long, kvm2.Firmware(long)
	s.Labels = map[string]string{long: long}
	s.Image = kvm2.Image{URL: "a" + strings.Repeat("b", 100_000) + "://x", Checksum: long}
	s.Disks = []kvm2.Disk{{Name: long, SizeBytes: oneMiB}}
	s.NICs = []kvm2.NIC{{Network: long}}
	err := s.Validate()
	if err == nil {
		t.Fatal("Validate() = nil")
	}
	wantCleanText(t, err)
}

func TestSpecValidate_AllFaultsAtOnce(t *testing.T) {
	s := kvm2.Spec{
		Firmware: "uefi", Labels: map[string]string{"": "v"},
		Disks: []kvm2.Disk{{Name: "A", SizeBytes: oneMiB}, {Name: "ok"}}, NICs: []kvm2.NIC{{Network: "/"}},
		UserData: make([]byte, kvm2.MaxUserDataBytes+1),
	}
	err := s.Validate()
	for _, field := range []string{
		"name: ", "ownerUID: ", "labels: ", "image.url: ", "image.checksum: ", "cpus: ", "memoryBytes: ", "rootDiskBytes: ",
		"firmware: ", "disks[0].name: ", "disks[1].sizeBytes: ", "nics[0].network: ", "userData: ",
	} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("Validate() = %v, want it to name %q too", err, field)
		}
	}
}

func TestSpecValidate_SameSpecSameText(t *testing.T) {
	s := validSpec()
	s.Labels = map[string]string{}
	for i := range 20 {
		s.Labels[fmt.Sprintf("bad\t%d", i)] = "bad\t"
	}
	first := s.Validate().Error()
	for range 5 {
		if again := s.Validate().Error(); again != first {
			t.Fatalf("Validate() gave two texts:\n%s\n\n%s", first, again)
		}
	}
}

func TestSpecValidate_SecretsStayOut(t *testing.T) {
	const secret = "hunter2-hunter2"
	urls := []string{
		"https://user:" + secret + "@host/%zz", "//user:" + secret + "@host/", "https://user:" + secret + "@/i",
		"https://user:" + secret + " @host/i", "file://user:" + secret + "@host/i", "https://user:" + secret + "@host:port/i",
		"://user:" + secret + "@host", "https://host/i?token=" + secret + "\n",
	}
	for _, url := range urls {
		s := kvm2.Spec{
			Image:    kvm2.Image{URL: url},
			UserData: bytes.Repeat([]byte(secret), kvm2.MaxUserDataBytes/10), VendorData: bytes.Repeat([]byte(secret), kvm2.MaxUserDataBytes/10),
			NetworkConfig: bytes.Repeat([]byte(secret), kvm2.MaxUserDataBytes/10),
		}
		err := s.Validate()
		if err == nil || !strings.Contains(err.Error(), "image.url") {
			t.Errorf("Validate() with the URL %q = %v, want it refused", url, err)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("Validate() with the URL %q tells the secret: %v", url, err)
		}
	}
}
