package kvm2test

import (
	"fmt"
	"strings"
	"testing"
)

// A differingCase is something that libvirt does and the fake does not. It keeps the list in fake/doc.go honest: it
// must hold on a real target and must not hold on the fake.
type differingCase struct {
	Name  string
	Rule  string
	Entry string // how the list's entry begins
	Holds func(*seam) error
}

func (c differingCase) run(s *seam) {
	s.Helper()
	s.Log("rule: " + c.Rule)
	err := c.Holds(s)
	switch {
	case s.caps.Fake && err == nil:
		s.Errorf("the list in fake/doc.go says that the fake differs here, and it does not: %q", c.Entry)
	case s.caps.Fake:
		s.Logf("differs as listed: %v", err)
	case err != nil:
		s.Error(err)
	}
}

// refused is nil if err is libvirt's answer with the code.
func refused(err error, code int) error {
	if codeOf(err) != code {
		return fmt.Errorf("got error %q, want libvirt's code %d", fmt.Sprint(err), code)
	}
	return nil
}

func runDiffering(t *testing.T, caps Caps, newCase func(t *testing.T, base string) *seam) {
	t.Helper()
	for i, c := range differingCases() {
		t.Run("Differs/"+c.Name, func(t *testing.T) {
			c.run(newCase(t, fmt.Sprintf("%s-differs-%d", caps.Prefix, i)))
		})
	}
}

func differingCases() []differingCase {
	return []differingCase{
		{"DeepElement", "An element that the schema does not know below a device is code 92.", "Of libvirt's schema only", func(s *seam) error {
			d := s.spec("d")
			d.devices = fmt.Sprintf("<interface type='network'><source network='%s'/><nonsense/></interface>", escaped(s.caps.Network))
			return refused(s.conn.DefineDomain(s.ctx, d.xml()), 92)
		}},
		{"MachineType", "A machine type that the host does not have is refused when the domain is defined.", "Of libvirt's schema only", func(s *seam) error {
			xml := strings.Replace(s.spec("d").xml(), "<type>", "<type machine='nonsense'>", 1)
			if err := s.conn.DefineDomain(s.ctx, xml); codeOf(err) == 0 {
				return fmt.Errorf("got error %q, want an answer of libvirt's", fmt.Sprint(err))
			}
			return nil
		}},
		{"ParseErrorText", "The text of a parse error shows the line and points to the place.", "Parse errors (code 35)", func(s *seam) error {
			err := s.conn.DefineDomain(s.ctx, "<domain><name>"+s.name("d"))
			s.wantCode(err, 35)
			if !strings.Contains(err.Error(), "-^") {
				return fmt.Errorf("got error %w, want one that points to the place", err)
			}
			return nil
		}},
		{"VolumeFormat", "A volume can be of a format other than raw and qcow2.", "Domains other than QEMU's", func(s *seam) error {
			return s.conn.CreateVolume(s.ctx, s.caps.Pool, fmt.Sprintf("<volume><name>%s</name><capacity>1048576</capacity>"+
				"<target><format type='vmdk'/></target></volume>", escaped(s.name("v"))))
		}},
		{"BackingFile", "A backing file may lie outside of all pools.", "A backing file is looked for only", func(s *seam) error {
			overlay := qcow2XML(s.name("v"), 1<<20, "/etc/passwd") // a file that every host has
			raw := strings.Replace(overlay, "<path>/etc/passwd</path><format type='qcow2'/>", "<path>/etc/passwd</path><format type='raw'/>", 1)
			return s.conn.CreateVolume(s.ctx, s.caps.Pool, raw)
		}},
	}
}
