package kvm2test

import (
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvm2/kvm2"
)

// libvirt's numbers of states and their reasons (virDomainState and its reason enumerations).
var (
	shutOff          = kvm2.LibvirtState{State: 5, Reason: 0}
	shutOffDestroyed = kvm2.LibvirtState{State: 5, Reason: 2}
	shutOffFailed    = kvm2.LibvirtState{State: 5, Reason: 6}
	runningBooted    = kvm2.LibvirtState{State: 1, Reason: 1}
)

// domainSpec is a small domain.
type domainSpec struct {
	name     string
	uuid     string // none if empty
	kind     string // the domain type
	metadata string
	devices  string
	extra    string // more elements below <domain>
}

// spec is the domain with the given part of a name, and a UUID that follows from it.
func (s *seam) spec(part string) domainSpec {
	return domainSpec{name: s.name(part), uuid: s.uuid(part).String(), kind: s.caps.DomainType}
}

func (s *seam) uuid(part string) kvm2.UUID { return kvm2.MachineUUID("kvm2test", s.name(part)) }

func (d domainSpec) xml() string {
	uuid := ""
	if d.uuid != "" {
		uuid = "<uuid>" + d.uuid + "</uuid>"
	}
	return fmt.Sprintf("<domain type='%s'><name>%s</name>%s<metadata>%s</metadata><memory unit='MiB'>32</memory><vcpu>1</vcpu>"+
		"<os><type>hvm</type></os><devices>%s</devices>%s</domain>", d.kind, escaped(d.name), uuid, d.metadata, d.devices, d.extra)
}

func escaped(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder does not fail
	return b.String()
}

// mark is an element of kvm2's namespace with a value to tell it by.
func mark(value string) string {
	return fmt.Sprintf(`<k:machine xmlns:k="%s" value="%s"><k:text>%s</k:text></k:machine>`, kvm2.MetadataNamespace, escaped(value), escaped(value))
}

// bareMark is the same element as SetDomainMetadata takes it, without a namespace.
func bareMark(value string) string {
	return fmt.Sprintf(`<machine value="%s"><text>%s</text></machine>`, escaped(value), escaped(value))
}

// wantMark fails the case unless the domain's metadata are the element with the value; the empty value means none.
func (s *seam) wantMark(d kvm2.Domain, value string) {
	s.Helper()
	if value == "" {
		if d.Metadata != "" {
			s.Errorf("got metadata %q, want none", d.Metadata)
		}
		return
	}
	var got struct {
		XMLName xml.Name
		Value   string `xml:"value,attr"`
		Text    string `xml:"text"`
	}
	if err := xml.Unmarshal([]byte(d.Metadata), &got); err != nil {
		s.Fatalf("metadata %q: %v", d.Metadata, err)
	}
	if got.XMLName.Local != "machine" || got.Value != value || got.Text != value {
		s.Errorf("got metadata %q, want element machine with value and text %q", d.Metadata, value)
	}
}

// define defines a domain and returns it as the host sees it.
func (s *seam) define(d domainSpec) kvm2.Domain {
	s.Helper()
	s.must(s.conn.DefineDomain(s.ctx, d.xml()))
	return s.domainNamed(d.name)
}

func (s *seam) domainNamed(name string) kvm2.Domain {
	s.Helper()
	return get[kvm2.Domain](s, "DomainByName")(s.conn.DomainByName(s.ctx, name))
}

func (s *seam) domain(part string) kvm2.Domain {
	s.Helper()
	return get[kvm2.Domain](s, "DomainByUUID")(s.conn.DomainByUUID(s.ctx, s.uuid(part)))
}

// own picks the domains of this case out of a list.
func (s *seam) own(domains []kvm2.Domain) []kvm2.Domain {
	return slices.DeleteFunc(slices.Clone(domains), func(d kvm2.Domain) bool { return !strings.HasPrefix(d.Name, s.base+"-") })
}

func domainCases() []seamCase {
	return []seamCase{
		{"Domain/FoundByNameAndUUID", "A defined domain is found by name and by UUID, shut off for no reason, with its metadata.", "", func(s *seam) {
			d := s.spec("d")
			d.metadata = mark("a")
			for _, got := range []kvm2.Domain{s.define(d), s.domain("d")} {
				if got.Name != d.name || got.UUID != s.uuid("d") || got.State != shutOff {
					s.Errorf("got %+v, want name %q, UUID %v, state %+v", got, d.name, s.uuid("d"), shutOff)
				}
				s.wantMark(got, "a")
			}
		}},
		{"DomainByName/Missing", "A name that no domain has is code 42.", "", func(s *seam) {
			_, err := s.conn.DomainByName(s.ctx, s.name("none"))
			s.wantCode(err, 42)
		}},
		{"DomainByUUID/Missing", "A UUID that no domain has is code 42.", "", func(s *seam) {
			_, err := s.conn.DomainByUUID(s.ctx, s.uuid("none"))
			s.wantCode(err, 42)
		}},
		{"Domains/SortedAndComplete", "Domains lists all domains sorted by name, each as a look-up shows it.", "", func(s *seam) {
			for _, part := range []string{"b", "c", "a"} {
				d := s.spec(part)
				d.metadata = mark(part)
				s.define(d)
			}
			all := get[[]kvm2.Domain](s, "Domains")(s.conn.Domains(s.ctx))
			if !slices.IsSortedFunc(all, func(a, b kvm2.Domain) int { return strings.Compare(a.Name, b.Name) }) {
				s.Errorf("got %+v, want them sorted by name", all)
			}
			own := s.own(all)
			if len(own) != 3 {
				s.Fatalf("got %+v, want three", own)
			}
			for i, part := range []string{"a", "b", "c"} {
				if want := s.domain(part); own[i] != want {
					s.Errorf("got %+v in the list and %+v by UUID, want the same", own[i], want)
				}
			}
		}},
		{"Metadata/None", "A domain without kvm2 metadata is reported with none, and is not an error.", "", func(s *seam) {
			s.wantMark(s.define(s.spec("d")), "")
			own := s.own(get[[]kvm2.Domain](s, "Domains")(s.conn.Domains(s.ctx)))
			if len(own) != 1 {
				s.Fatalf("got %+v, want one", own)
			}
			s.wantMark(own[0], "")
		}},
		{"Metadata/OnlyOwn", "Elements of other namespaces are not reported.", "", func(s *seam) {
			d := s.spec("d")
			d.metadata = `<o:other xmlns:o="https://example.org/other"/>`
			s.wantMark(s.define(d), "")
			d.metadata += mark("a")
			s.wantMark(s.define(d), "a")
		}},
		{"Metadata/AnyText", "Metadata come back with every character that they had.", "", func(s *seam) {
			d := s.spec("d")
			text := `<&>"' ü 猫 a  b`
			d.metadata = mark(text)
			s.wantMark(s.define(d), text)
		}},
		{"SetDomainMetadata/Replaces", "SetDomainMetadata replaces the element of a stopped domain, or gives it one.", "", func(s *seam) {
			s.define(s.spec("d"))
			for _, value := range []string{"a", `b <&>"' ü`} {
				s.must(s.conn.SetDomainMetadata(s.ctx, s.uuid("d"), bareMark(value)))
				s.wantMark(s.domain("d"), value)
			}
		}},
		{"SetDomainMetadata/Missing", "Metadata for a domain that does not exist is code 42.", "", func(s *seam) {
			s.wantCode(s.conn.SetDomainMetadata(s.ctx, s.uuid("none"), bareMark("a")), 42)
		}},
		{"SetDomainMetadata/Malformed", "Metadata that are not XML are code 35, and what was there stays.", "", func(s *seam) {
			d := s.spec("d")
			d.metadata = mark("a")
			s.define(d)
			s.wantCode(s.conn.SetDomainMetadata(s.ctx, s.uuid("d"), "<machine"), 35)
			s.wantMark(s.domain("d"), "a")
		}},
		{"SetDomainMetadata/TooLarge", "Metadata beyond what a message holds are an error that leaves the session usable.", "", func(s *seam) {
			s.define(s.spec("d"))
			s.wantCode(s.conn.SetDomainMetadata(s.ctx, s.uuid("d"), bareMark(strings.Repeat("x", 5<<20))), 39)
			s.wantUsable(s.conn)
		}},
		{"DestroyDomain/NotRunning", "Destroying a domain that does not run is code 55, either way.", "", func(s *seam) {
			s.define(s.spec("d"))
			s.wantCode(s.conn.DestroyDomain(s.ctx, s.uuid("d"), kvm2.DestroyGraceful), 55)
			s.wantCode(s.conn.DestroyDomain(s.ctx, s.uuid("d"), kvm2.DestroyForced), 55)
		}},
		{"DestroyDomain/Missing", "Destroying a domain that does not exist is code 42.", "", func(s *seam) {
			s.wantCode(s.conn.DestroyDomain(s.ctx, s.uuid("none"), kvm2.DestroyForced), 42)
		}},
		{"StartDomain/Missing", "Starting a domain that does not exist is code 42.", "", func(s *seam) {
			s.wantCode(s.conn.StartDomain(s.ctx, s.uuid("none")), 42)
		}},
		{"UndefineDomain/Gone", "An undefined domain is gone, and undefining it again is code 42.", "", func(s *seam) {
			s.define(s.spec("d"))
			s.must(s.conn.UndefineDomain(s.ctx, s.uuid("d")))
			_, err := s.conn.DomainByUUID(s.ctx, s.uuid("d"))
			s.wantCode(err, 42)
			s.wantCode(s.conn.UndefineDomain(s.ctx, s.uuid("d")), 42)
		}},
		{"UndefineDomain/KeepsVolumes", "Undefining a domain leaves its volumes.", "", func(s *seam) {
			s.qcow2Volume("kept", 1<<20)
			d := s.spec("d")
			d.devices = s.disk("kept")
			s.define(d)
			s.must(s.conn.UndefineDomain(s.ctx, s.uuid("d")))
			s.volume("kept")
		}},
	}
}

func defineCases() []seamCase {
	cases := []seamCase{
		{"DefineDomain/RedefinesSilently", "Defining a domain of the same name and UUID again succeeds and drops its metadata.", "", func(s *seam) {
			d := s.spec("d")
			d.metadata = mark("a")
			s.define(d)
			d.metadata = ""
			s.wantMark(s.define(d), "")
		}},
		{"DefineDomain/NameTaken", "Another domain's name is code 9, with another UUID and without one, and that domain stays as it is.", "", func(s *seam) {
			d := s.spec("d")
			d.metadata = mark("a")
			s.define(d)
			for _, uuid := range []string{s.uuid("other").String(), ""} {
				other := domainSpec{name: d.name, uuid: uuid, kind: d.kind}
				s.wantCode(s.conn.DefineDomain(s.ctx, other.xml()), 9)
			}
			s.wantMark(s.domain("d"), "a")
		}},
		{"DefineDomain/UUIDTaken", "Another domain's UUID is code 9, and that domain keeps its name.", "", func(s *seam) {
			d := s.spec("d")
			s.define(d)
			d.name = s.name("other")
			s.wantCode(s.conn.DefineDomain(s.ctx, d.xml()), 9)
			if got := s.domain("d").Name; got != s.name("d") {
				s.Errorf("got name %q, want %q", got, s.name("d"))
			}
		}},
		{"DefineDomain/Race", "Of many that define one name with UUIDs of their own, one wins and the others get code 9.", "", func(s *seam) {
			errs := s.race(6, func(i int, conn kvm2.Conn) error {
				d := domainSpec{name: s.name("d"), uuid: s.uuid(fmt.Sprint(i)).String(), kind: s.caps.DomainType}
				return conn.DefineDomain(s.ctx, d.xml())
			})
			s.wantOneWinner(errs, 9)
		}},
	}
	for _, r := range []struct {
		name, rule string
		code       int
		xml        func(*seam) string
	}{
		{"Malformed", "XML that is not well-formed is code 35.", 35, func(s *seam) string { return "<domain><name>" + s.name("d") }},
		{"Empty", "No XML at all is code 35.", 35, func(*seam) string { return "" }},
		{"WrongRoot", "XML of something else is code 27.", 27, func(*seam) string { return "<network><name>x</name></network>" }},
		{"UnknownElement", "An element that libvirt's schema does not know is code 92.", 92, func(s *seam) string {
			d := s.spec("d")
			d.extra = "<nonsense/>"
			return d.xml()
		}},
		{"UnknownDevice", "A device that libvirt's schema does not know is code 92.", 92, func(s *seam) string {
			d := s.spec("d")
			d.devices = "<nonsense/>"
			return d.xml()
		}},
		{"NoName", "A domain without a name does not fit the schema: code 92.", 92, func(s *seam) string {
			d := s.spec("d")
			d.name = ""
			return d.xml()
		}},
		{"UnknownType", "A domain type that libvirt does not know is code 92.", 92, func(s *seam) string {
			d := s.spec("d")
			d.kind = "nonsense"
			return d.xml()
		}},
		{"UnsupportedType", "A domain type that the host cannot run is code 67.", 67, func(s *seam) string {
			d := s.spec("d")
			d.kind = "xen"
			return d.xml()
		}},
		{"SlashInName", "A name with a slash is code 27.", 27, func(s *seam) string {
			d := s.spec("d")
			d.name = s.name("a/b")
			return d.xml()
		}},
		{"NoMemory", "A domain without memory is code 27.", 27, func(s *seam) string {
			return strings.Replace(s.spec("d").xml(), "<memory unit='MiB'>32</memory>", "", 1)
		}},
		{"MulticastMAC", "A multicast MAC does not fit the schema: code 92.", 92, func(s *seam) string {
			d := s.spec("d")
			d.devices = fmt.Sprintf("<interface type='network'><mac address='01:00:5e:00:00:01'/><source network='%s'/></interface>", s.caps.Network)
			return d.xml()
		}},
		{"DuplicateTarget", "Two disks of one target name are code 27.", 27, func(s *seam) string {
			d := s.spec("d")
			disk := "<disk type='file' device='disk'><source file='/%s'/><target dev='vda' bus='virtio'/></disk>"
			d.devices = fmt.Sprintf(disk, "x") + fmt.Sprintf(disk, "y")
			return d.xml()
		}},
	} {
		cases = append(cases, seamCase{"DefineDomain/" + r.name, r.rule, "", func(s *seam) {
			s.wantCode(s.conn.DefineDomain(s.ctx, r.xml(s)), r.code)
			s.wantUsable(s.conn)
			_, err := s.conn.DomainByName(s.ctx, s.name("d"))
			s.wantCode(err, 42)
		}})
	}
	return cases
}

// race runs fn so many times at once, each on a session of its own, and returns the errors.
func (s *seam) race(n int, fn func(int, kvm2.Conn) error) []error {
	s.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		conn := s.dial()
		wg.Go(func() { errs[i] = fn(i, conn) })
	}
	wg.Wait()
	return errs
}

// wantOneWinner fails the case unless one error is nil and all others are libvirt's with the code.
func (s *seam) wantOneWinner(errs []error, code int) {
	s.Helper()
	winners := 0
	for _, err := range errs {
		if err == nil {
			winners++
			continue
		}
		s.wantCode(err, code)
	}
	if winners != 1 {
		s.Errorf("got %d winners, want one", winners)
	}
}
