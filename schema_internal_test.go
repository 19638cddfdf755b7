package kvm2

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What libvirt's own schema says of what is built. The tests skip where it is not installed.

func TestSchema_DomainsAreValid(t *testing.T) {
	for _, tt := range domainCases() {
		t.Run(tt.name, func(t *testing.T) { validateXML(t, "domain", tt.build(t)) })
	}
}

func TestSchema_VolumesAreValid(t *testing.T) {
	for _, tt := range volumeCases(testPlan(t)) {
		t.Run(tt.name, func(t *testing.T) {
			xml, err := tt.build()
			if err != nil {
				t.Fatal(err)
			}
			validateXML(t, "storagevol", xml)
		})
	}
}

func validateXML(t testing.TB, schema, xml string) {
	t.Helper()
	lookTool(t, "xmllint") // which the validator runs
	validator := lookTool(t, "virt-xml-validate")
	path := filepath.Join(t.TempDir(), schema+".xml")
	if err := os.WriteFile(path, []byte(xml), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), validator, path, schema)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out.String(), xml)
	}
}
