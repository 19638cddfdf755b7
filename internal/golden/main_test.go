package golden

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

type exitCode int

func (c exitCode) Run() int { return int(c) }

// goldenTree makes a testdata directory with one asserted and two forgotten golden files.
func goldenTree(t *testing.T) (root string, seen *pathSet) {
	t.Helper()
	root = t.TempDir()
	for _, path := range []string{
		"TestA/kept.golden.xml", "TestA/old.golden.xml", "TestB/gone.golden", "TestA/input.xml", "fuzz/FuzzRead/0a1b",
	} {
		file := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	seen = new(pathSet)
	seen.add(filepath.Join(root, "TestA/kept.golden.xml"))
	return root, seen
}

// setTestFlag gives a flag of this test binary another value for the length of the test.
func setTestFlag(t *testing.T, name, value string) {
	t.Helper()
	f := flag.Lookup(name)
	old := f.Value.String()
	if err := f.Value.Set(value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Value.Set(old); err != nil {
			t.Error(err)
		}
	})
}

// setFullRun makes this run look complete, whatever flags the tests were really started with.
func setFullRun(t *testing.T) {
	t.Helper()
	for _, name := range []string{"test.run", "test.skip", "test.list", "test.short"} {
		setTestFlag(t, name, flag.Lookup(name).DefValue)
	}
}

func TestMain_OrphansFailAFullRun(t *testing.T) {
	setFullRun(t)
	root, seen := goldenTree(t)
	var report bytes.Buffer
	if code := run(exitCode(0), root, seen, &report); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	want := "delete them:\n\t" + filepath.Join(root, "TestA/old.golden.xml") + "\n\t" + filepath.Join(root, "TestB/gone.golden") + "\n"
	if !strings.HasSuffix(report.String(), want) {
		t.Errorf("report is %q, want it to end in %q", report.String(), want)
	}
}

func TestMain_NoOrphansNoReport(t *testing.T) {
	setFullRun(t)
	root, seen := goldenTree(t)
	seen.add(filepath.Join(root, "TestA/old.golden.xml"))
	seen.add(filepath.Join(root, "TestB/gone.golden"))
	for _, dir := range []string{root, filepath.Join(root, "absent")} {
		var report bytes.Buffer
		if code := run(exitCode(0), dir, seen, &report); code != 0 || report.Len() != 0 {
			t.Errorf("run on %q: exit code %d, report %q; want 0 and none", dir, code, report.String())
		}
	}
}

func TestMain_FailedTestsAreNotBlamedOnOrphans(t *testing.T) {
	setFullRun(t)
	root, seen := goldenTree(t)
	var report bytes.Buffer
	if code := run(exitCode(2), root, seen, &report); code != 2 || report.Len() != 0 {
		t.Errorf("exit code %d, report %q; want 2 and none", code, report.String())
	}
}

func TestMain_PartialRunReportsNoOrphans(t *testing.T) {
	tests := []struct{ flag, value string }{
		{"test.run", "TestA"},
		{"test.skip", "TestB"},
		{"test.list", "."},
		{"test.short", "true"},
		{"test.count", "0"},
	}
	for _, tt := range tests {
		t.Run(tt.flag, func(t *testing.T) {
			setFullRun(t)
			setTestFlag(t, tt.flag, tt.value)
			root, seen := goldenTree(t)
			var report bytes.Buffer
			if code := run(exitCode(0), root, seen, &report); code != 0 || report.Len() != 0 {
				t.Errorf("exit code %d, report %q; want 0 and none", code, report.String())
			}
		})
	}
}

func TestMain_FuzzingWorkerReportsNoOrphans(t *testing.T) {
	flags := flag.NewFlagSet("worker", flag.ContinueOnError)
	flags.Bool("test.fuzzworker", false, "")
	if leavesTestsOut(flags.Lookup) {
		t.Error("a run without a worker flag counts as partial")
	}
	if err := flags.Parse([]string{"-test.fuzzworker"}); err != nil {
		t.Fatal(err)
	}
	if !leavesTestsOut(flags.Lookup) {
		t.Error("a fuzzing worker counts as a full run")
	}
}

func TestMain_UnreadableTreeIsAnError(t *testing.T) {
	setFullRun(t)
	var report bytes.Buffer
	if code := run(exitCode(0), "testdata\x00", new(pathSet), &report); code != 1 || !strings.Contains(report.String(), "orphans") {
		t.Errorf("exit code %d, report %q; want 1 and the reason", code, report.String())
	}
}
