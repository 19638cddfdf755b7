package fake

import (
	"fmt"

	"github.com/kvm2/kvm2"
)

// The error numbers that the fake uses (virErrorNumber, include/libvirt/virterror.h).
const (
	codeInternal         = 1
	codeNoSupport        = 3
	codeInvalidArg       = 8
	codeOperationFailed  = 9
	codeXMLError         = 27
	codeXMLDetail        = 35
	codeSystem           = 38
	codeRPC              = 39
	codeNoDomain         = 42
	codeNoNetwork        = 43
	codeNoPool           = 49
	codeNoVolume         = 50
	codeOperationInvalid = 55
	codeUnsupported      = 67
	codeVolumeExists     = 90
	codeSchema           = 92
)

// answer is an error as libvirt reports it.
func answer(code int, format string, args ...any) error {
	return &kvm2.LibvirtError{Code: code, Message: fmt.Sprintf(format, args...)}
}

// invalidOperation is the answer to what the object's state does not allow.
func invalidOperation(format string, args ...any) error {
	return answer(codeOperationInvalid, "Requested operation is not valid: "+format, args...)
}

// missingFile is the answer where a file should be.
func missingFile(format string, args ...any) error {
	return answer(codeSystem, format+": No such file or directory", args...)
}

// maxMessageBytes is where libvirt's RPC refuses a string (VIR_NET_MESSAGE_MAX and REMOTE_STRING_MAX).
const maxMessageBytes = 4 << 20

func checkMessage(s string) error {
	if len(s) > maxMessageBytes {
		return answer(codeRPC, "Unable to decode message payload")
	}
	return nil
}
