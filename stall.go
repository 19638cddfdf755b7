package kvm2

import (
	"context"
	"fmt"
	"time"
)

// stallWatch ends a context when nothing has moved for some time.
type stallWatch struct {
	limit time.Duration
	timer *time.Timer
}

func watchStalls(ctx context.Context, limit time.Duration) (context.Context, *stallWatch, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &stallWatch{limit: limit}
	w.timer = time.AfterFunc(limit, func() { cancel(fmt.Errorf("nothing moved for %s", limit)) })
	return ctx, w, func() {
		w.timer.Stop()
		cancel(nil)
	}
}

func (w *stallWatch) moved() { w.timer.Reset(w.limit) }

// wait lets time pass in which nothing needs to move.
func (w *stallWatch) wait(ctx context.Context, d time.Duration) error {
	w.timer.Stop()
	defer w.moved()
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
