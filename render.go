package kvm2

import (
	"fmt"
	"time"
)

// Rendering is what Create would send to the host for a Spec.
type Rendering struct {
	// ID is the machine's provider ID.
	ID string
	// Domain is the domain's XML, Volumes the XML of its disks' volumes, the root disk first.
	Domain  string
	Volumes []string
	// Seed is the cloud-init seed, an ISO 9660 image. It holds the user data, and with them what they hold of secrets.
	Seed []byte
}

// renderedPool stands for the pool, whose directory only the host knows: libvirt's usual one.
const renderedPool = "/var/lib/libvirt/images"

// Render shows what Create would send, without a host. What only the host knows is made up: the pool's directory is
// /var/lib/libvirt/images, the image's data volume ends in -ATTEMPT, with DIGEST before it when only the file of
// checksums would tell it, the image is qcow2, and the machine was created in the year 1. Errors: ErrInvalidSpec (Permanent).
func (p *Provider) Render(spec Spec) (Rendering, error) {
	r, err := p.render(spec)
	if err != nil {
		return Rendering{}, fmt.Errorf("render machine %q: %w", clip(spec.Name), err)
	}
	return r, nil
}

// renderedBase is the volume that the root disk stands on.
func (p plan) renderedBase() string {
	image := p.spec.Image
	if image.Volume != "" {
		return image.Volume
	}
	if image.Checksum == "" {
		image.Checksum = "sha256:DIGEST"
	}
	return newImageName(p.config.Scope, image.Checksum).pointer + "-ATTEMPT"
}

func (p *Provider) render(spec Spec) (Rendering, error) {
	plan, err := p.plan(spec)
	if err != nil {
		return Rendering{}, err
	}
	r := Rendering{ID: plan.id}
	if r.Seed, err = buildSeed(plan); err != nil {
		return Rendering{}, err
	}
	pool := Pool{Name: p.cfg.Pool, TargetPath: renderedPool}
	if r.Domain, err = domainXML(domainInput{plan: plan, pool: pool, created: time.Time{}, mutate: p.mutate}); err != nil {
		return Rendering{}, err
	}
	root, err := overlayXML(plan.volume(volumeRoot), plan.spec.RootDiskBytes, pool.volumePath(plan.renderedBase()), "qcow2")
	if err != nil {
		return Rendering{}, err
	}
	r.Volumes = []string{root}
	for _, d := range plan.spec.Disks {
		xml, err := emptyDiskXML(plan.dataVolume(d.Name), d.SizeBytes)
		if err != nil {
			return Rendering{}, err
		}
		r.Volumes = append(r.Volumes, xml)
	}
	return r, nil
}
