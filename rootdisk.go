package kvm2

import (
	"context"
	"errors"
	"fmt"
)

// identify finds out which image the root disk is to stand on. While its checksum is looked up it returns the progress.
func (c *creation) identify(ctx context.Context) (*ImageProgress, error) {
	if c.plan.spec.Image.Volume != "" {
		return nil, nil //nolint:nilnil // there is nothing to find out, and no progress
	}
	checksum, progress, err := c.checksum(ctx)
	if err != nil || progress != nil {
		return progress, err
	}
	c.image = newImageName(c.cfg.Scope, checksum)
	return nil, nil //nolint:nilnil // it has been found out
}

// base is the image that the root disk stands on. As long as it is not there, it returns the progress.
func (c *creation) base(ctx context.Context) (baseImage, *ImageProgress, error) {
	image := c.plan.spec.Image
	if image.Volume != "" {
		base, err := c.images.inPlace(ctx, c.conn, image.Volume)
		return base, nil, err
	}
	base, progress, err := c.images.ensure(ctx, c.conn, Image{URL: image.URL, Checksum: c.image.checksum})
	if image.ChecksumURL != "" && errors.Is(err, errWrongChecksum) && c.images.recheck(image) {
		return baseImage{}, &ImageProgress{Phase: ImageOpening, Attempt: 1}, nil
	}
	return base, progress, err
}

// checksum is the image's checksum. If it has to be looked up, a root disk that exists says which one this machine was
// begun with: a new build, published meanwhile, is for the next machine.
func (c *creation) checksum(ctx context.Context) (string, *ImageProgress, error) {
	image := c.plan.spec.Image
	if image.ChecksumURL == "" {
		return image.Checksum, nil, nil
	}
	root, err := c.conn.Volume(ctx, c.cfg.Pool, c.plan.volume(volumeRoot))
	if err != nil && ClassOf(err) != ClassNotFound {
		return "", nil, err
	}
	if name, ok := imageOfData(c.cfg.Scope, root.backingName()); ok {
		return name.checksum, nil, nil
	}
	return c.images.resolve(image)
}

// errBaseGone says that a root disk stands, or was to stand, on data that are not the published image any more.
var errBaseGone = errors.New("its image was removed meanwhile")

// makeRoot makes the overlay on the image, and looks at the image once more. Who removes an image removes the pointer
// first, and the data only if nothing stands on them after that. So if the pointer is still there now, the overlay will
// be seen; if not, the machine begins anew.
func (c *creation) makeRoot(ctx context.Context, base baseImage) error {
	root := c.plan.volume(volumeRoot)
	xml, err := overlayXML(root, c.plan.spec.RootDiskBytes, base.path, base.format)
	if err != nil {
		return err
	}
	want := Volume{CapacityBytes: c.plan.spec.RootDiskBytes, BackingPath: base.path}
	makeErr := c.makeDisk(ctx, root, xml, want)
	if makeErr != nil && ClassOf(makeErr) != ClassPermanent { // one whose image has gone cannot be made: that is Permanent
		return makeErr
	}
	err = c.images.still(ctx, c.conn, base)
	if errors.Is(err, errBaseGone) {
		return fmt.Errorf("volume %q: %w", root, err)
	}
	if makeErr != nil {
		return makeErr
	}
	return err
}

// isBase reports whether a volume is one that root disks of this Spec stand on, whichever build it was begun with.
func (c *creation) isBase(volume string) bool {
	_, ok := imageOfData(c.cfg.Scope, volume)
	return ok || volume != "" && volume == c.plan.spec.Image.Volume
}

// still makes sure that what a root disk was just made on is still there; errBaseGone when an image has gone.
func (c *imageCache) still(ctx context.Context, conn Conn, base baseImage) error {
	if base.volume != "" {
		_, err := c.ownersVolume(ctx, conn, base.volume)
		return err
	}
	now, err := c.lookup(ctx, conn, base.name)
	if ClassOf(err) == ClassNotFound || err == nil && now.path != base.path {
		return transient(ErrConflict, "%w", errBaseGone)
	}
	return err
}
