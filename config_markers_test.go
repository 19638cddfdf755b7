package kvm2_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
)

// Config can stand in a custom resource. What the API server refuses by the validation markers, and what Validate
// refuses, must be the same.

// markers are the validation markers of one field, or of its type, by their names.
type markers map[string]string

const markerPrefix = "+kubebuilder:validation:"

func markersIn(doc *ast.CommentGroup) markers {
	m := markers{}
	if doc == nil {
		return m
	}
	for _, c := range doc.List {
		text := strings.TrimSpace(strings.TrimPrefix(c.Text, "//"))
		if rest, ok := strings.CutPrefix(text, markerPrefix); ok {
			name, value, _ := strings.Cut(rest, "=")
			m[name] = strings.Trim(value, "`")
		}
	}
	return m
}

// configMarkers are the markers of the fields of Config, by their JSON paths ("images.timeout"), and those of type
// Duration.
func configMarkers(t *testing.T) (fields map[string]markers, duration markers) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	fields = map[string]markers{}
	ast.Inspect(file, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok || decl.Tok != token.TYPE {
			return true
		}
		name := decl.Specs[0].(*ast.TypeSpec).Name.Name
		switch structType, _ := decl.Specs[0].(*ast.TypeSpec).Type.(*ast.StructType); name {
		case "Config":
			addFieldMarkers(t, fields, "", structType)
		case "ImagesConfig":
			addFieldMarkers(t, fields, "images.", structType)
		case "SSHConfig":
			addFieldMarkers(t, fields, "ssh.", structType)
		case "Duration":
			duration = markersIn(decl.Doc)
		}
		return true
	})
	return fields, duration
}

func addFieldMarkers(t *testing.T, fields map[string]markers, prefix string, s *ast.StructType) {
	t.Helper()
	for _, f := range s.Fields.List {
		tag, err := strconv.Unquote(f.Tag.Value)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		fields[prefix+name] = markersIn(f.Doc)
	}
}

// configWith is a valid Config but for one field, given by its JSON path.
func configWith(t *testing.T, path string, value any) kvm2.Config {
	t.Helper()
	fields := map[string]any{"uri": "qemu:///system", "scope": "a"}
	if outer, inner, ok := strings.Cut(path, "."); ok {
		fields[outer] = map[string]any{inner: value}
	} else {
		fields[path] = value
	}
	data, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	c, err := kvm2.DecodeConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// wantAgreement checks that Validate accepts a value of a field if the markers do.
func wantAgreement(t *testing.T, path string, value any, byMarkers bool) {
	t.Helper()
	if err := configWith(t, path, value).Validate(""); (err == nil) != byMarkers {
		t.Errorf("%s: %v: accepted by the markers: %t; Validate() = %v", path, value, byMarkers, err)
	}
}

func TestConfigMarkers_EveryFieldHasItsBounds(t *testing.T) {
	fields, _ := configMarkers(t)
	if len(fields) < 14 {
		t.Fatalf("found %d fields only", len(fields))
	}
	typed := []string{"callTimeout", "idleTimeout", "images", "images.stallTimeout", "images.timeout", "ssh"} // bounded by their types
	for path, m := range fields {
		if (len(m) == 0) != slices.Contains(typed, path) {
			t.Errorf("%s: markers %q", path, m)
		}
	}
}

func TestConfigMarkers_NumbersAgreeWithValidate(t *testing.T) {
	fields, _ := configMarkers(t)
	found := 0
	for path, m := range fields {
		if m["Minimum"] == "" {
			continue
		}
		found++
		least, err1 := strconv.Atoi(m["Minimum"])
		most, err2 := strconv.Atoi(m["Maximum"])
		if err1 != nil || err2 != nil || least != 1 && least != -1 { // 0 is the default, and -1 says none where 0 could not
			t.Fatalf("%s: markers %q", path, m)
		}
		for _, n := range []int{-2, -1, least, most, most + 1} {
			wantAgreement(t, path, n, least <= n && n <= most)
		}
	}
	if found != 5 {
		t.Errorf("found %d fields with bounds, want 5", found)
	}
}

func TestConfigMarkers_EnumsAgreeWithValidate(t *testing.T) {
	fields, _ := configMarkers(t)
	for _, path := range []string{"domainType", "arch"} {
		values := strings.Split(fields[path]["Enum"], ";")
		for _, v := range []string{"kvm", "qemu", "xen", "x86_64", "aarch64", "riscv64", "KVM"} {
			wantAgreement(t, path, v, slices.Contains(values, v))
		}
	}
}

func TestConfigMarkers_PatternsAreThoseOfTheCode(t *testing.T) {
	fields, _ := configMarkers(t)
	code := regexpLiterals(t)
	for path, name := range map[string]string{"scope": "scopeForm", "host": "hostForm", "pool": "objectForm", "network": "objectForm", "ssh.configFile": "absolutePathForm"} {
		if got, want := fields[path]["Pattern"], code[name]; got != want || want == "" {
			t.Errorf("%s: the marker's pattern is %q, that of %s %q", path, got, name, want)
		}
	}
}

// regexpLiterals are the patterns of the package's regular expressions, by the names of their variables.
func regexpLiterals(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Names) == 1 && len(spec.Values) == 1 {
				if call, ok := spec.Values[0].(*ast.CallExpr); ok && len(call.Args) == 1 {
					if lit, ok := call.Args[0].(*ast.BasicLit); ok {
						out[spec.Names[0].Name], _ = strconv.Unquote(lit.Value)
					}
				}
			}
			return true
		})
	}
	return out
}

func TestConfigMarkers_PatternsAgreeWithValidate(t *testing.T) {
	fields, _ := configMarkers(t)
	long := strings.Repeat("a", 300)
	values := []string{
		"a", "0", "a-b", "-a", "a-", "A", "a.b", "a_b", "_a", "a:b", "a+b", "a b", "a/b", "ä", "192.0.2.1", "2001:db8::1", "::1", "::", ".a", "a\n",
		long[:40], long[:41], long[:128], long[:129], long[:253], long[:254], long,
	}
	values = append(values, "/a b/c", "/")
	for _, path := range []string{"scope", "host", "pool", "network", "ssh.configFile"} {
		pattern := regexp.MustCompile(fields[path]["Pattern"])
		for _, v := range values {
			wantAgreement(t, path, v, pattern.MatchString(v))
		}
	}
	wantAgreement(t, "uri", "", false) // MinLength=1
}

func TestConfigMarkers_JumpHostsAreWhatValidateTakesAtLeast(t *testing.T) {
	fields, _ := configMarkers(t)
	pattern := regexp.MustCompile(fields["ssh.proxyJump"]["Pattern"])
	for _, v := range []string{"none", "a", "op@a:22, b", `DOM\op@a`, "op@[2001:db8::1]:22", "fe80::1%eth0", "user+x@a_b.c-d"} {
		wantAgreement(t, "ssh.proxyJump", v, pattern.MatchString(v))
	}
	for _, v := range []string{"a;b", "$(x)", "a\n", "ä", "a/b", `a"`} {
		wantAgreement(t, "ssh.proxyJump", v, false)
		if pattern.MatchString(v) {
			t.Errorf("the marker takes %q", v)
		}
	}
}

func TestConfigMarkers_DurationsAgreeWithValidate(t *testing.T) {
	_, m := configMarkers(t)
	bounds := regexp.MustCompile(`^"self >= duration\('(\w+)'\) && self <= duration\('(\w+)'\)",message="want (\w+) to (\w+)"$`).
		FindStringSubmatch(m["XValidation:rule"])
	if bounds == nil || bounds[1] != bounds[3] || bounds[2] != bounds[4] || m["Type"] != "string" || m["Format"] != "duration" {
		t.Fatalf("markers: %q", m)
	}
	least, err1 := time.ParseDuration(bounds[1])
	most, err2 := time.ParseDuration(bounds[2])
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	pattern := regexp.MustCompile(m["Pattern"])
	for _, path := range []string{"callTimeout", "idleTimeout", "images.stallTimeout", "images.timeout"} {
		for _, d := range []time.Duration{-time.Second, 1, least - 1, least, least + 1, 90 * time.Second, most, most + 1} {
			text, err := kvm2.Duration(d).MarshalText()
			if err != nil {
				t.Fatal(err)
			}
			within := least <= d && d <= most
			wantAgreement(t, path, string(text), within)
			if within && !pattern.Match(text) {
				t.Errorf("%q is not of the form %q", text, pattern)
			}
		}
	}
}

func TestConfigDeepCopy_NeedsNoKubernetes(t *testing.T) {
	for _, path := range []string{"zz_generated.deepcopy.go", "go.mod", "go.sum"} {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(data), "k8s.io/") {
			t.Errorf("%s names a Kubernetes module", path)
		}
	}
}

func TestConfigDeepCopy_IsEqual(t *testing.T) {
	c := kvm2.Config{
		URI: "qemu:///system", Scope: "a", Host: "h", Pool: "p", Network: "n", DomainType: "qemu", Arch: "aarch64", OvercommitPercent: 1,
		CallTimeout: 2, MaxConnections: 3, IdleTimeout: 4, Images: kvm2.ImagesConfig{StallTimeout: 5, Timeout: 6, MaxTransfers: 7, MaxRetries: 8, MaxExpandedBytes: 9},
		SSH: kvm2.SSHConfig{ConfigFile: "/c", ProxyJump: "j"},
	}
	for name, v := range reflect.ValueOf(c).Fields() {
		if v.IsZero() {
			t.Fatalf("%+v leaves %s out", c, name.Name)
		}
	}
	if got := c.DeepCopy(); *got != c || got == &c {
		t.Errorf("DeepCopy() = %+v, want %+v", *got, c)
	}
	if (*kvm2.Config)(nil).DeepCopy() != nil || (*kvm2.ImagesConfig)(nil).DeepCopy() != nil || (*kvm2.SSHConfig)(nil).DeepCopy() != nil {
		t.Error("the copy of nothing is something")
	}
}
