package fake

import (
	"encoding/xml"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/kvm2/kvm2"
)

// A node is an element of metadata, as libvirt keeps it: prefixes and all.
type node struct {
	name     xml.Name // Space is the prefix
	attrs    []xml.Attr
	text     string
	children []*node
	spaces   map[string]string // the namespaces in scope, by prefix
}

// parseNodes reads a run of elements.
func parseNodes(source string) ([]*node, error) {
	root := &node{spaces: map[string]string{}}
	stack := []*node{root}
	d := xml.NewDecoder(strings.NewReader(source))
	for {
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		top := stack[len(stack)-1]
		switch t := token.(type) {
		case xml.StartElement:
			n := newNode(top, t.Copy())
			top.children = append(top.children, n)
			stack = append(stack, n)
		case xml.EndElement:
			if len(stack) == 1 || top.name != t.Name {
				return nil, errors.New("an element ends that has not begun")
			}
			stack = stack[:len(stack)-1]
		case xml.CharData:
			top.text += string(t)
		}
	}
	if len(stack) != 1 {
		return nil, errors.New("an element does not end")
	}
	return root.children, nil
}

func newNode(parent *node, start xml.StartElement) *node {
	n := &node{name: start.Name, attrs: start.Attr, spaces: maps.Clone(parent.spaces)}
	for _, a := range start.Attr {
		if prefix, ok := declares(a); ok {
			n.spaces[prefix] = a.Value
		}
	}
	return n
}

// declares reports whether an attribute declares a namespace, and the prefix that it declares.
func declares(a xml.Attr) (prefix string, ok bool) {
	if a.Name.Space == "xmlns" {
		return a.Name.Local, true
	}
	return "", a.Name.Space == "" && a.Name.Local == "xmlns"
}

func (n *node) space() string { return n.spaces[n.name.Space] }

// kvm2Element finds kvm2's element in the content of a domain's metadata. It is written as libvirt gives it out:
// indented, and with its own namespace taken away.
func kvm2Element(metadata string) (string, error) {
	nodes, err := parseNodes(metadata)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(nodes, func(n *node) bool { return n.space() == kvm2.MetadataNamespace })
	if i < 0 {
		return "", nil
	}
	return nodes[i].print(), nil
}

func (n *node) print() string {
	var b strings.Builder
	n.write(&b, 0)
	return b.String()
}

// write does what libxml2's formatted output does: an element with text is not indented inside.
func (n *node) write(b *strings.Builder, depth int) {
	name := n.qualified()
	b.WriteString("<" + name)
	for _, a := range n.attributes() {
		b.WriteString(" " + join(a.Name) + `="` + attrEscaper.Replace(a.Value) + `"`)
	}
	hasText := strings.TrimSpace(n.text) != ""
	if len(n.children) == 0 && !hasText {
		b.WriteString("/>")
		return
	}
	b.WriteString(">")
	if hasText {
		b.WriteString(textEscaper.Replace(n.text))
	}
	for _, c := range n.children {
		if !hasText {
			b.WriteString("\n" + strings.Repeat("  ", depth+1))
		}
		c.write(b, depth+1)
	}
	if !hasText {
		b.WriteString("\n" + strings.Repeat("  ", depth))
	}
	b.WriteString("</" + name + ">")
}

// qualified is the element's name; kvm2's namespace is the default one in what libvirt gives out.
func (n *node) qualified() string {
	if n.space() == kvm2.MetadataNamespace {
		return n.name.Local
	}
	return join(n.name)
}

// attributes are the element's attributes, namespace declarations first and without that of kvm2.
func (n *node) attributes() []xml.Attr {
	var spaces, rest []xml.Attr
	for _, a := range n.attrs {
		_, isSpace := declares(a)
		switch {
		case !isSpace:
			rest = append(rest, a)
		case a.Value != kvm2.MetadataNamespace:
			spaces = append(spaces, a)
		}
	}
	return append(spaces, rest...)
}

func join(name xml.Name) string {
	if name.Space == "" {
		return name.Local
	}
	return name.Space + ":" + name.Local
}

var (
	textEscaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;")
	attrEscaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "\n", "&#10;", "\t", "&#9;")
)
