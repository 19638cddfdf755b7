package kvm2

import (
	"fmt"
	"strings"
	"testing"
)

var (
	sumA   = strings.Repeat("0123456789abcdef", 4)
	sumB   = strings.Repeat("fedcba9876543210", 4)
	long   = sumA + sumB
	sumMD5 = sumA[:32]
)

func TestFindSum(t *testing.T) {
	tests := []struct {
		name string
		file string
		find string // "disk.qcow2" if empty
		want string
		why  string
	}{
		{name: "coreutils", file: sumB + "  other.qcow2\n" + sumA + "  disk.qcow2\n", want: "sha256:" + sumA},
		{name: "binary mode", file: sumA + " *disk.qcow2\n", want: "sha256:" + sumA},
		{name: "SHA-512", file: long + "  disk.qcow2\n", want: "sha512:" + long},
		{name: "upper case", file: strings.ToUpper(sumA) + "  disk.qcow2\n", want: "sha256:" + sumA},
		{name: "no line break at the end", file: sumA + "  disk.qcow2", want: "sha256:" + sumA},
		{name: "line breaks of DOS", file: sumA + "  disk.qcow2\r\n" + sumB + "  b\r\n", want: "sha256:" + sumA},
		{name: "with --tag", file: "SHA256 (disk.qcow2) = " + sumA + "\n", want: "sha256:" + sumA},
		{name: "SHA-512 with --tag", file: "SHA512 (disk.qcow2) = " + long + "\n", want: "sha512:" + long},
		{name: "path", file: sumA + "  ./images/disk.qcow2\n", want: "sha256:" + sumA, why: "the base name counts"},
		{name: "spaces", file: sumA + "   my disk.qcow2\n", find: " my disk.qcow2", want: "sha256:" + sumA},
		{name: "parentheses", file: "SHA256 (a (1).qcow2) = " + sumA + "\n", find: "a (1).qcow2", want: "sha256:" + sumA},
		{name: "escaped", file: `\` + sumA + `  a\\b\nc` + "\n", find: "a\\b\nc", want: "sha256:" + sumA},
		{name: "escaped with --tag", file: `\SHA256 (a\\b) = ` + sumA + "\n", find: `a\b`, want: "sha256:" + sumA},
		{name: "backslash without a mark", file: sumA + `  a\\b` + "\n", find: `a\\b`, want: "sha256:" + sumA},
		{
			name: "clear-signed", want: "sha256:" + sumA,
			file: "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n# disk.qcow2: 1234 bytes\nSHA256 (disk.qcow2) = " + sumA + "\n" +
				"-----BEGIN PGP SIGNATURE-----\n\niQIzBAEBCAAdFiEE\n=abcd\n-----END PGP SIGNATURE-----\n",
		},
		{
			name: "other algorithms beside it", want: "sha256:" + sumA,
			file: "MD5 (disk.qcow2) = " + sumMD5 + "\n" + sumMD5 + "  disk.qcow2\nSHA256 (disk.qcow2) = " + sumA + "\nSHA384 (disk.qcow2) = " + long[:96] + "\n",
		},
		{name: "both", file: sumA + "  disk.qcow2\n" + long + "  disk.qcow2\n", want: "sha512:" + long, why: "the stronger one"},
		{name: "twice the same", file: sumA + "  disk.qcow2\n" + sumA + " *./disk.qcow2\n", want: "sha256:" + sumA},

		{name: "two", file: sumA + "  a/disk.qcow2\n" + sumB + "  b/disk.qcow2\n", why: "which of them?"},
		{name: "none", file: sumA + "  disk.qcow2.sig\n" + sumA + "  xdisk.qcow2\n"},
		{name: "empty", file: ""},
		{name: "web page", file: "<html>" + sumA + "  disk.qcow2</html>\n"},
		{name: "checksum alone", file: sumA + "\n", why: "it could be that of anything"},
		{name: "only MD5", file: sumMD5 + "  disk.qcow2\n"},
		{name: "one space", file: sumA + " disk.qcow2\n"},
		{name: "too short", file: sumA[1:] + "  disk.qcow2\n"},
		{name: "algorithm and length differ", file: "SHA512 (disk.qcow2) = " + sumA + "\n"},
		{name: "comment", file: "# " + sumA + "  disk.qcow2\n"},
		{name: "dash-escaped", file: "- " + sumA + "  disk.qcow2\n", why: "no line of sha256sum begins with a dash"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			find := tt.find
			if find == "" {
				find = "disk.qcow2"
			}
			got, err := findSum([]byte(tt.file), find)
			if got != tt.want || (err == nil) != (tt.want != "") {
				t.Errorf("findSum() = %q, %v; want %q; %s", got, err, tt.want, tt.why)
			}
			if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%q", find)) {
				t.Errorf("%v does not tell the name", err)
			}
		})
	}
}

func TestBaseName(t *testing.T) {
	for rawURL, want := range map[string]string{
		"https://host/a/disk.qcow2?x=/y#z": "disk.qcow2", "file:///disk%20one.raw": "disk one.raw", "https://host/a/": "", "https://host": "",
		"https://host/": "", "embed:disk": "", "%zz": "",
	} {
		if got := baseName(rawURL); got != want {
			t.Errorf("baseName(%q) = %q, want %q", rawURL, got, want)
		}
	}
}

// FuzzFindSum checks that whatever stands in a file, what is found is a checksum and one of the file's.
func FuzzFindSum(f *testing.F) {
	f.Add([]byte(sumA+"  disk.qcow2\n"), "disk.qcow2")
	f.Add([]byte("SHA512 (disk.qcow2) = "+long+"\n"), "disk.qcow2")
	f.Add([]byte(`\`+sumA+`  a\\b`), `a\b`)
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		got, err := findSum(data, name)
		if err != nil {
			if len(err.Error()) > 1200 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			return
		}
		_, digest, _ := strings.Cut(got, ":")
		if !digestForm.MatchString(got) || !strings.Contains(strings.ToLower(string(data)), digest) {
			t.Errorf("found %q", got)
		}
	})
}
