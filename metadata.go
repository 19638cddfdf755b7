package kvm2

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
	"time"
)

// MetadataNamespace is the XML namespace of the element by which kvm2 recognises its domains. Each domain has at
// most one such element (https://libvirt.org/formatdomain.html#general-metadata).
const MetadataNamespace = "https://github.com/kvm2/kvm2/machine"

// metadataVersion is the version of the element's form. A domain with a higher one is left alone.
const metadataVersion = 1

// A phase is how far a machine's life has come, as the metadata keep it.
type phase string

const (
	phaseDefined  phase = "defined"  // never known to have been started
	phaseStarted  phase = "started"  // started at least once
	phaseDeleting phase = "deleting" // Delete has begun
)

// metadata is what kvm2 writes down about a machine, in its domain.
type metadata struct {
	XMLName    xml.Name            `xml:"machine"`
	Version    int                 `xml:"version,attr"`
	Scope      string              `xml:"scope,attr"`
	OwnerUID   string              `xml:"owner,attr"`
	Name       string              `xml:"name,attr"`
	Phase      phase               `xml:"phase,attr"`
	Created    string              `xml:"created,attr"`
	SpecHash   string              `xml:"spec,attr"`
	Pool       string              `xml:"pool,attr"`
	Labels     []metadataLabel     `xml:"label"`
	Interfaces []metadataInterface `xml:"interface"`
}

type metadataLabel struct {
	Key   string `xml:"key,attr"`
	Value string `xml:"value,attr"`
}

// metadataInterface is kept so that addresses can be matched without asking for the domain's XML.
type metadataInterface struct {
	MAC     string `xml:"mac,attr"`
	Network string `xml:"network,attr,omitempty"`
}

// element renders the metadata as virDomainSetMetadata takes them: libvirt adds the namespace itself.
func (m metadata) element() (string, error) {
	out, err := xml.Marshal(m)
	return string(out), err
}

// namespaced renders the metadata as they stand in a domain's XML.
func (m metadata) namespaced() (string, error) {
	out, err := xml.MarshalIndent(struct {
		Namespace string `xml:"xmlns,attr"`
		metadata
	}{MetadataNamespace, m}, "    ", "  ")
	return strings.TrimSpace(string(out)), err
}

// parseMetadata reads what libvirt returned. It refuses what a newer kvm2 wrote: guessing could destroy a machine.
func parseMetadata(s string) (metadata, error) {
	var m metadata
	if err := xml.Unmarshal([]byte(s), &m); err != nil {
		return metadata{}, permanent(ErrForeignOwner, "kvm2 metadata that cannot be read: %w", err)
	}
	if m.Version != metadataVersion {
		return metadata{}, permanent(ErrForeignOwner, "kvm2 metadata of version %d, this kvm2 knows version %d", m.Version, metadataVersion)
	}
	return m, nil
}

func (m metadata) labels() map[string]string {
	if len(m.Labels) == 0 {
		return nil
	}
	labels := make(map[string]string, len(m.Labels))
	for _, l := range m.Labels {
		labels[l.Key] = l.Value
	}
	return labels
}

func (m metadata) networks() []string {
	var names []string
	for _, i := range m.Interfaces {
		if i.Network != "" {
			names = append(names, i.Network)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (m metadata) created() time.Time {
	t, err := time.Parse(time.RFC3339, m.Created)
	if err != nil {
		return time.Time{} // somebody edited it; the machine is no worse for it
	}
	return t
}

func sortedLabels(labels map[string]string) []metadataLabel {
	var out []metadataLabel
	for k, v := range labels {
		out = append(out, metadataLabel{k, v})
	}
	slices.SortFunc(out, func(a, b metadataLabel) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// specHash is a digest of the hardware that a Spec (with its defaults filled in) asks for. User data are no part of
// it: bootstrap tokens rotate.
func specHash(s Spec) (string, error) {
	s.Name, s.OwnerUID, s.Labels = "", "", nil
	s.UserData, s.VendorData, s.NetworkConfig = nil, nil, nil
	s.Image = s.Image.identity()
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("spec hash: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}
