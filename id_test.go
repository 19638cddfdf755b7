package kvm2_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvm2/kvm2"
)

const machineUUID = "ee52c16b-1b1f-5171-b0b0-cd8749c19b85"

func TestMachineUUID_IsStable(t *testing.T) {
	// Machines are found by it: if this value changes, every machine that exists is lost.
	if got := kvm2.MachineUUID("prod", "owner-1").String(); got != machineUUID {
		t.Errorf("MachineUUID(prod, owner-1) = %s, want %s", got, machineUUID)
	}
}

func TestMachineUUID_IsVersion5(t *testing.T) {
	for _, owner := range []string{"", "owner-1", strings.Repeat("x", 128)} {
		u := kvm2.MachineUUID("prod", owner)
		if u[6]>>4 != 5 || u[8]>>6 != 0b10 || u.IsZero() {
			t.Errorf("MachineUUID(prod, %q) = %s, which is not version 5 of RFC 9562", owner, u)
		}
	}
}

func TestMachineUUID_ScopeAndOwnerAreKeptApart(t *testing.T) {
	pairs := [][2]string{{"a", "b/c"}, {"a", "bc"}, {"ab", "c"}, {"b", "a"}, {"a", "b"}, {"a-b", "c"}, {"a", "b-c"}}
	seen := map[kvm2.UUID][2]string{}
	for _, p := range pairs {
		u := kvm2.MachineUUID(p[0], p[1])
		if other, ok := seen[u]; ok {
			t.Errorf("%q and %q have one UUID", other, p)
		}
		seen[u] = p
	}
}

func TestParseUUID(t *testing.T) {
	u, err := kvm2.ParseUUID(machineUUID)
	if err != nil || u.String() != machineUUID {
		t.Errorf("ParseUUID(%q) = %s, %v", machineUUID, u, err)
	}
	if zero, err := kvm2.ParseUUID("00000000-0000-0000-0000-000000000000"); err != nil || !zero.IsZero() {
		t.Errorf("ParseUUID of zero = %s, %v", zero, err)
	}
	for _, s := range []string{
		"", strings.ToUpper(machineUUID), strings.ReplaceAll(machineUUID, "-", ""), "{" + machineUUID + "}", "urn:uuid:" + machineUUID,
		machineUUID + "\n", " " + machineUUID, machineUUID[1:], machineUUID + "0", "g" + machineUUID[1:], strings.Repeat("é", 100_000),
	} {
		u, err := kvm2.ParseUUID(s)
		wantBadID(t, err)
		if !u.IsZero() {
			t.Errorf("ParseUUID(%.60q) = %s with an error", s, u)
		}
	}
}

func wantBadID(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, kvm2.ErrInvalidSpec) || errors.Is(err, kvm2.ErrNotFound) || kvm2.ClassOf(err) != kvm2.ClassPermanent {
		t.Errorf("error is %v, want a Permanent ErrInvalidSpec: it says nothing about whether a machine exists", err)
		return
	}
	wantCleanText(t, err)
}

func TestParseID_RoundTrip(t *testing.T) {
	for _, host := range []string{"localhost", "kvm-1.example.com", "192.0.2.7", "2001:db8::1", "a", "Host_1", strings.Repeat("h", 253)} {
		text := "kvm2://" + host + "/" + machineUUID
		id, err := kvm2.ParseID(text)
		if err != nil {
			t.Errorf("ParseID(%.80q): %v", text, err)
			continue
		}
		if id.Host != host || id.UUID.String() != machineUUID || id.String() != text {
			t.Errorf("ParseID(%.80q) = %+v, written again %.80q", text, id, id)
		}
	}
}

func TestParseID_RefusesWhatIsNotOurs(t *testing.T) {
	tests := []struct{ id, why string }{
		{id: ""},
		{id: "aws:///eu-central-1a/i-0123456789abcdef0", why: "another provider's"},
		{id: "KVM2://host/" + machineUUID, why: "one machine has one ID: no second spelling"},
		{id: "kvm2:/host/" + machineUUID},
		{id: "kvm2:///" + machineUUID, why: "no host"},
		{id: "kvm2://host"},
		{id: "kvm2://host/"},
		{id: "kvm2://host/" + strings.ToUpper(machineUUID)},
		{id: "kvm2://host/" + machineUUID + "/"},
		{id: "kvm2://host//" + machineUUID},
		{id: "kvm2://host/" + machineUUID + "?x"},
		{id: " kvm2://host/" + machineUUID},
		{id: "kvm2://ho%73t/" + machineUUID, why: "a second spelling of host"},
		{id: "kvm2://%zz/" + machineUUID},
		{id: "kvm2://user@host/" + machineUUID},
		{id: "kvm2://-host/" + machineUUID},
		{id: "kvm2://ho st/" + machineUUID},
		{id: "kvm2://ho\x00st/" + machineUUID},
		{id: "kvm2://größe/" + machineUUID},
		{id: "kvm2://" + strings.Repeat("h", 254) + "/" + machineUUID},
		{id: "kvm2://host/" + strings.Repeat("é", 100_000)},
		{id: strings.Repeat("é", 100_000)},
	}
	for _, tt := range tests {
		id, err := kvm2.ParseID(tt.id)
		wantBadID(t, err)
		if id != (kvm2.ID{}) {
			t.Errorf("ParseID(%.80q) = %+v with an error; %s", tt.id, id, tt.why)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("kvm2://host/" + machineUUID)
	f.Add("kvm2://2001:db8::1/" + machineUUID)
	f.Add("kvm2://ho%73t/" + machineUUID)
	f.Add("kvm2:///")
	f.Fuzz(func(t *testing.T, text string) {
		id, err := kvm2.ParseID(text)
		if err != nil {
			wantBadID(t, err)
			return
		}
		if id.String() != text {
			t.Errorf("ParseID(%q) is written as %q: one machine would have two IDs", text, id)
		}
		if again, err := kvm2.ParseID(id.String()); err != nil || again != id {
			t.Errorf("ParseID(%q) = %+v, %v; want %+v", id, again, err, id)
		}
	})
}
