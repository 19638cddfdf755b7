package kvm2test

import (
	"os"
	"strings"
	"testing"
)

// unseen are the entries of the list that no case can show, by how they begin, and why.
var unseen = map[string]string{
	"Guests do not run":                 "what a guest does inside is not part of the seam",
	"Calls take effect one after":       "whether calls overlap depends on timing",
	"After an upload libvirt looks":     "when libvirt looks depends on timing",
	"A domain's XML is kept as it came": "the seam returns no domain XML, only its metadata",
	"All pools are directories":         "needs pools of other types, which the suite does not make",
	"Memory is only compared":           "needs guests that use up the host's memory",
	"ARP entries are those":             "needs a guest that talks to the host",
	"DHCP leases are for IPv4":          "needs a guest that asks for a lease",
	"Permissions, access control":       "needs a host that is configured for them",
}

func TestDifferences_EachIsCheckedOrCannotBeSeen(t *testing.T) {
	known := make(map[string]bool)
	for begin := range unseen {
		known[begin] = false
	}
	for _, c := range differingCases() {
		if unseen[c.Entry] != "" {
			t.Errorf("%q has case %s and stands among those that cannot be seen", c.Entry, c.Name)
		}
		known[c.Entry] = false
	}
	for _, entry := range listedDifferences(t) {
		var matches []string
		for begin := range known {
			if strings.HasPrefix(entry, begin) {
				matches = append(matches, begin)
				if known[begin] {
					t.Errorf("%q begins more than one entry", begin)
				}
				known[begin] = true
			}
		}
		if len(matches) != 1 {
			t.Errorf("entry %q is covered by %q, want exactly one", entry, matches)
		}
	}
	for begin, found := range known {
		if !found {
			t.Errorf("no entry of the list in fake/doc.go begins with %q", begin)
		}
	}
}

// listedDifferences are the first lines of the entries in fake/doc.go.
func listedDifferences(t *testing.T) []string {
	t.Helper()
	doc, err := os.ReadFile("../fake/doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(doc), "// # How it differs from libvirt\n")
	if !found {
		t.Fatal("fake/doc.go has no list of differences")
	}
	list, _, _ = strings.Cut(list, "\n// # ") // up to the next section
	var entries []string
	for line := range strings.Lines(list) {
		if entry, ok := strings.CutPrefix(line, "//   - "); ok {
			entries = append(entries, strings.TrimSpace(entry))
		}
	}
	return entries
}
