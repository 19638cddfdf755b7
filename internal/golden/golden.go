// Package golden compares what a test got with a file that is checked in.
//
// The golden file of a case lives beside the test that owns it, in a directory named after the root test:
//
//	func TestDomainXML(t *testing.T) {
//		golden.Assert(t, "minimal.xml", got) // testdata/TestDomainXML/minimal.golden.xml
//	}
//
// Run `go test . -update` to write the files anew, and read the diff before committing it. Only a package whose tests
// import this one knows the flag.
//
// A package that owns golden files reports those which no test asserts any more:
//
//	func TestMain(m *testing.M) { os.Exit(golden.Main(m)) }
package golden

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// testdata is relative: go test runs a test binary in the directory of its package.
const testdata = "testdata"

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

var asserted pathSet

// Assert fails t when got differs from the golden file of the case called name, and prints the difference line by line
// (-want +got). With -update it writes the file instead. It may be called from parallel tests.
//
// The name is a file name with the extension that suits the content: "minimal.xml" is kept in minimal.golden.xml. A golden
// file ends in exactly one newline whether or not got has one; a blank line at the end of got is an error.
func Assert(t testing.TB, name string, got []byte) {
	t.Helper()
	path, err := filePath(t.Name(), name)
	if err != nil {
		t.Errorf("golden: %v", err)
		return
	}
	asserted.add(path)
	content, err := normalise(got)
	if err != nil {
		t.Errorf("golden: %s: got %v", path, err)
		return
	}
	if *update {
		write(t, path, content)
		return
	}
	compare(t, path, content)
}

// filePath gives subtests the directory of their root test, so that a case keeps its file when it moves between subtests.
func filePath(testName, name string) (string, error) {
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return "", fmt.Errorf("%q is not a plain file name", name)
	}
	root, _, _ := strings.Cut(testName, "/")
	ext := filepath.Ext(name)
	return filepath.Join(testdata, root, strings.TrimSuffix(name, ext)+".golden"+ext), nil
}

func normalise(got []byte) ([]byte, error) {
	body := bytes.TrimSuffix(got, []byte("\n"))
	if bytes.HasSuffix(body, []byte("\n")) {
		return nil, errors.New("content that ends in a blank line")
	}
	return append(bytes.Clone(body), '\n'), nil
}

func write(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Errorf("golden: %v", err)
		return
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Errorf("golden: %v", err)
	}
}

func compare(t testing.TB, path string, content []byte) {
	t.Helper()
	want, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Errorf("golden: %s does not exist; run the test with -update to write it", path)
		return
	}
	if err != nil {
		t.Errorf("golden: %v", err)
		return
	}
	if bytes.Equal(want, content) {
		return
	}
	t.Errorf("golden: %s differs; if the change is meant, run the test with -update (-want +got):\n%s",
		path, cmp.Diff(lines(want), lines(content)))
}

func lines(content []byte) []string {
	return strings.SplitAfter(string(content), "\n")
}

// pathSet is a set of paths; its zero value is empty and ready for concurrent use.
type pathSet struct {
	mu    sync.Mutex
	paths map[string]bool
}

func (s *pathSet) add(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paths == nil {
		s.paths = make(map[string]bool)
	}
	s.paths[path] = true
}

func (s *pathSet) has(path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.paths[path]
}
