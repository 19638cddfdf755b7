package kvm2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

var (
	// errBeaten says that another process has published the image first.
	errBeaten = errors.New("another process was faster")
	// errUncertain says that nobody knows whether the image is published.
	errUncertain = errors.New("the outcome of the publication is unknown")
)

// publish creates the pointer. Whoever creates it first has published, and removes what dead processes have left.
//
// A pointer is created once and never again: who has removed one, and has seen after that that nothing stands on the data,
// may delete them, because whoever makes an overlay looks afterwards whether the pointer is still there.
func (t *imageTransfer) publish(ctx context.Context, conn Conn, sent sentImage, path string) error {
	xml, err := overlayXML(t.name.pointer, sent.virtualSize, path, sent.format)
	if err != nil {
		return err
	}
	err = conn.CreateVolume(ctx, t.cfg.Pool, xml)
	if errors.Is(err, ErrConflict) {
		return t.beaten(ctx, conn)
	}
	if err != nil && !isLibvirtAnswer(err) {
		return fmt.Errorf("%w: %w", errUncertain, err)
	}
	if err != nil {
		return err
	}
	if err := t.removeDead(ctx, conn); err != nil {
		t.log.LogAttrs(ctx, slog.LevelWarn, "removing what dead processes left of an image",
			slog.String("image", t.name.checksum), slog.String("error", err.Error()))
	}
	return nil
}

// beaten finds out who has published. Where pools of several hosts share a directory, the pool may not know it yet.
func (t *imageTransfer) beaten(ctx context.Context, conn Conn) error {
	_, err := t.lookup(ctx, conn, t.name)
	if err == nil {
		return errBeaten
	}
	if ClassOf(err) == ClassNotFound {
		err = errors.Join(lookAgain(err, "volume %q", t.name.pointer), conn.RefreshPool(ctx, t.cfg.Pool))
	}
	return err
}

// conclude ends an attempt: it is published, or it is removed.
func (t *imageTransfer) conclude(ctx context.Context, volume string, err error) error {
	if err == nil {
		t.attempts.end(volume)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(t.cfg.CallTimeout))
	defer cancel()
	if errors.Is(err, errUncertain) {
		return t.resolve(ctx, volume, err)
	}
	removeErr := t.removeAttempt(ctx, volume)
	if errors.Is(err, errBeaten) {
		return removeErr
	}
	return errors.Join(err, removeErr)
}

// resolve looks whether the attempt has been published. If it seems not, it is left to whoever publishes next, or to
// PruneImages: the call that was lost may still be at work on the host, and machines may come to stand on the volume.
func (t *imageTransfer) resolve(ctx context.Context, volume string, cause error) error {
	conn, err := t.open(ctx)
	if err != nil {
		t.attempts.abandon(volume)
		return errors.Join(cause, err)
	}
	defer func() { _ = conn.Close() }()
	if winner, err := t.lookup(ctx, conn, t.name); err == nil && winner.isIn(volume) {
		t.attempts.end(volume)
		return nil
	}
	t.attempts.abandon(volume)
	return cause
}

// removeAttempt removes an attempt that was never published, on a fresh connection: the transfer's own may be broken,
// its context over. If the host cannot be reached, the next publisher removes it, or PruneImages.
func (t *imageTransfer) removeAttempt(ctx context.Context, volume string) error {
	conn, err := t.open(ctx)
	if err != nil {
		t.attempts.abandon(volume)
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := gone(conn.DeleteVolume(ctx, t.cfg.Pool, volume)); err != nil {
		t.attempts.abandon(volume)
		return err
	}
	t.attempts.end(volume)
	return nil
}
