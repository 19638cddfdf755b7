package kvm2

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// PruneOptions says what PruneImages does.
type PruneOptions struct {
	// DryRun reports what would be removed, and removes nothing.
	DryRun bool
	// Keep are checksums of images that stay although nothing uses them, each in the form of Image.Checksum.
	Keep []string
}

// PruneReport is what PruneImages found and did.
type PruneReport struct {
	// Images are the images of the scope that the pool held, whole or in part, sorted by checksum.
	Images []PrunedImage
}

// PrunedImage is one image in a PruneReport.
type PrunedImage struct {
	// Checksum identifies the image, as in Image.Checksum.
	Checksum string
	// Removed are the volumes that were removed, or would be with DryRun, sorted: those of the image, or what dead
	// transfers left of it.
	Removed []string
	// FreedBytes is what they took up on the host's disk.
	FreedBytes int64
	// Kept is why something of the image stays; empty when nothing does.
	Kept KeepReason
	// Users is how many volumes stand on the image.
	Users int
}

// KeepReason is why PruneImages keeps an image.
type KeepReason string

// The reasons, in the order in which one goes before another.
const (
	// KeepFailed: it could not be removed; the error says why.
	KeepFailed KeepReason = "failed"
	// KeepInUse: volumes stand on it, or a root disk is just being made and does not show yet on what.
	KeepInUse KeepReason = "in use"
	// KeepTransferring: it is being transferred, or has not been watched for long enough to say that it is not. What a
	// dead process left is found by its size, which has not changed for ImagesConfig.StallTimeout between two calls.
	KeepTransferring KeepReason = "transferring"
	// KeepWanted: a machine that this Provider is creating needs it.
	KeepWanted KeepReason = "wanted"
	// KeepAsked: PruneOptions.Keep has it.
	KeepAsked KeepReason = "asked"
)

// PruneImages removes the images of the scope from the pool that no volume stands on, and what dead transfers left.
// It may be called at any time, beside Create in this process and in others: a machine whose image goes while it is
// created begins anew, and none loses an image that it stands on. A call that was broken off is finished by the next.
//
// Users are volumes of the same pool. Whoever puts an overlay on an image of kvm2 elsewhere must keep the image.
//
// It returns what was removed also when it fails. Errors are those of the images, joined: what the host and the way to
// it bring about, ErrImage for a volume that only looks like an image; ErrInvalidSpec (Permanent) for PruneOptions. It
// asks for all volumes once, and once more if there is something to remove; beyond that it makes a call for each
// volume that it removes.
func (p *Provider) PruneImages(ctx context.Context, opts PruneOptions) (PruneReport, error) {
	keep, err := opts.keep(p.cfg.Scope)
	if err != nil {
		return PruneReport{}, fmt.Errorf("prune images: %w", err)
	}
	r := &pruning{Provider: p, known: p.images.attempts, keep: keep}
	err = p.conns.with(ctx, func(conn Conn) error {
		r.conn = conn
		return r.run(ctx, opts.DryRun)
	})
	if err != nil {
		err = fmt.Errorf("prune images of scope %q: %w", p.cfg.Scope, err)
	}
	return r.report(), err
}

// keep returns the pointers of the images that shall stay.
func (o PruneOptions) keep(scope string) ([]string, error) {
	var pointers []string
	for i, checksum := range o.Keep {
		if !digestForm.MatchString(checksum) {
			return nil, invalidf("keep[%d]: %q: want sha256: and 64, or sha512: and 128 lower-case hexadecimal digits", i, clip(checksum))
		}
		pointers = append(pointers, newImageName(scope, checksum).pointer)
	}
	return pointers, nil
}

// pruning is one PruneImages call at work.
type pruning struct {
	*Provider
	conn   Conn
	known  *attempts
	keep   []string // pointers
	stored []*storedImage
	lost   bool // the connection is
}

// storedImage is what the pool holds of one image.
type storedImage struct {
	name    imageName
	pointer *Volume  // nil when the image is not published
	data    []Volume // the published image's, and attempts

	goes   bool     // the published image shall go
	doomed []Volume // those of data that shall go
	result PrunedImage
	err    error
}

// points reports whether the image's pointer leads, or led, to the volume.
func (i *storedImage) points(data Volume) bool {
	return i.pointer != nil && i.pointer.backingName() == data.Name
}

func (i *storedImage) fail(err error) {
	i.err = errors.Join(i.err, err)
	i.result.Kept = KeepFailed
}

func (i *storedImage) removed(v Volume) {
	i.result.Removed = append(i.result.Removed, v.Name)
	i.result.FreedBytes += v.AllocatedBytes
}

func (r *pruning) run(ctx context.Context, dryRun bool) error {
	volumes, err := r.conn.Volumes(ctx, r.cfg.Pool)
	if err != nil {
		return err
	}
	r.known.retain(namesOf(volumes))
	r.stored = storedImages(r.cfg.Scope, volumes)
	u := usesOf(r.cfg.Scope, volumes)
	for _, i := range r.stored {
		r.judge(i, u)
	}
	if dryRun {
		r.pretend()
		return r.failures()
	}
	r.removePointers(ctx)
	return errors.Join(r.removeData(ctx), r.failures())
}

func namesOf(volumes []Volume) []string {
	names := make([]string, len(volumes))
	for i, v := range volumes {
		names[i] = v.Name
	}
	return names
}

// storedImages sorts volumes by the image that they belong to.
func storedImages(scope string, volumes []Volume) []*storedImage {
	var out []*storedImage
	for _, v := range volumes {
		name, ok := imageOfVolume(scope, v.Name)
		if !ok {
			continue
		}
		at := slices.IndexFunc(out, func(i *storedImage) bool { return i.name == name })
		if at < 0 {
			at = len(out)
			out = append(out, &storedImage{name: name, result: PrunedImage{Checksum: name.checksum}})
		}
		if v.Name == name.pointer {
			out[at].pointer = &v
		} else {
			out[at].data = append(out[at].data, v)
		}
	}
	slices.SortFunc(out, func(a, b *storedImage) int { return strings.Compare(a.name.checksum, b.name.checksum) })
	return out
}

// uses is which volumes others stand on.
type uses struct {
	count map[string]int
	// unclear is set while a root disk of the scope is being made: on what it will stand cannot be seen yet.
	unclear bool
}

func usesOf(scope string, volumes []Volume) uses {
	u := uses{count: usersOf(volumes)}
	for _, v := range volumes {
		if _, ok := machineOfVolume(scope, v.Name); ok && strings.HasSuffix(v.Name, "-"+volumeRoot) && v.BackingPath == "" && v.unfinished() {
			u.unclear = true
		}
	}
	return u
}

// of is how many volumes stand on the image, published or not, besides its own pointer.
func (u uses) of(i *storedImage) int {
	n := u.count[i.name.pointer]
	for _, v := range i.data {
		n += u.count[v.Name]
		if i.points(v) {
			n--
		}
	}
	return n
}

// judge decides what of an image shall go.
func (r *pruning) judge(i *storedImage, u uses) {
	i.result.Users = u.of(i)
	if i.pointer != nil && !i.pointer.unfinished() && !i.name.isAttempt(i.pointer.backingName()) {
		i.fail(notAnImage(*i.pointer))
		return
	}
	transferring := i.pointer != nil && i.pointer.unfinished()
	for _, v := range i.data {
		if i.points(v) || u.count[v.Name] > 0 {
			continue
		}
		if r.known.dead(v) {
			i.doomed = append(i.doomed, v)
		} else {
			transferring = true
		}
	}
	if u.unclear || transferring {
		i.doomed = nil // as long as anything is unclear, nothing goes
	}
	i.result.Kept = r.keepReason(i, u, transferring)
	if i.pointer != nil && i.result.Kept == "" {
		i.goes = true
		i.doomed = append(i.doomed, slices.DeleteFunc(slices.Clone(i.data), func(v Volume) bool { return !i.points(v) })...)
	}
}

// keepReason is why something of the image stays; empty when all of it may go.
func (r *pruning) keepReason(i *storedImage, u uses, transferring bool) KeepReason {
	switch {
	case u.unclear || i.result.Users > 0:
		return KeepInUse
	case transferring:
		return KeepTransferring
	case i.pointer == nil: // what dead transfers left is no use to anybody
		return ""
	case r.space.wants(i.name.pointer):
		return KeepWanted
	case slices.Contains(r.keep, i.name.pointer):
		return KeepAsked
	}
	return ""
}

// pretend reports what would be removed.
func (r *pruning) pretend() {
	for _, i := range r.stored {
		if i.goes {
			i.removed(*i.pointer)
		}
		for _, v := range i.doomed {
			i.removed(v)
		}
	}
}

// removePointers takes the images that shall go out of the cache. From then on nobody begins to use them.
func (r *pruning) removePointers(ctx context.Context) {
	for _, i := range r.stored {
		if i.goes && !r.remove(ctx, i, *i.pointer) {
			i.doomed = nil
		}
	}
}

// removeData looks for users once more, now that the pointers are gone, and removes what still has none. An image that
// has got one stays without its pointer, until the last of them has gone: a pointer that came back could be taken for a
// promise while another process is about to remove the data.
func (r *pruning) removeData(ctx context.Context) error {
	if !slices.ContainsFunc(r.stored, func(i *storedImage) bool { return len(i.doomed) > 0 }) {
		return nil
	}
	volumes, err := r.conn.Volumes(ctx, r.cfg.Pool)
	if err != nil {
		for _, i := range r.stored {
			if len(i.doomed) > 0 {
				i.result.Kept = KeepFailed
			}
		}
		return err
	}
	u := usesOf(r.cfg.Scope, volumes)
	for _, i := range r.stored {
		for _, v := range i.doomed {
			r.removeUnused(ctx, i, v, volumes, u)
		}
	}
	return nil
}

func (r *pruning) removeUnused(ctx context.Context, i *storedImage, v Volume, volumes []Volume, u uses) {
	at := slices.IndexFunc(volumes, func(now Volume) bool { return now.Name == v.Name })
	switch {
	case at < 0: // somebody else removed it
	case u.unclear || u.count[v.Name] > 0:
		i.result.Kept, i.result.Users = KeepInUse, u.count[v.Name]
	case !i.points(v) && !r.known.dead(volumes[at]):
		i.result.Kept = KeepTransferring
	default:
		r.remove(ctx, i, v)
	}
}

// remove removes a volume. Behind an error that is not the host's own answer the connection is of no use.
func (r *pruning) remove(ctx context.Context, i *storedImage, v Volume) bool {
	if r.lost {
		i.result.Kept = KeepFailed
		return false
	}
	if err := gone(r.conn.DeleteVolume(ctx, r.cfg.Pool, v.Name)); err != nil {
		i.fail(err)
		r.lost = !isLibvirtAnswer(err)
		return false
	}
	i.removed(v)
	return true
}

func (r *pruning) failures() error {
	var errs []error
	for _, i := range r.stored {
		if i.err != nil {
			errs = append(errs, fmt.Errorf("image %q: %w", i.name.checksum, i.err))
		}
	}
	return errors.Join(errs...)
}

func (r *pruning) report() PruneReport {
	var out PruneReport
	for _, i := range r.stored {
		slices.Sort(i.result.Removed)
		out.Images = append(out.Images, i.result)
	}
	return out
}
