package rpcguard

import (
	"encoding/binary"
	"fmt"
)

const (
	// headerLen is the size of a frame without payload: the length word and the
	// six words of virNetMessageHeader.
	headerLen = 28

	// maxFrameLen is the longest frame libvirt sends or accepts:
	// VIR_NET_MESSAGE_MAX plus VIR_NET_MESSAGE_LEN_MAX for the length word, which
	// the former does not count (src/rpc/virnetprotocol.x).
	maxFrameLen = 32<<20 + 4
)

// The message types and statuses of virNetMessageType and virNetMessageStatus
// that occur between a client without file descriptor passing and a daemon.
const (
	typeCall    = 0
	typeReply   = 1
	typeMessage = 2
	typeStream  = 3

	statusOK       = 0
	statusError    = 1
	statusContinue = 2
)

// remoteProgram is REMOTE_PROGRAM of src/remote/remote_protocol.x.
const remoteProgram = 0x20008086

// opensStream reports whether the client listens for stream packets after the
// reply to a call of this procedure. These are the procedures for which
// go-libvirt takes a Reader or a Writer.
func opensStream(program, procedure uint32) bool {
	if program != remoteProgram {
		return false
	}
	switch procedure {
	case 148, // DOMAIN_MIGRATE_PREPARE_TUNNEL
		201, // DOMAIN_OPEN_CONSOLE
		208, // STORAGE_VOL_UPLOAD
		209, // STORAGE_VOL_DOWNLOAD
		211, // DOMAIN_SCREENSHOT
		215, // DOMAIN_MIGRATE_PREPARE_TUNNEL3
		296: // DOMAIN_OPEN_CHANNEL
		return true
	}
	return false
}

// header is the fixed part of a frame.
type header struct {
	length    uint32
	program   uint32
	version   uint32
	procedure uint32
	typ       uint32
	serial    uint32
	status    uint32
}

// parseHeader reads the header at the start of b, which holds at least
// headerLen bytes.
func parseHeader(b []byte) header {
	return header{
		length:    binary.BigEndian.Uint32(b),
		program:   binary.BigEndian.Uint32(b[4:]),
		version:   binary.BigEndian.Uint32(b[8:]),
		procedure: binary.BigEndian.Uint32(b[12:]),
		typ:       binary.BigEndian.Uint32(b[16:]),
		serial:    binary.BigEndian.Uint32(b[20:]),
		status:    binary.BigEndian.Uint32(b[24:]),
	}
}

// checkLength returns an error unless length is that of a frame.
func checkLength(length uint32) error {
	if length < headerLen || length > maxFrameLen {
		return &FrameError{
			Reason: fmt.Sprintf("length outside %d to %d", headerLen, maxFrameLen),
			Length: length,
		}
	}
	return nil
}

// payload returns the number of bytes that follow the header.
func (h header) payload() uint32 { return h.length - headerLen }

// errorf returns a FrameError about this frame.
func (h header) error(reason string) error {
	return &FrameError{
		Reason:    reason,
		Length:    h.length,
		Program:   h.program,
		Procedure: h.procedure,
		Type:      h.typ,
		Serial:    h.serial,
		Status:    h.status,
	}
}

// FrameError reports a frame that breaks libvirt's RPC protocol. The connection
// is closed when it occurs: what follows cannot be trusted.
type FrameError struct {
	// Reason says which rule the frame breaks.
	Reason string
	// Length is the frame's length word. The fields below are zero when the
	// length itself was wrong, for then nothing else was read.
	Length uint32
	// Program and Procedure name the call the frame claims to belong to.
	Program, Procedure uint32
	// Type and Status are virNetMessageType and virNetMessageStatus.
	Type, Status uint32
	// Serial is the number of the call.
	Serial uint32
}

// Error implements error.
func (e *FrameError) Error() string {
	return fmt.Sprintf("libvirt RPC: bad frame: %s (length %d, program %#x, procedure %d, type %d, serial %d, status %d)",
		e.Reason, e.Length, e.Program, e.Procedure, e.Type, e.Serial, e.Status)
}
