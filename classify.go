package kvm2

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	libvirt "github.com/digitalocean/go-libvirt"
	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2/internal/sshdial"
	"github.com/kvm2/kvm2/internal/tlsdial"
)

// LibvirtError is an error that libvirt reported over a connection which is still good. Implementations of Conn
// return it for exactly that; every other error means that the connection is not to be used again.
type LibvirtError struct {
	// Code is libvirt's error number (virErrorNumber, include/libvirt/virterror.h).
	Code int
	// Message is libvirt's text, in the language of the host.
	Message string
}

// Error returns libvirt's text and number.
func (e *LibvirtError) Error() string {
	return fmt.Sprintf("libvirt error %d: %s", e.Code, clipTo(2000, e.Message)) // what qemu has to say stands at its end
}

// A verdict is what an error is taken for.
type verdict struct {
	class  Class
	reason error
}

var (
	isTransient    = verdict{ClassTransient, nil}
	isConflict     = verdict{ClassTransient, ErrConflict}
	isPermanent    = verdict{ClassPermanent, nil}
	isUnsupported  = verdict{ClassPermanent, ErrUnsupported}
	isUnauthorized = verdict{ClassPermanent, ErrUnauthorized}
	isHostKey      = verdict{ClassPermanent, ErrHostKey}
	isQuota        = verdict{ClassQuota, ErrQuotaExceeded}
	isNotFound     = verdict{ClassNotFound, ErrNotFound}
)

// codeVerdicts is what each of libvirt's codes means when its text says nothing more. A code without a row is
// Transient.
var codeVerdicts = map[libvirt.ErrorNumber]verdict{
	libvirt.ErrNoMemory:             isQuota,
	libvirt.ErrNoSupport:            isUnsupported,
	libvirt.ErrNoConnect:            isPermanent,
	libvirt.ErrInvalidArg:           isPermanent,
	libvirt.ErrNoName:               isPermanent,
	libvirt.ErrXMLError:             isPermanent,
	libvirt.ErrXMLDetail:            isPermanent,
	libvirt.ErrConfigUnsupported:    isUnsupported,
	libvirt.ErrArgumentUnsupported:  isUnsupported,
	libvirt.ErrOverflow:             isPermanent,
	libvirt.ErrOperationUnsupported: isUnsupported,
	libvirt.ErrCPUIncompatible:      isUnsupported,
	libvirt.ErrXMLInvalidSchema:     isPermanent,
	libvirt.ErrAuthUnavailable:      isPermanent,

	libvirt.ErrDomExist:        isConflict,
	libvirt.ErrNetworkExist:    isConflict,
	libvirt.ErrStorageVolExist: isConflict,

	libvirt.ErrOperationDenied: isUnauthorized,
	libvirt.ErrAuthFailed:      isUnauthorized,
	libvirt.ErrAuthCancelled:   isUnauthorized,
	libvirt.ErrAccessDenied:    isUnauthorized,

	libvirt.ErrNoDomain:      isPermanent,
	libvirt.ErrNoNetwork:     isPermanent,
	libvirt.ErrNoStoragePool: isPermanent,
	libvirt.ErrNoStorageVol:  isPermanent,
}

// textVerdicts refines the codes that libvirt uses for many things. The first row whose text occurs in the
// lower-cased message decides; hosts that run in another language fall to codeVerdicts.
var textVerdicts = map[libvirt.ErrorNumber][]textVerdict{
	libvirt.ErrInternalError: {
		{"no space left", isQuota},
		{"cannot allocate memory", isQuota},
		{"device or resource busy", isTransient},
		{"keepalive", isTransient},
		{" lock", isTransient}, // not "-blockdev", which most messages of qemu quote
		{"permission denied", isPermanent},
		{"image is not in", isPermanent},
		{"unknown cpu", isPermanent},
		{"unable to find cpu", isPermanent},
		{"unsupported machine type", isPermanent},
		{"unknown machine", isPermanent},
		{"unexpected qemu uri", isPermanent},
		{"unable to parse uri", isPermanent},
	},
	libvirt.ErrOperationFailed: {
		{"already exists with uuid", isConflict},
		{"already defined with uuid", isConflict},
		{"unable to find any firmware", isUnsupported},
		{"cannot allocate memory", isQuota},
	},
	libvirt.ErrSystemError: {
		{"no space left on device", isQuota},
		{"cannot allocate memory", isQuota},
		{"disk quota exceeded", isQuota},
		{"resource busy", isTransient},
		{"temporarily unavailable", isTransient},
		{"connection reset", isTransient},
		{"broken pipe", isTransient},
		{"permission denied", isPermanent},
		{"operation not permitted", isPermanent},
		{"file too large", isPermanent},
		{"no such file or directory", isPermanent},
	},
	libvirt.ErrRPC: {
		{"authentication required", isUnauthorized},
		{"unable to decode message payload", isPermanent},
	},
	libvirt.ErrOperationInvalid: {
		{"already exists", isConflict},
		{"is already active", isConflict},
		{"already running", isConflict},
		{"cannot contain", isPermanent},
		{"is starting up", isTransient},
		{"storage pool '", isPermanent}, // "... is not active": a prerequisite that somebody has to mend
		{"network '", isPermanent},      // likewise
		{"still in use", isTransient},
		{"still being allocated", isTransient},
	},
}

type textVerdict struct {
	text string
	verdict
}

// absentCode is the code by which libvirt says that the very object an operation asks about does not exist. The
// same code from another operation means that something it needs is missing.
var absentCode = map[Op]libvirt.ErrorNumber{
	OpDomainLookup:      libvirt.ErrNoDomain,
	OpDomainStart:       libvirt.ErrNoDomain,
	OpDomainSetMetadata: libvirt.ErrNoDomain,
	OpDomainDestroy:     libvirt.ErrNoDomain,
	OpDomainUndefine:    libvirt.ErrNoDomain,
	OpPoolLookup:        libvirt.ErrNoStoragePool,
	OpNetworkLookup:     libvirt.ErrNoNetwork,
	OpVolumeLookup:      libvirt.ErrNoStorageVol,
	OpVolumeDelete:      libvirt.ErrNoStorageVol,
	OpVolumeUpload:      libvirt.ErrNoStorageVol,
	OpVolumeDownload:    libvirt.ErrNoStorageVol,
}

// classify turns an error that entered through the seam into an *Error. What is one already only learns where it
// happened.
func classify(op Op, host string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return &Error{Class: e.Class, Op: op, Host: host, Err: err}
	}
	v := judge(op, err)
	return &Error{Class: v.class, Op: op, Host: host, Reason: v.reason, Err: err}
}

func judge(op Op, err error) verdict {
	if e, ok := errors.AsType[*LibvirtError](err); ok {
		return judgeLibvirt(op, e)
	}
	return judgeTransport(err)
}

func judgeLibvirt(op Op, e *LibvirtError) verdict {
	code := libvirt.ErrorNumber(uint32(e.Code))
	if absent, ok := absentCode[op]; ok && code == absent {
		return isNotFound
	}
	message := strings.ToLower(e.Message)
	rows := textVerdicts[code]
	if i := slices.IndexFunc(rows, func(r textVerdict) bool { return strings.Contains(message, r.text) }); i >= 0 {
		return rows[i].verdict
	}
	if v, ok := codeVerdicts[code]; ok {
		return v
	}
	return isTransient
}

// judgeTransport judges what went wrong below libvirt. Trying again after a refused key or credential locks
// accounts and hides attacks, so those are Permanent; networks and daemons come back.
func judgeTransport(err error) verdict {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return isTransient
	}
	if _, ok := errors.AsType[*sshdial.HostKeyError](err); ok {
		return isHostKey
	}
	if _, ok := errors.AsType[*sshdial.AuthError](err); ok {
		return isUnauthorized
	}
	if _, ok := errors.AsType[*sshdial.CallbackError](err); ok {
		return isTransient
	}
	if _, ok := errors.AsType[*sshdial.MaterialError](err); ok {
		return isPermanent
	}
	if v, ok := judgeTLS(err); ok {
		return v
	}
	if _, ok := errors.AsType[*ssh.AlgorithmNegotiationError](err); ok {
		return isPermanent
	}
	if isFinalRefusal(err) {
		return isPermanent
	}
	if errors.Is(err, fs.ErrPermission) {
		return isUnauthorized
	}
	return isTransient
}

// judgeTLS judges the errors of a dial with certificates as it would judge keys.
func judgeTLS(err error) (verdict, bool) {
	if _, ok := errors.AsType[*tlsdial.ServerError](err); ok {
		return isHostKey, true
	}
	if _, ok := errors.AsType[*tlsdial.RefusedError](err); ok {
		return isUnauthorized, true
	}
	if _, ok := errors.AsType[*tlsdial.MaterialError](err); ok {
		return isPermanent, true
	}
	return verdict{}, false
}

// isFinalRefusal reports whether an SSH server will not do what it was asked, however often: open a socket or a
// connection, or run a command. Of several ways none may be open to hope.
func isFinalRefusal(err error) bool {
	if e, ok := errors.AsType[*sshdial.NoWayError](err); ok {
		return !slices.ContainsFunc(e.Errs, func(err error) bool { return !isFinalRefusal(err) })
	}
	if e, ok := errors.AsType[*sshdial.CommandError](err); ok && e.Status == 127 { // the host does not have it
		return true
	}
	e, ok := errors.AsType[*ssh.OpenChannelError](err)
	return ok && (e.Reason == ssh.Prohibited || e.Reason == ssh.UnknownChannelType)
}
