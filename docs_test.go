package kvm2_test

import (
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
	"strings"
	"testing"
	"testing/fstest"
)

// Code that is shown in the README and in docs/ is code that is compiled and run: each Go snippet stands, word for
// word, in a test or in an example program. Its indentation may differ.

const (
	readmeDoc  = "README.md"
	testingDoc = "docs/testing-with-the-fake.md"
)

// snippet is one fenced block of Go in a document.
type snippet struct {
	line int // of its first line of code
	code string
}

// fence is a line that opens or closes a block (https://spec.commonmark.org/0.31.2/#fenced-code-blocks).
var fence = regexp.MustCompile("^( *)(```+|~~~+) *([^ `{\n]*)")

// goSnippets returns the Go blocks of a document. A block that does not end is taken to its end.
func goSnippets(doc string) []snippet {
	var out []snippet
	var indent, open, language string
	var block snippet
	number := 0
	for line := range strings.Lines(doc) {
		number++
		m := fence.FindStringSubmatch(line)
		switch {
		case open == "" && m != nil:
			indent, open, language = m[1], m[2], strings.ToLower(m[3])
			block = snippet{line: number + 1}
		case open != "" && m != nil && m[3] == "" && strings.HasPrefix(m[2], open):
			if language == "go" || language == "golang" {
				out = append(out, block)
			}
			open = ""
		case open != "":
			block.code += strings.TrimPrefix(line, indent)
		}
	}
	if open != "" {
		out = append(out, block)
	}
	return out
}

// stands reports whether the code stands in a source as whole lines, however far they are indented.
func stands(code, source string) bool {
	const deepest = 6
	for depth := range deepest {
		if strings.Contains("\n"+source, "\n"+indented(code, depth)) {
			return true
		}
	}
	return false
}

func indented(code string, tabs int) string {
	var b strings.Builder
	for line := range strings.Lines(code) {
		if line != "\n" {
			b.WriteString(strings.Repeat("\t", tabs))
		}
		b.WriteString(line)
	}
	return b.String()
}

// documents returns the texts that are checked, by name.
func documents(tree fs.FS) (map[string]string, error) {
	names, err := fs.Glob(tree, "docs/*.md")
	if err != nil {
		return nil, err
	}
	docs := map[string]string{}
	for _, name := range append(names, readmeDoc) {
		data, err := fs.ReadFile(tree, name)
		if err != nil {
			return nil, err
		}
		docs[name] = string(data)
	}
	return docs, nil
}

// runSources returns the sources of tests and of example programs.
func runSources(tree fs.FS) ([]string, error) {
	var out []string
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") {
			return err
		}
		if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "examples/") {
			data, err := fs.ReadFile(tree, name)
			out = append(out, string(data))
			return err
		}
		return nil
	})
	return out, err
}

// snippetFaults returns the snippets that are not compiled, and how many there are in each document.
func snippetFaults(tree fs.FS) (faults []string, counts map[string]int, err error) {
	docs, err := documents(tree)
	if err != nil {
		return nil, nil, err
	}
	sources, err := runSources(tree)
	if err != nil {
		return nil, nil, err
	}
	counts = map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		for _, s := range goSnippets(docs[name]) {
			counts[name]++
			if !slices.ContainsFunc(sources, func(source string) bool { return stands(s.code, source) }) {
				faults = append(faults, fmt.Sprintf("%s:%d: this stands in no test and no example:\n%s", name, s.line, s.code))
			}
		}
	}
	return faults, counts, nil
}

func TestDocs_EverySnippetIsCodeThatRuns(t *testing.T) {
	faults, counts, err := snippetFaults(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		t.Error(f)
	}
	for _, name := range []string{readmeDoc, testingDoc} {
		if counts[name] == 0 {
			t.Errorf("%s has no Go snippet", name)
		}
	}
	t.Logf("snippets: %v", counts)
}

func TestDocs_SnippetThatDoesNotRunIsFound(t *testing.T) {
	const source = "package p\n\nfunc f() {\n\tif a {\n\t\tb()\n\n\t\tc()\n\t}\n}\n"
	tests := []struct {
		name, block string
		fault       bool
		why         string
	}{
		{name: "whole function", block: "```go\nfunc f() {\n\tif a {\n\t\tb()\n\n\t\tc()\n\t}\n}\n```\n"},
		{name: "inner lines", block: "```go\nb()\n\nc()\n```\n", why: "a document shows them without their indentation"},
		{name: "other code", block: "```go\nd()\n```\n", fault: true},
		{name: "end of a line", block: "```go\n) {\n```\n", fault: true, why: "only whole lines count"},
		{name: "beginning of a line", block: "```go\nb(\n```\n", fault: true},
		{name: "lines left out", block: "```go\nb()\nc()\n```\n", fault: true},
		{name: "other fence", block: "~~~~ go\nd()\n~~~~\n", fault: true},
		{name: "long name", block: "```golang\nd()\n```\n", fault: true},
		{name: "attributes", block: "```go {linenos}\nd()\n```\n", fault: true},
		{name: "in a list", block: "* x\n\n  ```go\n  d()\n  ```\n", fault: true},
		{name: "in a list, and runs", block: "* x\n\n  ```go\n  b()\n  ```\n"},
		{name: "no end", block: "```go\nd()\n", fault: true},
		{name: "other language", block: "```sh\nd\n```\n"},
		{name: "fence within another", block: "````text\n```go\nd()\n```\n````\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, doc := range []string{readmeDoc, "docs/x.md"} {
				tree := fstest.MapFS{readmeDoc: {}, "docs/x.md": {}, "a/p_test.go": {Data: []byte(source)}, "a/q.go": {Data: []byte("d()\n")}}
				tree[doc] = &fstest.MapFile{Data: []byte("# Title\n\n" + tt.block)}
				faults, _, err := snippetFaults(tree)
				if err != nil {
					t.Fatal(err)
				}
				if (len(faults) > 0) != tt.fault {
					t.Errorf("%s: faults: %q, want some: %v; %s", doc, faults, tt.fault, tt.why)
				}
			}
		})
	}
}

// fakeAPI returns what a test can do with the fake: the exported functions, and the exported methods of Host and
// ActiveFault.
func fakeAPI(tree fs.FS) ([]string, error) {
	files, err := fs.Glob(tree, "fake/*.go")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		source, err := fs.ReadFile(tree, name)
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Name.IsExported() && isFakeAPI(f) {
				out = append(out, f.Name.Name)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// isFakeAPI leaves Dial out, which is for the Provider to call.
func isFakeAPI(f *ast.FuncDecl) bool {
	if f.Recv == nil {
		return true
	}
	pointer, ok := f.Recv.List[0].Type.(*ast.StarExpr)
	if !ok || f.Name.Name == "Dial" {
		return false
	}
	receiver, ok := pointer.X.(*ast.Ident)
	return ok && (receiver.Name == "Host" || receiver.Name == "ActiveFault")
}

// tableName is a name in a table, with or without arguments.
var tableName = regexp.MustCompile("`([A-Z]\\w*)[`(]")

func TestDocs_AllThatTheFakeCanDoIsNamedAndThere(t *testing.T) {
	names, err := fakeAPI(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(testingDoc)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(data)
	for _, name := range names {
		if !regexp.MustCompile("(`|host\\.|fake\\.)" + name + `\b`).MatchString(doc) {
			t.Errorf("%s does not name %s of package fake", testingDoc, name)
		}
	}
	inTables := 0
	for _, title := range []string{"What happens on a host", "What goes wrong"} {
		for _, s := range within(sectionsOf(doc), title) {
			for line := range strings.Lines(s.text) {
				if !strings.HasPrefix(line, "|") {
					continue
				}
				for _, m := range tableName.FindAllStringSubmatch(line, -1) {
					inTables++
					if !slices.Contains(names, m[1]) {
						t.Errorf("%s names %s, which package fake has not", testingDoc, m[1])
					}
				}
			}
		}
	}
	if inTables < 40 {
		t.Errorf("the tables of %s name %d things", testingDoc, inTables)
	}
}

// link is a link to a file of the repository.
var link = regexp.MustCompile(`\]\(([^)#:\s]+)(#[^)\s]*)?\)`)

func TestDocs_LinksLeadToFiles(t *testing.T) {
	tree := os.DirFS(".")
	docs, err := documents(tree)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		for _, m := range link.FindAllStringSubmatch(docs[name], -1) {
			if _, err := fs.Stat(tree, path.Join(path.Dir(name), m[1])); err != nil {
				t.Errorf("%s: the link %q: %v", name, m[1], err)
			}
		}
	}
}
