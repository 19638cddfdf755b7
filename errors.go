package kvm2

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Class tells a controller what to do about an error.
type Class int

// The classes. The zero value is not a class: ClassOf(nil) is ClassNone.
const (
	// ClassNone is the class of no error.
	ClassNone Class = iota
	// ClassTransient: call again. It is also the class of everything that kvm2 does not recognise.
	ClassTransient
	// ClassPermanent: calling again with the same input and the same host cannot help.
	ClassPermanent
	// ClassQuota: the host lacks space or memory. It helps to wait, to free something, or to choose another host.
	ClassQuota
	// ClassNotFound: the object asked about does not exist.
	ClassNotFound
)

// String returns the class's name.
func (c Class) String() string {
	switch c {
	case ClassNone:
		return "None"
	case ClassTransient:
		return "Transient"
	case ClassPermanent:
		return "Permanent"
	case ClassQuota:
		return "Quota"
	case ClassNotFound:
		return "NotFound"
	}
	return fmt.Sprintf("Class(%d)", int(c))
}

// The sentinels, for errors.Is. Each names its class.
var (
	// ErrNotFound: no such machine (NotFound).
	ErrNotFound = errors.New("not found")
	// ErrQuotaExceeded: the host lacks space or memory (Quota).
	ErrQuotaExceeded = errors.New("quota exceeded")
	// ErrForeignOwner: the name or UUID belongs to a machine of another scope or owner, or to no kvm2 machine
	// at all. It was not touched (Permanent).
	ErrForeignOwner = errors.New("owned by another")
	// ErrInvalidSpec: a Spec or an ID is not valid. Nothing was written (Permanent).
	ErrInvalidSpec = errors.New("invalid")
	// ErrInvalidConfig: a Config is not valid (Permanent).
	ErrInvalidConfig = errors.New("invalid configuration")
	// ErrUnauthorized: the host refused the credentials (Permanent).
	ErrUnauthorized = errors.New("unauthorized")
	// ErrHostKey: the host's SSH key is unknown, has changed or is revoked, or its TLS certificate does not hold; or
	// this is so of a jump host (Permanent).
	ErrHostKey = errors.New("host key not trusted")
	// ErrUnsupported: the host cannot do what was asked (Permanent).
	ErrUnsupported = errors.New("unsupported")
	// ErrConflict: the object exists already or is just being changed; look again (Transient).
	ErrConflict = errors.New("conflict")
	// ErrImage: the image is not what its description says: a wrong checksum, a refused format (Permanent).
	ErrImage = errors.New("bad image")
	// ErrClosed: the Provider has been closed (Permanent).
	ErrClosed = errors.New("provider closed")
)

// Error is the error that every call of a Provider returns. Its text never contains secrets.
type Error struct {
	// Class tells what to do.
	Class Class
	// Op is what kvm2 was doing, for example "volume.create"; empty for an error found before any call.
	Op Op
	// Host is the host's name; empty for an error found before any call.
	Host string
	// Reason is the sentinel that errors.Is finds; nil if none applies.
	Reason error
	// Err is the cause; it may be nil.
	Err error

	after time.Duration // a Transient error is not worth another call before
}

// Error returns the host, the operation and the cause.
func (e *Error) Error() string {
	var parts []string
	if e.Host != "" {
		parts = append(parts, e.Host)
	}
	if e.Op != "" {
		parts = append(parts, string(e.Op))
	}
	if e.Reason != nil {
		parts = append(parts, e.Reason.Error())
	}
	if e.Err != nil {
		parts = append(parts, e.Err.Error())
	}
	if len(parts) == 0 {
		return "unknown error"
	}
	return strings.Join(parts, ": ")
}

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.Reason != nil {
		errs = append(errs, e.Reason)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// RetryAfter is how long a controller should wait before it calls again; 0 means that calling again is useless
// (Permanent) or needless (NotFound).
func (e *Error) RetryAfter() time.Duration {
	switch e.Class {
	case ClassTransient:
		return max(retryTransient, e.after)
	case ClassQuota:
		return retryQuota
	case ClassPermanent, ClassNotFound:
		return 0
	case ClassNone: // as ClassOf sees it
	}
	return retryTransient
}

// Space and memory come back when somebody frees them, which takes minutes; a connection comes back in seconds.
const (
	retryTransient = 5 * time.Second
	retryQuota     = 2 * time.Minute
)

// ClassOf returns the class of err: ClassNone for nil, the class of the first *Error in its tree, and
// ClassTransient for everything else, a cancelled context included.
func ClassOf(err error) Class {
	if err == nil {
		return ClassNone
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Class != ClassNone {
		return e.Class
	}
	return ClassTransient
}

// RetryAfter returns the retry hint of err: that of the first *Error in its tree, and for any other error that of
// a Transient one.
func RetryAfter(err error) time.Duration {
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.RetryAfter()
	}
	return retryTransient
}

// invalidf makes an ErrInvalidSpec.
func invalidf(format string, args ...any) error {
	return &Error{Class: ClassPermanent, Reason: ErrInvalidSpec, Err: fmt.Errorf(format, args...)}
}

// permanent, transient and quota make errors of their class; the sentinel may be nil.
func permanent(reason error, format string, args ...any) error {
	return &Error{Class: ClassPermanent, Reason: reason, Err: fmt.Errorf(format, args...)}
}

func transient(reason error, format string, args ...any) error {
	return &Error{Class: ClassTransient, Reason: reason, Err: fmt.Errorf(format, args...)}
}

func quota(format string, args ...any) error {
	return &Error{Class: ClassQuota, Reason: ErrQuotaExceeded, Err: fmt.Errorf(format, args...)}
}
