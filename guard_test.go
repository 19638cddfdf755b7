package kvm2_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"libvirt.org/go/libvirtxml"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

// labMetadata is kvm2's metadata element as it stands in a domain's XML.
func labMetadata(version int, scope, owner, name string) string {
	return fmt.Sprintf("<kvm2:machine xmlns:kvm2='%s' version='%d' scope='%s' owner='%s' name='%s' phase='started' pool='default'/>",
		kvm2.MetadataNamespace, version, scope, owner, name)
}

// foreignXML is a domain of somebody else.
func foreignXML(name string, uuid kvm2.UUID, metadata string) string {
	return fmt.Sprintf("<domain type='kvm'><name>%s</name><uuid>%s</uuid><metadata>%s</metadata><memory unit='MiB'>64</memory>"+
		"<os><type>hvm</type></os></domain>", name, uuid, metadata)
}

// foreignCase is a domain that stands in the way of a machine, and is not that machine.
type foreignCase struct {
	name string
	// domain gives the XML of the domain that is there already.
	domain func(*lab) string
	// create is the sentinel of Create. get is that of Get and Delete; nil where they do not meet the domain.
	create, get error
	// list says whether List fails: it must where the domain may be a machine of the scope.
	list bool
	why  string
}

func foreignCases() []foreignCase {
	another := kvm2.MachineUUID("else", "where")
	owner2 := kvm2.MachineUUID(labScope, "owner-2")
	return []foreignCase{
		{
			name:   "name taken, no metadata",
			domain: func(l *lab) string { return foreignXML(labDomain(l.spec), another, "") },
			create: kvm2.ErrForeignOwner, why: "somebody made it by hand",
		},
		{
			name: "name taken, another scope",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), another, labMetadata(1, "else", "where", "web-1"))
			},
			create: kvm2.ErrForeignOwner,
		},
		{
			name: "name taken, another owner of the scope",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), owner2, labMetadata(1, labScope, "owner-2", "web-1"))
			},
			create: kvm2.ErrForeignOwner,
		},
		{
			name: "name taken, our metadata and another UUID",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), another, labMetadata(1, labScope, "owner-1", "web-1"))
			},
			create: kvm2.ErrForeignOwner, list: true, why: "a clone: metadata were copied with it",
		},
		{
			name:   "UUID taken, no metadata",
			domain: func(l *lab) string { return foreignXML("by-hand", labUUID(l.spec), "") },
			create: kvm2.ErrForeignOwner, get: kvm2.ErrForeignOwner,
		},
		{
			name: "UUID taken, another scope",
			domain: func(l *lab) string {
				return foreignXML("else-1", labUUID(l.spec), labMetadata(1, "else", "where", "web-1"))
			},
			create: kvm2.ErrForeignOwner, get: kvm2.ErrForeignOwner,
		},
		{
			name: "UUID taken, another owner",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), labUUID(l.spec), labMetadata(1, labScope, "owner-2", "web-1"))
			},
			create: kvm2.ErrForeignOwner, get: kvm2.ErrForeignOwner, list: true, why: "metadata that do not belong to the UUID",
		},
		{
			name: "metadata of a newer version",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), labUUID(l.spec), labMetadata(2, labScope, "owner-1", "web-1"))
			},
			create: kvm2.ErrForeignOwner, get: kvm2.ErrForeignOwner, list: true, why: "guessing what they mean could destroy a machine",
		},
		{
			name: "metadata that cannot be read",
			domain: func(l *lab) string {
				return foreignXML(labDomain(l.spec), labUUID(l.spec), "<m:x xmlns:m='"+kvm2.MetadataNamespace+"' version='many'/>")
			},
			create: kvm2.ErrForeignOwner, get: kvm2.ErrForeignOwner, list: true,
		},
	}
}

func TestGuard_ForeignDomainIsRefusedAndUntouched(t *testing.T) {
	for _, tt := range foreignCases() {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.cached()
				xml := tt.domain(l)
				l.host.DefineBehind(xml)
				before := l.host.Dump()
				changed := l.changes(func() { l.wantRefused(tt) })
				domains := l.host.Domains()
				if len(changed) != 0 || l.host.Dump() != before || len(domains) != 1 || domains[0].XML != xml {
					l.Errorf("changed: %q; the host has %+v; %s", changed, domains, tt.why)
				}
			})
		})
	}
}

// wantRefused makes every call that could touch the domain of a case.
func (l *lab) wantRefused(tt foreignCase) {
	l.Helper()
	m, err := l.p.Create(l.Context(), l.spec)
	l.wantError("Create()", err, kvm2.ClassPermanent, tt.create)
	if m.ID != labID(l.spec) || m.CreatedAt != (time.Time{}) {
		l.Errorf("Create() = %+v, want the machine that does not exist, and nothing of the other", m)
	}
	_, getErr := l.p.Get(l.Context(), labID(l.spec))
	deleteErr := l.p.Delete(l.Context(), labID(l.spec))
	if tt.get != nil {
		l.wantError("Get()", getErr, kvm2.ClassPermanent, tt.get)
		l.wantError("Delete()", deleteErr, kvm2.ClassPermanent, tt.get)
	} else {
		l.wantError("Get()", getErr, kvm2.ClassNotFound, kvm2.ErrNotFound)
		l.wantError("Delete()", deleteErr, kvm2.ClassNone, nil)
	}
	machines, err := l.p.List(l.Context())
	if tt.list {
		l.wantError("List()", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
		return
	}
	l.wantError("List()", err, kvm2.ClassNone, nil)
	for _, m := range machines {
		if m.ID == labID(l.spec) {
			l.Errorf("List() shows a machine that is not ours: %+v", m)
		}
	}
}

func TestGuard_VolumesOfAForeignDomainStay(t *testing.T) {
	inLab(t, func(l *lab) {
		l.host.DefineBehind(foreignXML("by-hand", labUUID(l.spec), ""))
		l.host.AddVolume(labPool, labVolume(l.spec, "root"), []byte("somebody's disk"))
		l.wantError("Delete()", l.p.Delete(l.Context(), labID(l.spec)), kvm2.ClassPermanent, kvm2.ErrForeignOwner)
		l.wantVolumes(labVolume(l.spec, "root"))
	})
}

func TestGuard_DomainThatAppearsDuringCreateIsNotRedefined(t *testing.T) {
	inLab(t, func(l *lab) {
		l.cached()
		xml := foreignXML(labDomain(l.spec), kvm2.MachineUUID("else", "where"), "")
		l.before(kvm2.OpVolumeUpload, func() { l.host.DefineBehind(xml) }) // the seed's, which comes just before the domain
		_, err := l.create(l.p, l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
		domains := l.host.Domains()
		if len(domains) != 1 || domains[0].XML != xml {
			l.Errorf("the host has %+v, want the foreign domain as it was", domains)
		}
		l.deleted(labID(l.spec))
		l.wantVolumes()
	})
}

func TestGuard_AnotherNameForAMachineIsRefused(t *testing.T) {
	inLab(t, func(l *lab) {
		l.running(l.spec)
		before := l.host.Dump()
		renamed := l.spec
		renamed.Name = "web-2"
		_, err := l.p.Create(l.Context(), renamed)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
		if !strings.Contains(fmt.Sprint(err), `"web-1"`) {
			l.Errorf("%v does not tell what the machine is called", err)
		}
		if after := l.host.Dump(); after != before {
			l.Errorf("the host has changed:\n%s\nwas\n%s", after, before)
		}
	})
}

func TestGuard_AdministratorsEditOfTheMetadataLocksTheMachine(t *testing.T) {
	inLab(t, func(l *lab) {
		m := l.running(l.spec)
		l.host.SetMetadataBehind(labDomain(l.spec), "")
		before := l.host.Dump()
		_, err := l.p.Create(l.Context(), l.spec)
		l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrForeignOwner)
		l.wantError("Delete()", l.p.Delete(l.Context(), m.ID), kvm2.ClassPermanent, kvm2.ErrForeignOwner)
		if after := l.host.Dump(); after != before {
			l.Errorf("the host has changed:\n%s\nwas\n%s", after, before)
		}
	})
}

func TestGuard_ManyProcessesThatCreateOneMachineMakeOne(t *testing.T) {
	inLab(t, func(l *lab) {
		var wg sync.WaitGroup
		ids := make([]string, 8)
		for i := range ids {
			p := l.open(nil)
			wg.Go(func() {
				m, err := l.create(p, l.spec)
				if err != nil {
					l.Errorf("Create() = %v", err)
				}
				ids[i] = m.ID
			})
		}
		wg.Wait()
		for _, id := range ids {
			if id != labID(l.spec) {
				l.Errorf("IDs %q, want all %q", ids, labID(l.spec))
			}
		}
		if domains := l.host.Domains(); len(domains) != 1 || !domains[0].Running {
			l.Errorf("the host has %+v, want one running domain", domains)
		}
		l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))
		if got := l.imageVolumes(); len(got) != 2 {
			l.Errorf("image volumes: %q, want one pointer and one image", got)
		}
	}, fake.WithLatency(7*time.Millisecond))
}

// One process gives a machine up while another one makes it. Wherever the two meet, the machine is not left without its
// disks, and the next poll makes it whole.
func TestGuard_GivingUpAgainstMakingLosesNoDisk(t *testing.T) {
	for name, meet := range map[string]func(loser, winner *kvm2.Provider) (outer, inner *kvm2.Provider){
		"made while another gives it up":  func(loser, winner *kvm2.Provider) (outer, inner *kvm2.Provider) { return loser, winner },
		"given up while another makes it": func(loser, winner *kvm2.Provider) (outer, inner *kvm2.Provider) { return winner, loser },
	} {
		for k := 1; ; k++ {
			met := false
			t.Run(fmt.Sprintf("%s, at call %d", name, k), func(t *testing.T) {
				inLab(t, func(l *lab) {
					l.cached()
					loser := l.open(nil, kvm2.WithDomainMutator(func(d *libvirtxml.Domain) { d.OS.Type.Type = "nonsense" }))
					outer, inner := meet(loser, l.open(nil))
					met = l.meetAtCall(k, outer, inner)
					l.wantWholeOrMendable()
				})
			})
			if !met {
				if k < 10 {
					t.Errorf("%s: they met at %d calls only", name, k-1)
				}
				break
			}
		}
	}
}

// meetAtCall lets one process do a whole Create before the k-th call that another one's Create makes. It reports whether
// there was such a call.
func (l *lab) meetAtCall(k int, outer, inner *kvm2.Provider) (met bool) {
	l.Helper()
	create := func(p *kvm2.Provider) {
		_, err := p.Create(l.Context(), l.spec)
		if class := kvm2.ClassOf(err); class == kvm2.ClassNotFound || class == kvm2.ClassQuota {
			l.Errorf("Create() = %v (%v)", err, class)
		}
	}
	n := 0
	l.host.Intercept(func(fake.Call) error {
		if n++; n == k {
			met = true
			create(inner)
		}
		return nil
	})
	create(outer)
	l.host.Intercept(nil)
	return met
}

// wantWholeOrMendable checks that a machine which counts as started has all of its disks, and that polling on makes a
// whole machine, which can be deleted.
func (l *lab) wantWholeOrMendable() {
	l.Helper()
	for _, d := range l.host.Domains() {
		if strings.Contains(d.Metadata, `phase="started"`) && len(l.volumes()) != 3 {
			l.Errorf("the machine runs with %q", l.volumes())
		}
	}
	m := l.running(l.spec)
	l.wantVolumes(labVolume(l.spec, "root"), labVolume(l.spec, "disk-data"), labVolume(l.spec, "seed"))
	l.deleted(m.ID)
	l.wantNothingLeft()
}
