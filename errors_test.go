package kvm2_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvm2/kvm2"
)

var classes = []kvm2.Class{kvm2.ClassTransient, kvm2.ClassPermanent, kvm2.ClassQuota, kvm2.ClassNotFound}

// wrappings are the ways in which callers wrap errors.
var wrappings = map[string]func(error) error{
	"as it is":     func(err error) error { return err },
	"wrapped":      func(err error) error { return fmt.Errorf("reconcile: %w", err) },
	"wrapped deep": func(err error) error { return fmt.Errorf("a: %w", fmt.Errorf("b: %w", fmt.Errorf("c: %w", err))) },
	"joined":       func(err error) error { return errors.Join(errors.New("other"), err) },
	"two verbs":    func(err error) error { return fmt.Errorf("%w and %w", io.EOF, err) },
}

func TestClassOf_ThroughAnyWrapping(t *testing.T) {
	for name, wrap := range wrappings {
		for _, class := range classes {
			cause := &kvm2.Error{Class: class, Op: kvm2.OpDial, Host: "kvm-1", Reason: kvm2.ErrConflict, Err: io.ErrUnexpectedEOF}
			err := wrap(cause)
			if got := kvm2.ClassOf(err); got != class {
				t.Errorf("%s: class is %s, want %s", name, got, class)
			}
			if !errors.Is(err, kvm2.ErrConflict) || !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%s: the sentinel or the cause is lost", name)
			}
			if e, ok := errors.AsType[*kvm2.Error](err); !ok || e != cause {
				t.Errorf("%s: the *Error is lost", name)
			}
			if got, want := kvm2.RetryAfter(err), cause.RetryAfter(); got != want {
				t.Errorf("%s: RetryAfter is %v, want %v", name, got, want)
			}
		}
	}
}

func TestClassOf_IsTotal(t *testing.T) {
	if got := kvm2.ClassOf(nil); got != kvm2.ClassNone {
		t.Errorf("class of nil is %s", got)
	}
	for _, err := range []error{
		errors.New("x"), context.Canceled, context.DeadlineExceeded, io.EOF, &kvm2.LibvirtError{Code: 42}, &kvm2.Error{},
		errors.Join(errors.New("x"), io.EOF), kvm2.ErrNotFound,
	} {
		if got := kvm2.ClassOf(err); got != kvm2.ClassTransient {
			t.Errorf("class of %v is %s, want Transient: what is not recognised is tried again", err, got)
		}
		if got := kvm2.RetryAfter(err); got <= 0 {
			t.Errorf("RetryAfter of %v is %v: a Transient error is tried again", err, got)
		}
	}
}

func TestRetryAfter_ByClass(t *testing.T) {
	if got := kvm2.RetryAfter(nil); got != 0 {
		t.Errorf("RetryAfter(nil) = %v", got)
	}
	hint := map[kvm2.Class]time.Duration{}
	for _, class := range classes {
		hint[class] = kvm2.RetryAfter(&kvm2.Error{Class: class})
	}
	if hint[kvm2.ClassPermanent] != 0 || hint[kvm2.ClassNotFound] != 0 {
		t.Errorf("hints are %v: calling again is useless or needless", hint)
	}
	if hint[kvm2.ClassTransient] <= 0 || hint[kvm2.ClassQuota] <= hint[kvm2.ClassTransient] {
		t.Errorf("hints are %v: space comes back more slowly than a connection", hint)
	}
}

func TestError_Text(t *testing.T) {
	tests := []struct {
		err  *kvm2.Error
		want string
	}{
		{&kvm2.Error{}, "unknown error"},
		{&kvm2.Error{Err: io.EOF}, "EOF"},
		{&kvm2.Error{Reason: kvm2.ErrConflict}, "conflict"},
		{
			&kvm2.Error{Op: kvm2.OpVolumeCreate, Host: "kvm-1", Reason: kvm2.ErrQuotaExceeded, Err: &kvm2.LibvirtError{Code: 38, Message: "full"}},
			"kvm-1: volume.create: quota exceeded: libvirt error 38: full",
		},
	}
	for _, tt := range tests {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("text is %q, want %q", got, tt.want)
		}
	}
}

func TestClass_Names(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range append(classes, kvm2.ClassNone, 99) {
		if name := c.String(); name == "" || seen[name] {
			t.Errorf("class %d is called %q", int(c), name)
		}
		seen[c.String()] = true
	}
}

func TestSentinels_AreDistinct(t *testing.T) {
	all := []error{
		kvm2.ErrNotFound, kvm2.ErrQuotaExceeded, kvm2.ErrForeignOwner, kvm2.ErrInvalidSpec, kvm2.ErrInvalidConfig, kvm2.ErrUnauthorized,
		kvm2.ErrHostKey, kvm2.ErrUnsupported, kvm2.ErrConflict, kvm2.ErrImage, kvm2.ErrClosed,
	}
	texts := map[string]bool{}
	for i, a := range all {
		for j, b := range all {
			if errors.Is(a, b) != (i == j) {
				t.Errorf("errors.Is(%v, %v) = %t", a, b, i != j)
			}
		}
		if texts[a.Error()] || strings.TrimSpace(a.Error()) == "" {
			t.Errorf("the text %q does not tell sentinels apart", a)
		}
		texts[a.Error()] = true
	}
}
