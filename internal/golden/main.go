package golden

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Main runs the tests of a package and returns the exit code for [os.Exit]. After a full, successful run it fails when
// testdata holds golden files that no test asserted, and names them: such a file looks like proof of something and is none.
//
// A run that leaves tests out (-run, -skip, -short, -list, -count=0 or a fuzzing worker) says nothing about orphans and
// reports none. A test that may skip itself must therefore not own golden files.
func Main(m *testing.M) int {
	return run(m, testdata, &asserted, os.Stderr)
}

type runner interface{ Run() int }

func run(m runner, root string, asserted *pathSet, report io.Writer) int {
	code := m.Run()
	if code != 0 || leavesTestsOut(flag.Lookup) {
		return code
	}
	paths, err := orphans(root, asserted)
	if err != nil {
		fmt.Fprintf(report, "golden: looking for orphans: %v\n", err)
		return 1
	}
	if len(paths) == 0 {
		return 0
	}
	fmt.Fprintf(report, "golden: no test asserts these files; delete them:\n\t%s\n", strings.Join(paths, "\n\t"))
	return 1
}

// leavesTestsOut tells from the flags of the test binary whether some tests did not run. It takes the look-up so that it
// can be tested: m.Run has parsed the flags by the time it is called.
func leavesTestsOut(lookup func(name string) *flag.Flag) bool {
	narrowing := []string{"test.run", "test.skip", "test.list", "test.short", "test.fuzzworker"}
	for _, name := range narrowing {
		if f := lookup(name); f != nil && f.Value.String() != f.DefValue {
			return true
		}
	}
	count := lookup("test.count")
	return count != nil && count.Value.String() == "0"
}

// orphans lists the golden files below root that are not in asserted, in lexical order.
func orphans(root string, asserted *pathSet) ([]string, error) {
	var found []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !entry.IsDir() && isGolden(entry.Name()) && !asserted.has(path) {
			found = append(found, path)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return found, err
}

func isGolden(name string) bool {
	return strings.HasSuffix(strings.TrimSuffix(name, filepath.Ext(name)), ".golden") || strings.HasSuffix(name, ".golden")
}
