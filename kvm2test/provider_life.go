package kvm2test

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/kvm2/kvm2"
)

// never is the ID of a machine that was never created, on the host of one that is.
func (c *contract) never(real kvm2.Machine) string {
	c.Helper()
	id, err := kvm2.ParseID(real.ID)
	if err != nil {
		c.Fatal(err)
	}
	id.UUID = kvm2.MachineUUID(c.f.Scope, "never-created")
	return id.String()
}

// notOurs are IDs that are none of this provider's.
func (c *contract) notOurs(real kvm2.Machine) []string {
	c.Helper()
	id, err := kvm2.ParseID(real.ID)
	if err != nil {
		c.Fatal(err)
	}
	id.Host = "another." + id.Host
	return []string{"", "nonsense", "aws:///eu-1/i-0123", "kvm2://", real.ID + "0", id.String()}
}

func getCases() []providerCase {
	return []providerCase{
		{"Get/ShowsWhatCreateShowed", "Get shows the machine that Create made.", func(c *contract) {
			m := c.running(c.spec("a"))
			c.wantSame(c.get(m.ID), m)
		}},
		{"Get/NotFound", "A machine that does not exist is ErrNotFound, of class NotFound.", func(c *contract) {
			_, err := c.p.Get(c.ctx, c.never(c.running(c.spec("a"))))
			c.wantError("Get", err, kvm2.ClassNotFound, kvm2.ErrNotFound)
		}},
		{"Get/InvalidID", "An ID that is malformed or of another host is ErrInvalidSpec, and never NotFound.", func(c *contract) {
			for _, id := range c.notOurs(c.running(c.spec("a"))) {
				_, err := c.p.Get(c.ctx, id)
				c.wantError("Get "+id, err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
			}
		}},
		{"Get/Started", "A machine is found as soon as Create has begun to make it, or not yet, but never with an error of another class.", func(c *contract) {
			m, err := c.p.Create(c.ctx, c.spec("a"))
			if err != nil {
				c.Fatalf("Create: %v", err)
			}
			got, err := c.p.Get(c.ctx, m.ID)
			if class := kvm2.ClassOf(err); class != kvm2.ClassNone && class != kvm2.ClassNotFound {
				c.Errorf("got %v of class %v", err, class)
			}
			if err == nil && got.ID != m.ID {
				c.Errorf("got ID %q, want %q", got.ID, m.ID)
			}
		}},
	}
}

func deleteCases() []providerCase {
	return []providerCase{
		{"Delete/NothingRemains", "Once Delete returns nil nothing of the machine remains.", func(c *contract) {
			m := c.running(c.spec("a"))
			c.delete(m.ID)
			_, err := c.p.Get(c.ctx, m.ID)
			c.wantError("Get", err, kvm2.ClassNotFound, kvm2.ErrNotFound)
			c.wantOnly()
		}},
		{"Delete/Gone", "Deleting what is gone, or never was, is nil.", func(c *contract) {
			m := c.running(c.spec("a"))
			never := c.never(m)
			c.delete(m.ID)
			for _, id := range []string{m.ID, never} {
				if err := c.p.Delete(c.ctx, id); err != nil {
					c.Errorf("Delete %s: %v", id, err)
				}
			}
		}},
		{"Delete/HalfCreated", "A machine whose creation has only begun can be deleted.", func(c *contract) {
			m, err := c.p.Create(c.ctx, c.spec("a"))
			if err != nil {
				c.Fatalf("Create: %v", err)
			}
			c.delete(m.ID)
			c.wantOnly()
		}},
		{"Delete/LeavesOthers", "Deleting one machine leaves all others alone.", func(c *contract) {
			a, b := c.running(c.spec("a")), c.running(c.spec("b"))
			c.delete(a.ID)
			c.wantOnly(b)
		}},
		{"Delete/InvalidID", "An ID that is malformed or of another host is ErrInvalidSpec: nobody knows whether that machine is gone.", func(c *contract) {
			m := c.running(c.spec("a"))
			for _, id := range c.notOurs(m) {
				c.wantError("Delete "+id, c.p.Delete(c.ctx, id), kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
			}
			c.wantOnly(m)
		}},
		{"Delete/ManyAtOnce", "Many calls at once delete one machine, and all of them learn so.", func(c *contract) {
			m := c.running(c.spec("a"))
			errs := make([]error, 6)
			atOnce(len(errs), func(i int) { errs[i] = c.pollDelete(c.ctx, c.p, m.ID) })
			if err := errors.Join(errs...); err != nil {
				c.Errorf("Delete: %v", err)
			}
			c.wantOnly()
		}},
	}
}

func listCases() []providerCase {
	return []providerCase{
		{"List/Empty", "A scope without machines has an empty list, and no error.", func(c *contract) {
			c.wantOnly()
		}},
		{"List/SortedAndComplete", "List shows every machine, sorted by name.", func(c *contract) {
			for _, name := range []string{"b", "c", "a"} {
				c.running(c.spec(name))
			}
			got := c.list()
			if len(got) != 3 || !slices.IsSortedFunc(got, func(a, b kvm2.Machine) int { return cmp.Compare(a.Name, b.Name) }) {
				c.Errorf("got %+v, want three, sorted by name", got)
			}
			for _, m := range got {
				c.wantSame(m, c.get(m.ID))
			}
		}},
		{"Scope/OthersAreInvisible", "A provider of another scope does not list the machine, and refuses to show or delete it.", func(c *contract) {
			m := c.running(c.spec("a"))
			other := c.f.New(c.T, c.f.Scope+"-other")
			if got, err := other.List(c.ctx); err != nil || len(got) != 0 {
				c.Errorf("List: got %+v and %v, want nothing", got, err)
			}
			_, err := other.Get(c.ctx, m.ID)
			c.wantError("Get", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
			c.wantError("Delete", other.Delete(c.ctx, m.ID), kvm2.ClassPermanent, kvm2.ErrForeignOwner)
			c.wantOnly(m)
		}},
	}
}

// processCases are about restarts, several processes, and callers that give up.
func processCases() []providerCase {
	return []providerCase{
		{"Restart/SameMachines", "A new provider shows the machines of the one before.", func(c *contract) {
			m := c.running(c.spec("a"))
			c.p = c.f.New(c.T, c.f.Scope)
			c.wantSame(c.get(m.ID), m)
			c.wantSame(c.running(c.spec("a")), m)
			c.wantOnly(m)
		}},
		{"Restart/GoesOn", "What one provider began, another one finishes.", func(c *contract) {
			spec := c.spec("a")
			for range 20 {
				p := c.f.New(c.T, c.f.Scope)
				m, err := p.Create(c.ctx, spec)
				if err != nil && kvm2.ClassOf(err) != kvm2.ClassTransient {
					c.Fatalf("Create: %v", err)
				}
				if err == nil && m.State == kvm2.StateRunning {
					break
				}
			}
			c.wantOnly(c.running(spec))
		}},
		{"Processes/CreateAtOnce", "Several providers that create one machine at once make one.", func(c *contract) {
			c.createAtOnce(c.p, c.f.New(c.T, c.f.Scope), c.f.New(c.T, c.f.Scope), c.f.New(c.T, c.f.Scope))
		}},
		{"Processes/DeleteAtOnce", "Several providers that delete one machine at once all learn that it is gone.", func(c *contract) {
			m := c.running(c.spec("a"))
			providers := []Provider{c.p, c.f.New(c.T, c.f.Scope), c.f.New(c.T, c.f.Scope)}
			errs := make([]error, len(providers))
			atOnce(len(providers), func(i int) { errs[i] = c.pollDelete(c.ctx, providers[i], m.ID) })
			if err := errors.Join(errs...); err != nil {
				c.Errorf("Delete: %v", err)
			}
			c.wantOnly()
		}},
		{"Cancelled/Transient", "A call whose context has ended is Transient with that context's error, never NotFound and never done.", func(c *contract) {
			m := c.running(c.spec("a"))
			ctx, cancel := context.WithCancel(c.ctx)
			cancel()
			_, createErr := c.p.Create(ctx, c.spec("b"))
			c.wantError("Create", createErr, kvm2.ClassTransient, context.Canceled)
			_, getErr := c.p.Get(ctx, c.never(m))
			c.wantError("Get", getErr, kvm2.ClassTransient, context.Canceled)
			c.wantError("Delete", c.p.Delete(ctx, m.ID), kvm2.ClassTransient, context.Canceled)
			_, listErr := c.p.List(ctx)
			c.wantError("List", listErr, kvm2.ClassTransient, context.Canceled)
			c.wantOnly(m)
		}},
	}
}
