package kvm2test

import (
	"strings"

	"github.com/kvm2/kvm2"
)

func createCases() []providerCase {
	return []providerCase{
		{"Create/SameIDFromTheFirstCallOn", "The ID is known from the first call on and never changes.", func(c *contract) {
			spec := c.spec("a")
			first, err := c.p.Create(c.ctx, spec)
			if err != nil && kvm2.ClassOf(err) != kvm2.ClassTransient {
				c.Fatalf("Create: %v", err)
			}
			id, err := kvm2.ParseID(first.ID)
			if err != nil || id.UUID != first.UUID {
				c.Fatalf("got ID %q and UUID %v, want them to agree (%v)", first.ID, first.UUID, err)
			}
			if got := c.running(spec).ID; got != first.ID {
				c.Errorf("got ID %q, then %q", first.ID, got)
			}
		}},
		{"Create/ReachesRunning", "Polling Create ends with a running machine that is what its spec says.", func(c *contract) {
			spec := c.spec("a")
			spec.Labels = map[string]string{"pool": "blue", "note": `<&>"' ü`}
			m := c.running(spec)
			want := m
			want.Name, want.OwnerUID, want.Labels, want.State = spec.Name, spec.OwnerUID, spec.Labels, kvm2.StateRunning
			c.wantSame(m, want)
			if m.CreatedAt.IsZero() || m.Drifted || m.Image != nil {
				c.Errorf("got %+v, want a creation time, no drift and no image to wait for", m)
			}
		}},
		{"Create/Again", "Creating a running machine again changes nothing.", func(c *contract) {
			m := c.running(c.spec("a"))
			for range 3 {
				c.wantSame(c.running(c.spec("a")), m)
			}
			c.wantOnly(m)
		}},
		{"Create/OwnerDecidesIdentity", "Machines of two owners are two machines.", func(c *contract) {
			a, b := c.running(c.spec("a")), c.running(c.spec("b"))
			if a.ID == b.ID || a.UUID == b.UUID {
				c.Errorf("got %+v and %+v, want two machines", a, b)
			}
			c.wantOnly(a, b)
		}},
		{"Create/DriftIsNoError", "Other hardware in the spec of a machine that exists is reported as drift, and changes nothing.", func(c *contract) {
			m := c.running(c.spec("a"))
			spec := c.spec("a")
			spec.CPUs++
			got := c.running(spec)
			c.wantSame(got, m)
			if !got.Drifted {
				c.Error("it is not reported as drifted")
			}
			if c.running(c.spec("a")).Drifted {
				c.Error("with its own spec it is reported as drifted")
			}
		}},
		{"Create/UserDataIsNoDrift", "Other user data are no drift: bootstrap tokens rotate.", func(c *contract) {
			m := c.running(c.spec("a"))
			spec := c.spec("a")
			spec.UserData = append([]byte(nil), "#cloud-config\n# another one\n"...)
			got := c.running(spec)
			c.wantSame(got, m)
			if got.Drifted {
				c.Error("it is reported as drifted")
			}
		}},
		{"Create/AfterDelete", "A machine that was deleted can be created again, with the same ID.", func(c *contract) {
			m := c.running(c.spec("a"))
			c.delete(m.ID)
			if got := c.running(c.spec("a")); got.ID != m.ID {
				c.Errorf("got ID %q, want %q", got.ID, m.ID)
			}
		}},
		{"Create/ManyAtOnce", "Many calls at once make one machine.", func(c *contract) {
			c.createAtOnce(c.p, c.p, c.p, c.p, c.p, c.p)
		}},
	}
}

// createAtOnce creates one machine through all providers at once.
func (c *contract) createAtOnce(providers ...Provider) {
	c.Helper()
	machines, errs := make([]kvm2.Machine, len(providers)), make([]error, len(providers))
	atOnce(len(providers), func(i int) { machines[i], errs[i] = c.pollCreate(providers[i], c.spec("a")) })
	for i, err := range errs {
		if err != nil {
			c.Fatalf("Create: %v", err)
		}
		if machines[i].ID != machines[0].ID {
			c.Errorf("got IDs %q and %q, want one", machines[0].ID, machines[i].ID)
		}
	}
	c.wantOnly(c.get(machines[0].ID))
}

// refusalCases are the specs that Create refuses.
func refusalCases() []providerCase {
	cases := []providerCase{
		{"Create/NameOfAnotherOwner", "A name that another owner's machine has is ErrForeignOwner, and that machine is not touched.", func(c *contract) {
			m := c.running(c.spec("a"))
			_, err := c.pollCreate(c.p, c.f.Spec("a", "another"))
			c.wantError("Create", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
			c.wantOnly(m)
		}},
		{"Create/OtherName", "Another name for a machine that exists is refused as Permanent, and the machine keeps its name.", func(c *contract) {
			m := c.running(c.spec("a"))
			spec := c.spec("a")
			spec.Name = "b"
			_, err := c.pollCreate(c.p, spec)
			c.wantError("Create", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
			c.wantOnly(m)
		}},
	}
	for name, spoil := range map[string]func(*kvm2.Spec){
		"no name":       func(s *kvm2.Spec) { s.Name = "" },
		"name":          func(s *kvm2.Spec) { s.Name = "Not_A_Label" },
		"no owner":      func(s *kvm2.Spec) { s.OwnerUID = "" },
		"no CPUs":       func(s *kvm2.Spec) { s.CPUs = 0 },
		"little memory": func(s *kvm2.Spec) { s.MemoryBytes = 1 },
		"no root disk":  func(s *kvm2.Spec) { s.RootDiskBytes = 0 },
		"no checksum":   func(s *kvm2.Spec) { s.Image.Checksum = "" },
		"two disks of name": func(s *kvm2.Spec) {
			s.Disks = []kvm2.Disk{{Name: "x", SizeBytes: 1 << 20}, {Name: "x", SizeBytes: 1 << 20}}
		},
		"firmware":       func(s *kvm2.Spec) { s.Firmware = "nonsense" },
		"much user data": func(s *kvm2.Spec) { s.UserData = []byte(strings.Repeat("x", kvm2.MaxUserDataBytes+1)) },
	} {
		cases = append(cases, providerCase{
			"Create/InvalidSpec/" + strings.ReplaceAll(name, " ", "-"),
			"An invalid spec is ErrInvalidSpec, and nothing is made.",
			func(c *contract) {
				spec := c.spec("a")
				spoil(&spec)
				_, err := c.p.Create(c.ctx, spec)
				c.wantError("Create", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
				c.wantOnly()
			},
		})
	}
	return cases
}
