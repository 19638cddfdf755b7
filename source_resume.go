package kvm2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// retries counts how often one transfer has gone on after its source broke off.
type retries struct {
	most, taken int
}

func newRetries(c ImagesConfig) *retries { return &retries{most: max(0, c.MaxRetries)} }

func (r *retries) take() bool {
	if r.taken >= r.most {
		return false
	}
	r.taken++
	return true
}

// delay is the wait before the retry that was taken last: 1 s, doubled with each one, at most 30 s, and what the server
// asked for. Images.MaxTransfers bounds how many transfers come back at once, so there is no need for jitter.
func (r *retries) delay(cause error) time.Duration {
	return max(min(time.Second<<min(r.taken-1, 10), 30*time.Second), askedDelay(cause))
}

// errStartOver ends an attempt whose source broke off and cannot go on: the retry has been taken and waited for.
var errStartOver = errors.New("the source broke off and cannot go on: the transfer starts over")

// resumingBody is the body of a file that is opened again where it broke off. Read is called by one goroutine; Close may
// be called meanwhile.
type resumingBody struct {
	ctx     context.Context // of the attempt
	open    openFunc
	name    string
	retries *retries
	wait    func(context.Context, time.Duration) error
	offset  int64
	size    int64 // 0 while unknown
	failure error // of a Read that also brought bytes

	mu     sync.Mutex
	body   io.ReadCloser
	closed bool
}

func (b *resumingBody) Read(p []byte) (int, error) {
	for {
		n, err := 0, b.failure
		if err == nil {
			n, err = b.current().Read(p)
		}
		b.offset += int64(n)
		if n > 0 {
			b.failure = err
			return n, nil
		}
		if err == nil {
			return 0, nil
		}
		if errors.Is(err, io.EOF) && b.offset >= b.size {
			return 0, io.EOF
		}
		if err := b.resume(err); err != nil {
			return 0, err
		}
		b.failure = nil
	}
}

// resume opens the file again where it broke off.
func (b *resumingBody) resume(cause error) error {
	if errors.Is(cause, io.EOF) {
		cause = io.ErrUnexpectedEOF // it is shorter than its size
	}
	cause = withoutURL(cause)
	for {
		if err := b.ctx.Err(); err != nil {
			return transient(nil, "image %q: %w", b.name, cmp.Or(context.Cause(b.ctx), err))
		}
		if !b.retries.take() {
			return transient(nil, "image %q: broke off after %d bytes, and after %d retries: %w", b.name, b.offset, b.retries.taken, cause)
		}
		if err := b.wait(b.ctx, b.retries.delay(cause)); err != nil {
			return transient(nil, "image %q: %w", b.name, err)
		}
		body, size, err := b.open(b.ctx, b.offset)
		switch {
		case err == nil && b.size > 0 && size > 0 && size != b.size: // another file
			_ = body.Close()
			return b.startOver()
		case err == nil:
			return b.replace(body, size)
		case errors.Is(err, errCannotResume):
			return b.startOver()
		case ClassOf(err) != ClassTransient:
			return err
		}
		cause = err
	}
}

func (b *resumingBody) startOver() error {
	return transient(nil, "image %q: %w", b.name, errStartOver)
}

func (b *resumingBody) current() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.body
}

func (b *resumingBody) replace(body io.ReadCloser, size int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errors.Join(fmt.Errorf("image %q: %w", b.name, io.ErrClosedPipe), body.Close())
	}
	_ = b.body.Close()
	b.body, b.size = body, max(b.size, size)
	return nil
}

func (b *resumingBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return b.body.Close()
}
