package kvm2_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

// The documents of the contract are checked like code: every question has an answer, every answer has evidence that is
// there, and every promise has a test.

const (
	contractDoc = "docs/provider-contract.md"
	specDoc     = "docs/kvm2-provider-spec.md"
	designDoc   = "docs/design.md"

	axesSection  = "4. The axes"
	itemsSection = "11. Conformance items"
	mapSection   = "21. Conformance map"

	axisCount  = 24
	leastItems = 40
)

// section is a heading with what stands below it, up to the next heading of any level.
type section struct {
	level int
	title string
	text  string
}

func sectionsOf(doc string) []section {
	var out []section
	for line := range strings.Lines(doc) {
		hashes := len(line) - len(strings.TrimLeft(line, "#"))
		if hashes > 0 && strings.HasPrefix(line[hashes:], " ") {
			out = append(out, section{level: hashes, title: strings.TrimSpace(line[hashes:])})
		} else if len(out) > 0 {
			out[len(out)-1].text += line
		}
	}
	return out
}

// within returns the sections below the one of the title, itself included.
func within(sections []section, title string) []section {
	i := slices.IndexFunc(sections, func(s section) bool { return s.title == title })
	if i < 0 {
		return nil
	}
	end := i + 1
	for end < len(sections) && sections[end].level > sections[i].level {
		end++
	}
	return sections[i:end]
}

// contractCheck looks for faults in the documents of a source tree.
type contractCheck struct {
	tree   fs.FS
	tests  testIndex
	faults []string
}

func (c *contractCheck) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Sprintf(format, args...))
}

// contractFaults returns everything that is wrong with the documents of a source tree.
func contractFaults(tree fs.FS) ([]string, error) {
	tests, err := indexTests(tree)
	if err != nil {
		return nil, err
	}
	docs := map[string]string{}
	for _, name := range []string{contractDoc, specDoc, designDoc} {
		data, err := fs.ReadFile(tree, name)
		if err != nil {
			return nil, err
		}
		docs[name] = string(data)
	}
	c := &contractCheck{tree: tree, tests: tests}
	contract, spec := sectionsOf(docs[contractDoc]), sectionsOf(docs[specDoc])
	c.axes(contract, spec)
	c.entries(spec)
	c.conformance(itemsOf(contract), within(spec, mapSection))
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		c.citations(name, docs[name])
	}
	return c.faults, nil
}

var axisTitle = regexp.MustCompile(`^[A-E][0-9]+ `)

func axesOf(sections []section) map[string]section {
	out := map[string]section{}
	for _, s := range sections {
		if axisTitle.MatchString(s.title) {
			out[s.title] = s
		}
	}
	return out
}

// axes holds the axes of the contract against the entries of the specification.
func (c *contractCheck) axes(contract, spec []section) {
	asked, answered := axesOf(within(contract, axesSection)), axesOf(spec)
	if len(asked) != axisCount {
		c.fault("the contract has %d axes, want %d", len(asked), axisCount)
	}
	for _, title := range slices.Sorted(maps.Keys(asked)) {
		if _, ok := answered[title]; !ok {
			c.fault("axis %q has no entry in the specification", title)
		}
		text := asked[title].text
		if !strings.Contains(text, "*Question:* ") || !strings.Contains(text, "\nEvery provider must ") {
			c.fault("axis %q does not say its question and what every provider must do", title)
		}
	}
	for _, title := range slices.Sorted(maps.Keys(answered)) {
		if _, ok := asked[title]; !ok {
			c.fault("entry %q has no axis in the contract", title)
		}
	}
}

// entries makes sure that the specification's entries are numbered from 1 on, and that each which is an answer has one.
func (c *contractCheck) entries(spec []section) {
	number := 0
	for _, s := range spec {
		if s.level == 2 {
			number++
			if !strings.HasPrefix(s.title, strconv.Itoa(number)+". ") {
				c.fault("entry %q should have number %d", s.title, number)
			}
		}
		if axisTitle.MatchString(s.title) || s.level == 2 && isChoice(number) {
			c.answer(s)
		}
	}
	if within(spec, mapSection) == nil {
		c.fault("the specification has no entry %q", mapSection)
	}
}

// isChoice reports whether an entry is a choice beyond the contract: those before are groups of axes, the one behind
// is the map.
func isChoice(number int) bool { return number >= 7 && number <= 20 }

func (c *contractCheck) answer(s section) {
	answer, evidence, _ := strings.Cut(s.text, "**Evidence:**")
	_, answer, _ = strings.Cut(answer, "**Answer:**")
	if strings.TrimSpace(answer) == "" {
		c.fault("entry %q: the answer is blank", s.title)
	}
	if strings.TrimSpace(evidence) == "" {
		c.fault("entry %q: the evidence is blank", s.title)
	}
}

var itemForm = regexp.MustCompile(`(?m)^\* \*\*(11\.[0-9]+)\*\* (.*)$`)

// itemsOf returns the numbers and sentences of the conformance items, in their order.
func itemsOf(contract []section) [][2]string {
	var out [][2]string
	for _, s := range within(contract, itemsSection) {
		for _, m := range itemForm.FindAllStringSubmatch(s.text, -1) {
			out = append(out, [2]string{m[1], m[2]})
		}
	}
	return out
}

var (
	rowForm  = regexp.MustCompile(`(?m)^\| (11\.[0-9]+) \|(.*)\|$`)
	codeForm = regexp.MustCompile("`([^`\n]+)`")
	testForm = regexp.MustCompile(`^(Test|Fuzz|Example)[A-Z]\w*(/.+)?$`)
	pathForm = regexp.MustCompile(`^[\w.-]+(/[\w.-]+)*(\.(go|md|tsv|sh|yml|mod)|/)$`)
)

// conformance holds the items against the map.
func (c *contractCheck) conformance(items [][2]string, entry []section) {
	if len(items) < leastItems {
		c.fault("the contract has %d conformance items, want at least %d", len(items), leastItems)
	}
	var text strings.Builder
	for _, s := range entry {
		text.WriteString(s.text)
	}
	rows := map[string]string{}
	for _, m := range rowForm.FindAllStringSubmatch(text.String(), -1) {
		if _, twice := rows[m[1]]; twice {
			c.fault("item %s stands twice in the map", m[1])
		}
		rows[m[1]] = m[2]
	}
	for i, item := range items {
		if want := fmt.Sprintf("11.%d", i+1); item[0] != want {
			c.fault("item %s should have number %s", item[0], want)
		}
		if !strings.HasSuffix(item[1], ".") || strings.Contains(item[1], ". ") {
			c.fault("item %s is not one sentence", item[0])
		}
		tests := slices.DeleteFunc(quoted(rows[item[0]]), func(s string) bool { return !testForm.MatchString(s) })
		if len(tests) == 0 {
			c.fault("item %s has no test", item[0])
		}
		delete(rows, item[0])
	}
	for _, number := range slices.Sorted(maps.Keys(rows)) {
		c.fault("the map has item %s, the contract has not", number)
	}
}

// quoted returns what stands between backticks.
func quoted(text string) []string {
	var out []string
	for _, m := range codeForm.FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	return out
}

// citations makes sure that the files and tests that a document names are there.
func (c *contractCheck) citations(doc, text string) {
	for _, word := range quoted(text) {
		switch {
		case testForm.MatchString(word):
			if !c.tests.has(word) {
				c.fault("%s: there is no test %q", doc, word)
			}
		case pathForm.MatchString(word):
			if _, err := fs.Stat(c.tree, strings.TrimSuffix(word, "/")); errors.Is(err, fs.ErrNotExist) {
				c.fault("%s: there is no file %q", doc, word)
			}
		}
	}
}

// testIndex is every test function of a source tree, whatever its build tags, with the texts by which its file, and the
// suites if it runs one, may call subtests.
type testIndex struct {
	files  map[string][]string // the files with a function of that name
	texts  map[string][]string // the string literals of a file
	suites []string            // the string literals of kvm2test
}

func indexTests(tree fs.FS) (testIndex, error) {
	index := testIndex{files: map[string][]string{}, texts: map[string][]string{}}
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		suite := path.Dir(name) == "kvm2test" && strings.HasSuffix(name, ".go")
		if d.IsDir() || !suite && !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		return index.add(tree, name, suite)
	})
	return index, err
}

func (x *testIndex) add(tree fs.FS, name string, suite bool) error {
	source, err := fs.ReadFile(tree, name)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasSuffix(name, "_test.go") {
			x.files[f.Name.Name] = append(x.files[f.Name.Name], name)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			text, _ := strconv.Unquote(lit.Value)
			x.texts[name] = append(x.texts[name], text)
			if suite {
				x.suites = append(x.suites, text)
			}
		}
		return true
	})
	return nil
}

// has reports whether there is a test, and if a subtest is named, a text by which it is called.
func (x *testIndex) has(name string) bool {
	function, subtest, _ := strings.Cut(name, "/")
	for _, file := range x.files[function] {
		texts := x.texts[file]
		if path.Dir(file) == "kvm2test" {
			texts = x.suites
		}
		if subtest == "" || slices.Contains(texts, subtest) {
			return true
		}
	}
	return false
}

func TestContract_EveryQuestionHasItsAnswerAndEveryPromiseItsTest(t *testing.T) {
	faults, err := contractFaults(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		t.Error(f)
	}
}

// copyOfTree is the documents and tests of the tree as they are, and the names of all other files.
func copyOfTree(t *testing.T) fstest.MapFS {
	t.Helper()
	out := fstest.MapFS{}
	tree := os.DirFS(".")
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".git") {
			return fs.SkipDir
		}
		if d.IsDir() {
			return nil
		}
		out[name] = &fstest.MapFile{}
		if dir := path.Dir(name); dir == "docs" || dir == "kvm2test" || strings.HasSuffix(name, "_test.go") {
			out[name].Data, err = fs.ReadFile(tree, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestContract_EachKindOfFaultIsFound(t *testing.T) {
	const answerB4, evidenceB4 = "### B4 Delete and residue\n\n**Answer:** ", "**Evidence:** `delete.go`"
	tests := []struct {
		name     string
		file     string
		old, new string // the first of old becomes new
		fault    string
		why      string
	}{
		{name: "blank answer", file: specDoc, old: answerB4, new: answerB4 + "\n\n**Evidence:** x\n\n### Z\n\n", fault: `entry "B4 Delete and residue": the answer is blank`},
		{name: "blank evidence", file: specDoc, old: evidenceB4, new: "**Evidence:**\n\n### Z\n\n", fault: `entry "B4 Delete and residue": the evidence is blank`},
		{name: "no answer at all", file: specDoc, old: "## 7. The seam\n\n**Answer:**", new: "## 7. The seam\n\n", fault: `entry "7. The seam": the answer is blank`, why: "a choice beyond the contract"},
		{name: "axis without an entry", file: specDoc, old: "### D2 Root disk and space", new: "### D2 Root disk", fault: `axis "D2 Root disk and space" has no entry`},
		{name: "entry without an axis", file: specDoc, old: "### D2 Root disk and space", new: "### D9 Root disk and space", fault: `entry "D9 Root disk and space" has no axis`},
		{name: "axis removed", file: contractDoc, old: "#### E3 Health check", new: "", fault: "23 axes"},
		{name: "axis without a question", file: contractDoc, old: "*Question:* What is a machine's", new: "What is a machine's", fault: `axis "A1 Provider ID" does not say its question`},
		{name: "axis without a duty", file: contractDoc, old: "Every provider must derive the ID", new: "A provider may derive the ID", fault: `axis "A1 Provider ID" does not say its question`},
		{name: "item without a test", file: specDoc, old: "| 11.20 | `TestCreate_PermanentFailureLeavesNothing` |\n", new: "", fault: "item 11.20 has no test"},
		{name: "item with a blank row", file: specDoc, old: "| 11.20 | `TestCreate_PermanentFailureLeavesNothing` |", new: "| 11.20 | |", fault: "item 11.20 has no test"},
		{name: "row without an item", file: specDoc, old: "| 11.20 |", new: "| 11.200 |", fault: "the map has item 11.200"},
		{name: "item twice", file: specDoc, old: "| 11.20 |", new: "| 11.21 |", fault: "item 11.21 stands twice"},
		{name: "item out of order", file: contractDoc, old: "* **11.20** ", new: "* **11.99** ", fault: "item 11.99 should have number 11.20"},
		{name: "item of two sentences", file: contractDoc, old: "nothing of it is left.\n* **11.21**", new: "nothing of it is left. Or little.\n* **11.21**", fault: "item 11.20 is not one sentence"},
		{name: "items removed", file: contractDoc, old: "## 11. Conformance items", new: "## 12. Conformance items", fault: "0 conformance items"},
		{name: "map renumbered", file: specDoc, old: "## 21. Conformance map", new: "## 22. Conformance map", fault: "should have number 21"},
		{name: "test that is not there", file: specDoc, old: "| 11.20 | `TestCreate_PermanentFailureLeavesNothing`", new: "| 11.20 | `TestCreate_NoSuchTest`", fault: `there is no test "TestCreate_NoSuchTest"`},
		{
			name: "test removed from the code", file: "life_test.go", old: "func TestCreate_PermanentFailureLeavesNothing(", new: "func leavesNothing(",
			fault: `there is no test "TestCreate_PermanentFailureLeavesNothing"`,
		},
		{
			name: "test with a build tag removed", file: "integration_test.go", old: "func TestRealHost_MachineLife(", new: "func machineLifeOnAHost(",
			fault: `there is no test "TestRealHost_MachineLife"`,
		},
		{
			name: "subtest removed", file: "kvm2test/provider_life.go", old: `"Delete/Gone"`, new: `"Delete/Went"`,
			fault: `there is no test "TestProvider_ConformsOnTheFake/Delete/Gone"`,
		},
		{
			name: "test that is only mentioned", file: "life_test.go", old: "func TestCreate_PermanentFailureLeavesNothing(",
			new: "// TestCreate_PermanentFailureLeavesNothing was here.\nfunc leavesNothing(", fault: `there is no test "TestCreate_PermanentFailureLeavesNothing"`,
		},
		{name: "file that is not there", file: specDoc, old: "**Evidence:** `id.go`", new: "**Evidence:** `ids.go`", fault: `there is no file "ids.go"`},
		{name: "file that is not there, in the design", file: designDoc, old: "`transport.go`", new: "`transports.go`", fault: `there is no file "transports.go"`},
	}
	clean := copyOfTree(t)
	if faults, err := contractFaults(clean); err != nil || len(faults) != 0 {
		t.Fatalf("the copy has faults: %q, %v", faults, err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tree := maps.Clone(clean)
			source := string(clean[tt.file].Data)
			if !strings.Contains(source, tt.old) {
				t.Fatalf("%s does not have %q", tt.file, tt.old)
			}
			tree[tt.file] = &fstest.MapFile{Data: []byte(strings.Replace(source, tt.old, tt.new, 1))}
			faults, err := contractFaults(tree)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, tt.fault) }) {
				t.Errorf("faults: %q, want one with %q; %s", faults, tt.fault, tt.why)
			}
		})
	}
}

func TestContract_RemovedFileIsMissed(t *testing.T) {
	tree := copyOfTree(t)
	delete(tree, "metadata.go")
	faults, err := contractFaults(tree)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, `there is no file "metadata.go"`) }) {
		t.Errorf("faults: %q", faults)
	}
}
