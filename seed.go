package kvm2

import (
	"encoding/json"
	"fmt"

	"github.com/kvm2/kvm2/internal/iso9660"
)

// seedLabel is the volume label by which cloud-init finds a NoCloud seed
// (https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html).
const seedLabel = "cidata"

// buildSeed makes the NoCloud seed of a machine: an ISO 9660 image, the same bytes for the same plan.
func buildSeed(p plan) ([]byte, error) {
	meta, err := json.Marshal(seedMetaData{InstanceID: p.uuid.String(), LocalHostname: p.spec.Name})
	if err != nil {
		return nil, fmt.Errorf("seed: meta-data: %w", err)
	}
	network := p.spec.NetworkConfig
	if len(network) == 0 {
		if network, err = defaultNetworkConfig(p); err != nil {
			return nil, fmt.Errorf("seed: network-config: %w", err)
		}
	}
	user := p.spec.UserData
	if len(user) == 0 {
		user = []byte("#cloud-config\n{}\n") // a seed without user-data is refused
	}
	files := []iso9660.File{
		{Name: "meta-data", Data: meta},
		{Name: "network-config", Data: network},
		{Name: "user-data", Data: user},
	}
	if len(p.spec.VendorData) > 0 {
		files = append(files, iso9660.File{Name: "vendor-data", Data: p.spec.VendorData})
	}
	image, err := iso9660.Build(seedLabel, files)
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	return image, nil
}

// seedMetaData is cloud-init's meta-data. JSON is valid YAML, which is what cloud-init reads.
type seedMetaData struct {
	// InstanceID tells cloud-init whether this is a machine's first boot: constant for the machine's life.
	InstanceID    string `json:"instance-id"`
	LocalHostname string `json:"local-hostname"`
}

// networkConfig is cloud-init's network-config, version 2.
type networkConfig struct {
	Version   int                       `json:"version"`
	Ethernets map[string]ethernetConfig `json:"ethernets"`
}

type ethernetConfig struct {
	Match struct {
		MACAddress string `json:"macaddress"`
	} `json:"match"`
	DHCP4          bool   `json:"dhcp4"`
	DHCP6          bool   `json:"dhcp6"`
	DHCPIdentifier string `json:"dhcp-identifier"`
}

// defaultNetworkConfig asks for DHCP on every interface, matched by MAC: names differ from one guest to the next.
func defaultNetworkConfig(p plan) ([]byte, error) {
	c := networkConfig{Version: 2, Ethernets: map[string]ethernetConfig{}}
	for i := range p.spec.NICs {
		// The MAC as client identifier, since clones of an image may share the machine-id that systemd-networkd
		// would derive it from, and would then be given one address.
		e := ethernetConfig{DHCP4: true, DHCPIdentifier: "mac"}
		e.Match.MACAddress = macAddress(p.uuid, i)
		c.Ethernets[fmt.Sprintf("nic%d", i)] = e
	}
	return json.Marshal(c)
}
