package kvm2

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	libvirt "github.com/digitalocean/go-libvirt"
)

// deletion is one Delete call at work.
type deletion struct {
	*Provider
	conn Conn
	uuid UUID
}

func (d *deletion) run(ctx context.Context) error {
	pools := []string{d.cfg.Pool}
	domain, err := d.conn.DomainByUUID(ctx, d.uuid)
	switch {
	case err == nil:
		md, err := guard(d.cfg.Scope, domain)
		if err != nil {
			return err
		}
		if md.Pool != "" && md.Pool != d.cfg.Pool {
			pools = append(pools, md.Pool) // the Config has changed since
		}
		if err := d.removeDomain(ctx, domain, md); err != nil {
			return err
		}
	case ClassOf(err) != ClassNotFound:
		return err
	}
	for _, pool := range pools {
		if err := d.removeVolumes(ctx, d.conn, d.uuid, pool); err != nil {
			return err
		}
	}
	// Somebody may have created the machine again meanwhile, or another process may be at it.
	if _, err := d.conn.DomainByUUID(ctx, d.uuid); ClassOf(err) != ClassNotFound {
		return errors.Join(err, transient(ErrConflict, "machine %q was created again while it was deleted", d.uuid))
	}
	return nil
}

// removeDomain writes down that the machine is being deleted, so that no Create revives it, and ends it.
func (d *deletion) removeDomain(ctx context.Context, domain Domain, md metadata) error {
	if md.Phase != phaseDeleting {
		md.Phase = phaseDeleting
		element, err := md.element()
		if err != nil {
			return fmt.Errorf("metadata: %w", err)
		}
		if err := gone(d.conn.SetDomainMetadata(ctx, d.uuid, element)); err != nil {
			return err
		}
	}
	return endDomain(ctx, d.conn, domain)
}

// endDomain ends a domain and removes its configuration. Destroy comes first: a running domain that is undefined
// goes on running.
func endDomain(ctx context.Context, conn Conn, d Domain) error {
	if d.State.isActive() {
		if err := destroyDomain(ctx, conn, d.UUID); err != nil {
			return err
		}
	}
	return gone(conn.UndefineDomain(ctx, d.UUID))
}

// destroyDomain asks a running domain to end, and kills it when that does not help.
func destroyDomain(ctx context.Context, conn Conn, uuid UUID) error {
	err := ended(conn.DestroyDomain(ctx, uuid, DestroyGraceful))
	if err == nil || !isLibvirtAnswer(err) {
		return err
	}
	return ended(conn.DestroyDomain(ctx, uuid, DestroyForced))
}

// ended takes it for success that a domain to be destroyed does not run any more.
func ended(err error) error {
	if e, ok := errors.AsType[*LibvirtError](err); ok && e.Code == int(libvirt.ErrOperationInvalid) {
		return nil
	}
	return gone(err)
}

// removeVolumes removes a machine's volumes from a pool, the root disk last: as long as it is there, the machine is
// seen.
func (p *Provider) removeVolumes(ctx context.Context, conn Conn, uuid UUID, pool string) error {
	names, err := conn.VolumeNames(ctx, pool)
	if err != nil {
		return err
	}
	prefix := volumePrefix(p.cfg.Scope, uuid)
	names = slices.DeleteFunc(names, func(n string) bool {
		if !strings.HasPrefix(n, prefix) {
			return true
		}
		of, ok := machineOfVolume(p.cfg.Scope, n)
		return !ok || of != uuid
	})
	slices.SortStableFunc(names, func(a, b string) int { return removalOrder(a[len(prefix):]) - removalOrder(b[len(prefix):]) })
	for _, name := range names {
		if err := gone(conn.DeleteVolume(ctx, pool, name)); err != nil {
			return err
		}
	}
	return nil
}

func removalOrder(part string) int {
	switch part {
	case volumeSeed:
		return 0
	case volumeRoot:
		return 2
	}
	return 1
}

// gone takes "it does not exist" for success.
func gone(err error) error {
	if ClassOf(err) == ClassNotFound {
		return nil
	}
	return err
}
