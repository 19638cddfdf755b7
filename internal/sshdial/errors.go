package sshdial

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
)

// MaterialError reports something on this side that cannot be used: a key, a
// certificate, a known_hosts file or an agent.
type MaterialError struct {
	// Path is the file or socket, empty if there is none.
	Path string
	// What says what was to be read from it.
	What string
	// Err is why that failed.
	Err error
}

// Error implements error.
func (e *MaterialError) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("ssh: %s: %v", e.What, e.Err)
	}
	return fmt.Sprintf("ssh: %s %q: %v", e.What, e.Path, e.Err)
}

// Unwrap returns the cause.
func (e *MaterialError) Unwrap() error { return e.Err }

// CallbackError reports that Config.Signers or Config.Passphrase failed. Unlike a
// file that cannot be used, what stands behind it may well answer next time.
type CallbackError struct{ Err error }

// Error implements error.
func (e *CallbackError) Error() string { return e.Err.Error() }

// Unwrap returns what it returned.
func (e *CallbackError) Unwrap() error { return e.Err }

// HostKeyKind says what is wrong with a host key.
type HostKeyKind int

const (
	// Unknown means that known_hosts has no entry for the server.
	Unknown HostKeyKind = iota + 1
	// Mismatch means that it has entries, but none for the key that was shown.
	Mismatch
	// Revoked means that the key, or the authority of the certificate, is marked
	// @revoked.
	Revoked
	// BadCertificate means that a known authority has signed the certificate, but
	// it does not hold: it is for another host, or for another time.
	BadCertificate
)

// KnownKey is an entry of a known_hosts file.
type KnownKey struct {
	// File and Line say where the entry is.
	File string
	Line int
	// Type and Fingerprint describe its key.
	Type, Fingerprint string
	// Authority says that it is marked @cert-authority.
	Authority bool
}

// String returns the entry's place and key.
func (k KnownKey) String() string {
	marker := ""
	if k.Authority {
		marker = " as @cert-authority"
	}
	return fmt.Sprintf("%s %s%s in %q line %d", k.Type, k.Fingerprint, marker, k.File, k.Line)
}

// HostKeyError reports that the server has not proved to be the host that
// known_hosts knows.
type HostKeyError struct {
	Kind HostKeyKind
	// Files are the known_hosts files that were searched.
	Files []string
	// LookupKey is the name under which the server was looked up: the host, or
	// "[host]:port" if the port is not 22.
	LookupKey string
	// Type is the type of the key that the server has shown. If it has none of a
	// known type, Type lists its algorithms and there is no Fingerprint.
	Type string
	// Fingerprint is the fingerprint of that key, in the form "SHA256:...".
	Fingerprint string
	// Authority is the fingerprint of the authority that signed it, if it came in a
	// certificate.
	Authority string
	// Known are the entries for the server, or the one that revokes.
	Known []KnownKey
	// Err is the underlying error.
	Err error
}

// Error implements error. The text says how to get out.
func (e *HostKeyError) Error() string {
	switch e.Kind {
	case Unknown:
		return fmt.Sprintf("ssh: host key of %q is not known: %s; the host shows %s; after comparing it with the host's own "+
			"(ssh-keygen -l on its /etc/ssh/ssh_host_*_key.pub), add the key under the name %q",
			e.LookupKey, e.searched(), e.shown(), e.LookupKey)
	case Revoked:
		return fmt.Sprintf("ssh: host key of %q is revoked: the host shows %s, marked @revoked: %s; give the host a new key",
			e.LookupKey, e.shown(), e.known())
	case BadCertificate:
		return fmt.Sprintf("ssh: host certificate of %q does not hold: %v; the host shows %s; have it signed anew for this name",
			e.LookupKey, e.Err, e.shown())
	default:
		return fmt.Sprintf("ssh: host key of %q does not match: the host shows %s, known is %s; either it has new keys or "+
			"something else answers in its place; if the new key is confirmed, replace the entry %q",
			e.LookupKey, e.shown(), e.known(), e.LookupKey)
	}
}

// Unwrap returns the underlying error.
func (e *HostKeyError) Unwrap() error { return e.Err }

func (e *HostKeyError) searched() string {
	if len(e.Files) == 0 {
		return "no known_hosts file is configured"
	}
	return "there is no entry in " + quoteAll(e.Files)
}

func (e *HostKeyError) shown() string {
	switch {
	case e.Fingerprint == "":
		return fmt.Sprintf("only keys for %q", e.Type)
	case e.Authority != "":
		return fmt.Sprintf("%s %s certified by %s", e.Type, e.Fingerprint, e.Authority)
	}
	return e.Type + " " + e.Fingerprint
}

func (e *HostKeyError) known() string {
	entries := make([]string, len(e.Known))
	for i, k := range e.Known {
		entries[i] = k.String()
	}
	return strings.Join(entries, ", ")
}

// AuthError reports that the server is the right one and does not let the user
// in.
type AuthError struct {
	User, Host string
	// Offered are the fingerprints of the public keys that the server was offered,
	// in order.
	Offered []string
	// Err is the underlying error.
	Err error
}

// Error implements error.
func (e *AuthError) Error() string {
	offered := "no key was offered"
	if len(e.Offered) > 0 {
		offered = "offered " + strings.Join(e.Offered, ", ")
	}
	return fmt.Sprintf("ssh: %q is not let in as user %q (%s): %v", e.Host, e.User, offered, e.Err)
}

// Unwrap returns the underlying error.
func (e *AuthError) Unwrap() error { return e.Err }

// ForwardError reports that the server opens none of the sockets.
type ForwardError struct {
	// Sockets are the paths that were tried.
	Sockets []string
	// Reason and Message are the server's answer for the last of them. OpenSSH says
	// ssh.ConnectionFailed whatever the cause.
	Reason  ssh.RejectionReason
	Message string
}

// Error implements error. The text lists what the reason may stand for.
func (e *ForwardError) Error() string {
	var causes string
	switch e.Reason {
	case ssh.Prohibited:
		causes = "the server forbids it: AllowStreamLocalForwarding, AllowTcpForwarding or DisableForwarding in its sshd_config, or an option of the key"
	case ssh.ConnectionFailed:
		causes = "the server does not say why: forwarding is disabled (AllowStreamLocalForwarding, AllowTcpForwarding or DisableForwarding in its sshd_config), " +
			"the socket does not exist, nothing listens on it, or the user has no permission to open it"
	case ssh.UnknownChannelType:
		causes = "the server cannot forward to unix sockets (OpenSSH can since 6.7)"
	case ssh.ResourceShortage:
		causes = "the server is short of resources"
	default:
		causes = "the reason is not one of RFC 4254"
	}
	return fmt.Sprintf("ssh: cannot connect to %s on the host: %v (%q): %s", quoteAll(e.Sockets), e.Reason, e.Message, causes)
}

// Unwrap returns the answer as the ssh package reports it.
func (e *ForwardError) Unwrap() error {
	return &ssh.OpenChannelError{Reason: e.Reason, Message: e.Message}
}

// TunnelError reports that a jump host does not connect to the next server.
type TunnelError struct {
	// Jump is the address of the jump host, Addr that of the next server.
	Jump, Addr string
	// Reason and Message are the jump host's answer.
	Reason  ssh.RejectionReason
	Message string
}

// Error implements error.
func (e *TunnelError) Error() string {
	hint := ""
	if e.Reason == ssh.Prohibited {
		hint = ": AllowTcpForwarding, PermitOpen or DisableForwarding in its sshd_config, or an option of the key"
	}
	return fmt.Sprintf("ssh: jump host %q does not connect to %q: %v (%q)%s", e.Jump, e.Addr, e.Reason, e.Message, hint)
}

// Unwrap returns the answer as the ssh package reports it.
func (e *TunnelError) Unwrap() error {
	return &ssh.OpenChannelError{Reason: e.Reason, Message: e.Message}
}

// CommandError reports that a command on the host could not be started, or ended
// in error.
type CommandError struct {
	// Command is its name.
	Command string
	// Status is its exit status, -1 if it was not started. 127 means that the host
	// does not have the command.
	Status int
	// Stderr is the end of what it wrote to its standard error.
	Stderr string
	// Err says why it could not be started; nil if it has ended.
	Err error
}

// Error implements error.
func (e *CommandError) Error() string {
	what := fmt.Sprintf("exit status %d", e.Status)
	switch {
	case e.Err != nil:
		what = e.Err.Error()
	case e.Status == statusNotFound:
		what = "the host does not have it"
	}
	if e.Stderr != "" {
		what += fmt.Sprintf(": it said %q", e.Stderr)
	}
	return fmt.Sprintf("ssh: command %q on the host: %s", e.Command, what)
}

// Unwrap returns why the command could not be started.
func (e *CommandError) Unwrap() error { return e.Err }

// NoWayError reports that every way to the daemon on the host failed.
type NoWayError struct {
	// Errs are the *ForwardError, if sockets were tried, and a *CommandError for
	// each command.
	Errs []error
}

// Error implements error.
func (e *NoWayError) Error() string {
	texts := make([]string, len(e.Errs))
	for i, err := range e.Errs {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; then ")
}

// Unwrap returns the errors.
func (e *NoWayError) Unwrap() []error { return e.Errs }

// DialError reports a failure on the way to the server, or a time that has run
// out.
type DialError struct {
	User, Addr string
	// Step says what was being done.
	Step string
	// Err is the error of the context if it has ended, else that of the network or
	// of the protocol.
	Err error
}

// Error implements error.
func (e *DialError) Error() string {
	return fmt.Sprintf("ssh: %q as user %q: %s: %v", e.Addr, e.User, e.Step, e.Err)
}

// Unwrap returns the underlying error.
func (e *DialError) Unwrap() error { return e.Err }

// KeepaliveError reports that a connection was given up because the host had
// fallen silent.
type KeepaliveError struct {
	// Silence is how long it left requests unanswered.
	Silence time.Duration
}

// Error implements error.
func (e *KeepaliveError) Error() string {
	return fmt.Sprintf("ssh: connection given up: the host has not answered for %v", e.Silence)
}

func quoteAll(values []string) string {
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = fmt.Sprintf("%q", v)
	}
	return strings.Join(quoted, ", ")
}
