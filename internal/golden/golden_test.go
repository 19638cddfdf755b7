package golden

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// recorder stands in for the test that calls Assert, so that a failure of it can be looked at.
type recorder struct {
	testing.TB
	name   string
	errors []string
}

func (r *recorder) Name() string { return r.name }
func (r *recorder) Helper()      {}
func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

// assertIn calls Assert as the test called name would, in an empty directory that holds the given golden files.
func assertIn(t *testing.T, files map[string]string, testName, name, got string) []string {
	t.Helper()
	t.Chdir(t.TempDir())
	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rec := &recorder{TB: t, name: testName}
	Assert(rec, name, []byte(got))
	return rec.errors
}

func setUpdate(t *testing.T) {
	t.Helper()
	*update = true
	t.Cleanup(func() { *update = false })
}

func TestAssert_SameContentPasses(t *testing.T) {
	const path = "testdata/TestDomain/minimal.golden.xml"
	tests := []struct {
		name, testName, file, got string
		why                       string
	}{
		{name: "got ends in a newline", testName: "TestDomain", file: "<a/>\n", got: "<a/>\n"},
		{name: "got ends in none", testName: "TestDomain", file: "<a/>\n", got: "<a/>", why: "XML encoders write no last newline"},
		{name: "subtest", testName: "TestDomain/x86/minimal", file: "<a/>\n", got: "<a/>", why: "the directory is the root test's"},
		{name: "empty", testName: "TestDomain", file: "\n", got: ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if errs := assertIn(t, map[string]string{path: tt.file}, tt.testName, "minimal.xml", tt.got); errs != nil {
				t.Errorf("Assert failed with %q; %s", errs, tt.why)
			}
		})
	}
}

func TestAssert_DifferencesFail(t *testing.T) {
	const path = "testdata/TestDomain/minimal.golden.xml"
	tests := []struct {
		name    string
		files   map[string]string
		got     string
		wantAll []string
	}{
		{
			name: "a line", files: map[string]string{path: "one\ntwo\n"}, got: "one\nthree\n",
			wantAll: []string{path + " differs", "-want +got", "two", "three", "-update"},
		},
		{name: "file without last newline", files: map[string]string{path: "one"}, got: "one\n", wantAll: []string{"differs"}},
		{name: "file with blank last line", files: map[string]string{path: "one\n\n"}, got: "one\n", wantAll: []string{"differs"}},
		{name: "got with blank last line", files: map[string]string{path: "one\n"}, got: "one\n\n", wantAll: []string{"blank line"}},
		{name: "no file", got: "one\n", wantAll: []string{path + " does not exist", "-update"}},
		{name: "a directory in its place", files: map[string]string{path + "/x": ""}, got: "one\n", wantAll: []string{"is a directory"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			errs := assertIn(t, tt.files, "TestDomain", "minimal.xml", tt.got)
			if len(errs) != 1 {
				t.Fatalf("Assert reported %d errors %q, want 1", len(errs), errs)
			}
			for _, want := range tt.wantAll {
				if !strings.Contains(errs[0], want) {
					t.Errorf("error %q does not mention %q", errs[0], want)
				}
			}
		})
	}
}

func TestAssert_NameIsAPlainFileName(t *testing.T) {
	for _, name := range []string{"", ".", "..", ".xml", "a/b.xml", "../b.xml", "/b.xml"} {
		if errs := assertIn(t, nil, "TestDomain", name, "x"); len(errs) != 1 || !strings.Contains(errs[0], "plain file name") {
			t.Errorf("Assert with the name %q reported %q, want one error", name, errs)
		}
	}
}

func TestAssert_UpdateWritesTheFile(t *testing.T) {
	setUpdate(t)
	tests := []struct {
		name, caseName, got  string
		wantPath, wantString string
	}{
		{name: "adds the newline", caseName: "minimal.xml", got: "<a/>", wantPath: "minimal.golden.xml", wantString: "<a/>\n"},
		{name: "keeps the newline", caseName: "minimal.xml", got: "<a/>\n", wantPath: "minimal.golden.xml", wantString: "<a/>\n"},
		{name: "no extension", caseName: "plain", got: "x", wantPath: "plain.golden", wantString: "x\n"},
		{name: "dots in the name", caseName: "v1.2.json", got: "{}", wantPath: "v1.2.golden.json", wantString: "{}\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join("testdata", "TestDomain", tt.wantPath)
			if errs := assertIn(t, map[string]string{path: "old\n"}, "TestDomain/sub", tt.caseName, tt.got); errs != nil {
				t.Fatalf("Assert failed with %q", errs)
			}
			written, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if string(written) != tt.wantString {
				t.Errorf("wrote %q, want %q", written, tt.wantString)
			}
		})
	}
}

func TestAssert_UpdateReportsWhatItCannotWrite(t *testing.T) {
	setUpdate(t)
	blocked := map[string]string{"testdata": "a file, not a directory"}
	if errs := assertIn(t, blocked, "TestDomain", "minimal.xml", "x"); len(errs) != 1 {
		t.Errorf("Assert reported %q, want one error", errs)
	}
	taken := map[string]string{"testdata/TestDomain/minimal.golden.xml/x": ""}
	if errs := assertIn(t, taken, "TestDomain", "minimal.xml", "x"); len(errs) != 1 {
		t.Errorf("Assert reported %q, want one error", errs)
	}
}

func TestAssert_UpdateRefusesBlankLastLine(t *testing.T) {
	setUpdate(t)
	if errs := assertIn(t, nil, "TestDomain", "minimal.xml", "x\n\n"); len(errs) != 1 {
		t.Errorf("Assert reported %q, want one error", errs)
	}
	if _, err := os.Stat("testdata"); err == nil {
		t.Error("a file was written for refused content")
	}
}
