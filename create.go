package kvm2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// creation is one Create call at work. Every step looks first and then acts, so that each call goes on from wherever
// an earlier one ended.
type creation struct {
	*Provider
	conn Conn
	plan plan

	image imageName // that the root disk is to stand on; empty for a volume in place
}

func (c *creation) run(ctx context.Context) (Machine, error) {
	d, md, err := c.find(ctx)
	if ClassOf(err) == ClassNotFound {
		return c.begin(ctx)
	}
	if err != nil {
		return c.plan.unborn(), err
	}
	return c.finish(ctx, d, md)
}

// find looks the machine's domain up and makes sure that it is ours. The error is of class NotFound when neither
// its UUID nor its name is taken.
func (c *creation) find(ctx context.Context) (Domain, metadata, error) {
	d, err := c.conn.DomainByUUID(ctx, c.plan.uuid)
	if ClassOf(err) == ClassNotFound {
		d, err = c.conn.DomainByName(ctx, c.plan.domain)
	}
	if err != nil {
		return Domain{}, metadata{}, err
	}
	md, err := c.plan.adopt(d)
	return d, md, err
}

// begin makes what is missing up to the domain, and starts it.
func (c *creation) begin(ctx context.Context) (Machine, error) {
	progress, err := c.build(ctx)
	if err != nil {
		return c.plan.unborn(), c.abandon(ctx, err)
	}
	if progress != nil {
		m := c.plan.unborn()
		m.Image = progress
		return m, nil
	}
	d, md, err := c.find(ctx)
	if err != nil {
		return c.plan.unborn(), lookAgain(err, "domain %q", c.plan.domain)
	}
	return c.finish(ctx, d, md)
}

// build makes the volumes and the domain. As long as the image is not there it returns the transfer's progress.
func (c *creation) build(ctx context.Context) (*ImageProgress, error) {
	seed, err := buildSeed(c.plan)
	if err != nil {
		return nil, err
	}
	pool, err := c.prerequisites(ctx)
	if err != nil {
		return nil, err
	}
	if progress, err := c.identify(ctx); err != nil || progress != nil {
		return progress, err
	}
	need := machineNeed(c.plan.spec, len(seed))
	if err := c.space.reserve(c.plan.id, pool, claim{bytes: need, image: c.image.pointer}, c.cfg.OvercommitPercent); err != nil {
		return nil, err
	}
	base, progress, err := c.base(ctx)
	if err != nil || progress != nil {
		return progress, err
	}
	if base.virtualSize > c.plan.spec.RootDiskBytes {
		return nil, invalidf("rootDiskBytes: %d: the image is %d bytes large and would be cut off", c.plan.spec.RootDiskBytes, base.virtualSize)
	}
	if err := c.makeVolumes(ctx, base, seed); err != nil {
		return nil, err
	}
	return nil, c.define(ctx, pool)
}

// prerequisites makes sure that the pool and the networks can be used, before anything is written.
func (c *creation) prerequisites(ctx context.Context) (Pool, error) {
	pool, err := activePool(ctx, c.conn, c.cfg.Pool)
	if err != nil {
		return Pool{}, err
	}
	var checked []string
	for _, n := range c.plan.spec.NICs {
		if slices.Contains(checked, n.Network) {
			continue
		}
		checked = append(checked, n.Network)
		if _, err := activeNetwork(ctx, c.conn, n.Network); err != nil {
			return Pool{}, err
		}
	}
	return pool, nil
}

// activePool looks a pool up that something else needs: when it is missing, that is Permanent and not NotFound.
func activePool(ctx context.Context, conn Conn, name string) (Pool, error) {
	pool, err := conn.Pool(ctx, name)
	if ClassOf(err) == ClassNotFound {
		return Pool{}, permanent(nil, "storage pool %q does not exist on the host", name)
	}
	if err != nil {
		return Pool{}, err
	}
	if !pool.Active {
		return Pool{}, permanent(nil, "storage pool %q is not active: start it", name)
	}
	return pool, nil
}

// activeNetwork does the same for a network.
func activeNetwork(ctx context.Context, conn Conn, name string) (Network, error) {
	network, err := conn.Network(ctx, name)
	if ClassOf(err) == ClassNotFound {
		return Network{}, permanent(nil, "network %q does not exist on the host", name)
	}
	if err != nil {
		return Network{}, err
	}
	if !network.Active {
		return Network{}, permanent(nil, "network %q is not active: start it", name)
	}
	return network, nil
}

func (c *creation) makeVolumes(ctx context.Context, base baseImage, seed []byte) error {
	if err := c.makeRoot(ctx, base); err != nil {
		return err
	}
	for _, d := range c.plan.spec.Disks {
		name := c.plan.dataVolume(d.Name)
		xml, err := emptyDiskXML(name, d.SizeBytes)
		if err != nil {
			return err
		}
		if err := c.makeDisk(ctx, name, xml, Volume{CapacityBytes: d.SizeBytes}); err != nil {
			return err
		}
	}
	return c.makeSeed(ctx, seed)
}

// makeDisk makes a volume, or finds that an earlier call made it as it is wanted.
func (c *creation) makeDisk(ctx context.Context, name, xml string, want Volume) error {
	err := c.createVolume(ctx, name, xml)
	if !errors.Is(err, ErrConflict) {
		return err
	}
	v, err := c.conn.Volume(ctx, c.cfg.Pool, name)
	if err != nil {
		return lookAgain(err, "volume %q", name)
	}
	if v.CapacityBytes == want.CapacityBytes && v.BackingPath == want.BackingPath {
		return nil
	}
	if v.unfinished() {
		return transient(ErrConflict, "volume %q is just being made by another process", name)
	}
	if v.CapacityBytes == want.CapacityBytes && c.image.isAttempt(v.backingName()) {
		return transient(ErrConflict, "volume %q: %w", name, errBaseGone)
	}
	return invalidf("volume %q was begun with another size or image: it is removed, create the machine anew", name)
}

// createVolume makes a volume. A file that the pool has not noticed is looked for once: whoever made it, under this
// machine's name, is found then.
func (c *creation) createVolume(ctx context.Context, name, xml string) error {
	err := c.conn.CreateVolume(ctx, c.cfg.Pool, xml)
	if !errors.Is(err, ErrConflict) {
		return err
	}
	if _, lookErr := c.conn.Volume(ctx, c.cfg.Pool, name); ClassOf(lookErr) == ClassNotFound {
		if refreshErr := c.conn.RefreshPool(ctx, c.cfg.Pool); refreshErr != nil {
			return refreshErr
		}
	}
	return err
}

// makeSeed writes the seed anew whatever is there: an upload that broke off leaves no sign, and bootstrap tokens
// rotate.
func (c *creation) makeSeed(ctx context.Context, seed []byte) error {
	name := c.plan.volume(volumeSeed)
	if err := c.makeSeedFile(ctx, name, len(seed)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.cfg.CallTimeout))
	defer cancel()
	if err := c.conn.UploadVolume(ctx, c.cfg.Pool, name, 0, bytes.NewReader(seed)); err != nil {
		return lookAgain(err, "volume %q", name)
	}
	v, err := c.conn.Volume(ctx, c.cfg.Pool, name)
	if err != nil {
		return lookAgain(err, "volume %q", name)
	}
	if v.PhysicalBytes != int64(len(seed)) {
		return quota("volume %q: %d of %d bytes reached the disk: the pool is full", name, v.PhysicalBytes, len(seed))
	}
	return nil
}

// makeSeedFile makes sure that there is a file which the seed fills. It deletes only one that is too long, since an
// upload does not truncate: another process may be about to start the machine with it.
func (c *creation) makeSeedFile(ctx context.Context, name string, length int) error {
	v, err := c.conn.Volume(ctx, c.cfg.Pool, name)
	if err == nil && v.PhysicalBytes <= int64(length) {
		return nil
	}
	if err == nil {
		err = c.conn.DeleteVolume(ctx, c.cfg.Pool, name)
	}
	if gone(err) != nil {
		return err
	}
	xml, err := uploadXML(name)
	if err != nil {
		return err
	}
	if err := c.createVolume(ctx, name, xml); !errors.Is(err, ErrConflict) {
		return err
	}
	return nil
}

func (c *creation) define(ctx context.Context, pool Pool) error {
	xml, err := domainXML(domainInput{plan: c.plan, pool: pool, created: time.Now(), mutate: c.mutate})
	if err != nil {
		return err
	}
	return c.conn.DefineDomain(ctx, xml)
}

// finish moves a machine forward that has a domain, and reports it.
func (c *creation) finish(ctx context.Context, d Domain, md metadata) (Machine, error) {
	if md.Phase == phaseDeleting {
		return c.report(d, md), transient(ErrConflict, "machine %q is being deleted", c.plan.id)
	}
	if neverStarted(md.Phase, d.State) {
		started, err := c.start(ctx)
		if err != nil {
			return c.report(d, md), err
		}
		d = started
	}
	if md.Phase == phaseDefined {
		if err := c.settle(ctx, d, &md); err != nil {
			return c.report(d, md), err
		}
	}
	c.space.release(c.plan.id)
	m := c.report(d, md)
	return m, c.addAddresses(ctx, c.conn, d, md, &m)
}

// start starts the domain and looks at the outcome: whatever the answer was, what counts is whether it runs.
func (c *creation) start(ctx context.Context) (Domain, error) {
	startErr := c.conn.StartDomain(ctx, c.plan.uuid)
	if startErr != nil && !isLibvirtAnswer(startErr) {
		return Domain{}, startErr
	}
	d, err := c.conn.DomainByUUID(ctx, c.plan.uuid)
	if err != nil {
		return Domain{}, lookAgain(err, "domain %q", c.plan.domain)
	}
	if startErr == nil || d.State.isActive() {
		return d, nil
	}
	if err := c.discardUnlessWhole(ctx, d); err != nil {
		return Domain{}, err
	}
	return Domain{}, lookAgain(startErr, "domain %q", c.plan.domain)
}

// settle writes down that the machine has been started, after a last look at its disks: another process that gave
// this machine up may have removed them at the same time. It looks for the domain after that, so one of the two sees
// the other.
func (c *creation) settle(ctx context.Context, d Domain, md *metadata) error {
	if err := c.discardUnlessWhole(ctx, d); err != nil {
		return err
	}
	md.Phase = phaseStarted
	element, err := md.element()
	if err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	return lookAgain(c.conn.SetDomainMetadata(ctx, c.plan.uuid, element), "domain %q", c.plan.domain)
}

// whole reports whether all volumes of the machine exist, and the image under the root disk.
func (c *creation) whole(ctx context.Context) (bool, error) {
	names := c.plan.volumes()
	for i := 0; i < len(names); i++ {
		v, err := c.conn.Volume(ctx, c.cfg.Pool, names[i])
		if err != nil {
			return false, gone(err)
		}
		if base := v.backingName(); c.isBase(base) {
			names = append(names, base)
		}
	}
	return true, nil
}

// abandon cleans up after an error that going on cannot mend, when there is no domain: the machine's own volumes go.
// If another process defined the domain meanwhile, and its disks went with that, it goes as well, and the next Create
// makes it anew.
func (c *creation) abandon(ctx context.Context, cause error) error {
	if class := ClassOf(cause); class != ClassPermanent && class != ClassQuota && !errors.Is(cause, errBaseGone) {
		return cause
	}
	c.space.release(c.plan.id)
	if _, err := c.conn.DomainByUUID(ctx, c.plan.uuid); ClassOf(err) != ClassNotFound {
		return cause // a domain exists, or nobody knows
	}
	if err := c.removeVolumes(ctx, c.conn, c.plan.uuid, c.cfg.Pool); err != nil {
		return errors.Join(cause, fmt.Errorf("removing what was begun: %w", err))
	}
	d, err := c.conn.DomainByUUID(ctx, c.plan.uuid)
	if err != nil {
		return cause
	}
	return errors.Join(cause, c.discardUnlessWhole(ctx, d))
}

// discardUnlessWhole ends a domain of this machine that has lost disks before it was ever used: the next Create makes
// it anew.
func (c *creation) discardUnlessWhole(ctx context.Context, d Domain) error {
	whole, err := c.whole(ctx)
	if err != nil || whole {
		return err
	}
	if _, err := c.plan.adopt(d); err != nil {
		return err
	}
	if err := endDomain(ctx, c.conn, d); err != nil {
		return err
	}
	return transient(ErrConflict, "machine %q lost disks while it was created: it is made anew", c.plan.id)
}

// report is the machine with its domain as Create sees it.
func (c *creation) report(d Domain, md metadata) Machine {
	m := machineOf(c.plan.id, d, md)
	m.Drifted = md.SpecHash != c.plan.hash
	return m
}

// lookAgain turns NotFound into a conflict: something that was there a moment ago has gone, which the next call sees.
func lookAgain(err error, format string, args ...any) error {
	if ClassOf(err) != ClassNotFound {
		return err
	}
	return transient(ErrConflict, "%s disappeared meanwhile", fmt.Sprintf(format, args...))
}

func isLibvirtAnswer(err error) bool {
	_, ok := errors.AsType[*LibvirtError](err)
	return ok
}
