package kvm2

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/iso9660/isotest"
)

func mustSeed(t testing.TB, p plan) []byte {
	t.Helper()
	image, err := buildSeed(p)
	if err != nil {
		t.Fatalf("buildSeed: %v", err)
	}
	return image
}

// seedFiles reads a plan's seed as every kind of guest reads it, and returns its files.
func seedFiles(t testing.TB, p plan) map[string][]byte {
	t.Helper()
	v, err := isotest.Read(mustSeed(t, p))
	if err != nil {
		t.Fatal(err)
	}
	if v.Label != "cidata" || v.JolietLabel != "cidata" {
		t.Errorf("labels are %q and %q, want cidata", v.Label, v.JolietLabel)
	}
	if !maps.EqualFunc(v.RockRidge, v.Joliet, bytes.Equal) {
		t.Error("Linux and Windows see different files")
	}
	return v.RockRidge
}

func TestBuildSeed_MinimalSeedIsComplete(t *testing.T) {
	p := testPlan(t)
	want := map[string][]byte{
		"meta-data":      []byte(`{"instance-id":"` + p.uuid.String() + `","local-hostname":"web-1"}`),
		"user-data":      []byte("#cloud-config\n{}\n"),
		"network-config": []byte(`{"version":2,"ethernets":{"nic0":{"match":{"macaddress":"` + macAddress(p.uuid, 0) + `"},"dhcp4":true,"dhcp6":false,"dhcp-identifier":"mac"}}}`),
	}
	if diff := cmp.Diff(want, seedFiles(t, p)); diff != "" {
		t.Errorf("files differ (-want +got):\n%s", diff)
	}
}

func TestBuildSeed_GivenDataArriveUnchanged(t *testing.T) {
	user := []byte("#cloud-config\r\npassword: \x00\xff" + strings.Repeat("x", 5000))
	vendor, network := []byte("#!/bin/sh\necho vendor\n"), []byte("version: 1\nconfig: disabled\n")
	p := testPlan(t, func(_ *Config, s *Spec) { s.UserData, s.VendorData, s.NetworkConfig = user, vendor, network })
	got := seedFiles(t, p)
	delete(got, "meta-data")
	want := map[string][]byte{"user-data": user, "vendor-data": vendor, "network-config": network}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files differ (-want +got):\n%s", diff)
	}
}

func TestBuildSeed_LargestDataFit(t *testing.T) {
	most := bytes.Repeat([]byte("x"), MaxUserDataBytes)
	p := testPlan(t, func(_ *Config, s *Spec) { s.UserData, s.VendorData, s.NetworkConfig = most, most, most })
	if got := seedFiles(t, p); len(got["user-data"]) != MaxUserDataBytes || len(got["vendor-data"]) != MaxUserDataBytes {
		t.Error("the largest user-data and vendor-data did not arrive whole")
	}
}

func TestBuildSeed_InstanceIDIsTheUUID(t *testing.T) {
	p := testPlan(t)
	var meta map[string]string
	if err := json.Unmarshal(seedFiles(t, p)["meta-data"], &meta); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"instance-id": p.uuid.String(), "local-hostname": "web-1"}
	if diff := cmp.Diff(want, meta); diff != "" {
		t.Errorf("meta-data differ (-want +got):\n%s", diff)
	}
}

func TestBuildSeed_NetworkConfigMatchesTheDomainsMACs(t *testing.T) {
	edit := func(_ *Config, s *Spec) { s.NICs = []NIC{{}, {Network: "lan"}, {Network: "storage"}} }
	p := testPlan(t, edit)
	var c networkConfig
	if err := json.Unmarshal(seedFiles(t, p)["network-config"], &c); err != nil {
		t.Fatal(err)
	}
	if c.Version != 2 || len(c.Ethernets) != len(p.spec.NICs) {
		t.Errorf("network-config has version %d and %d interfaces", c.Version, len(c.Ethernets))
	}
	var macs []string
	for _, name := range []string{"nic0", "nic1", "nic2"} {
		e := c.Ethernets[name]
		macs = append(macs, e.Match.MACAddress)
		if !e.DHCP4 || e.DHCPIdentifier != "mac" {
			t.Errorf("%s is %+v, want DHCP identified by the MAC", name, e)
		}
	}
	domain := domainCase{edit: edit}.build(t)
	md, err := parseMetadata(embeddedMetadata(t, domain))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(md.macs(), macs); diff != "" {
		t.Errorf("MACs differ (-domain +seed):\n%s", diff)
	}
}

func TestBuildSeed_SamePlanSameBytes(t *testing.T) {
	edit := func(_ *Config, s *Spec) { s.NICs = make([]NIC, maxNICs) }
	first := mustSeed(t, testPlan(t, edit))
	for range 5 {
		if !bytes.Equal(first, mustSeed(t, testPlan(t, edit))) {
			t.Fatal("built again it differs")
		}
	}
	other := mustSeed(t, testPlan(t, edit, func(_ *Config, s *Spec) { s.OwnerUID = "owner-2" }))
	if bytes.Equal(first, other) {
		t.Error("two machines have one seed")
	}
}

// TestTools_ReadTheSeed lets tools of a Linux host read a seed: whichever of them are installed.
func TestTools_ReadTheSeed(t *testing.T) {
	p := testPlan(t, func(_ *Config, s *Spec) { s.VendorData = []byte("#cloud-config\n") })
	path := filepath.Join(t.TempDir(), "seed.iso")
	if err := os.WriteFile(path, mustSeed(t, p), 0o600); err != nil {
		t.Fatal(err)
	}
	names := []string{"meta-data", "network-config", "user-data", "vendor-data"}
	tests := []struct {
		tool string
		args []string
		want []string
	}{
		{"blkid", []string{"-p", "-o", "export", path}, []string{"LABEL=cidata\n", "TYPE=iso9660\n"}},
		{"isoinfo", []string{"-R", "-f", "-i", path}, names},
		{"isoinfo", []string{"-J", "-f", "-i", path}, names},
		{"isoinfo", []string{"-R", "-i", path, "-x", "/meta-data"}, []string{p.uuid.String()}},
		{"xorriso", []string{"-abort_on", "WARNING", "-return_with", "WARNING", "32", "-indev", "stdio:" + path, "-find", "/"}, names},
	}
	for _, tt := range tests {
		t.Run(tt.tool+" "+tt.args[0], func(t *testing.T) {
			tool := lookTool(t, tt.tool)
			out, err := exec.CommandContext(t.Context(), tool, tt.args...).Output()
			if err != nil {
				t.Fatalf("%s %q: %v", tool, tt.args, err)
			}
			for _, want := range tt.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("%s %q does not say %q:\n%s", tool, tt.args, want, out)
				}
			}
		})
	}
}

// lookTool returns the path of an installed tool, and skips where there is none.
func lookTool(t testing.TB, name string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	t.Skipf("%s is not installed", name)
	return ""
}
