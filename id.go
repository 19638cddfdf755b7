package kvm2

import (
	"crypto/sha1" //nolint:gosec // UUID version 5 is defined with SHA-1 (RFC 9562, section 5.5); nothing secret depends on it
	"encoding/hex"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"unicode/utf8"
)

// UUID is a UUID in RFC 9562's byte order.
type UUID [16]byte

// namespace is kvm2's own UUID namespace, made once at random. It must never change: machines are found by it.
var namespace = UUID{0x5c, 0x2f, 0x1d, 0x6a, 0x90, 0x3b, 0x4e, 0x57, 0x8a, 0x1c, 0x2b, 0x6d, 0xf0, 0x4e, 0x93, 0x71}

// MachineUUID returns the UUID of the machine that ownerUID has in scope: version 5 of both, in kvm2's namespace.
func MachineUUID(scope, ownerUID string) UUID {
	h := sha1.New() //nolint:gosec // see the import
	h.Write(namespace[:])
	h.Write([]byte(scope + "/" + ownerUID)) // a scope has no slash, so no two pairs give the same text
	var u UUID
	copy(u[:], h.Sum(nil))
	u[6] = u[6]&0x0f | 0x50
	u[8] = u[8]&0x3f | 0x80
	return u
}

// String returns the UUID in the usual lower-case form with dashes.
func (u UUID) String() string {
	s := hex.EncodeToString(u[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

// IsZero reports whether all bytes are zero.
func (u UUID) IsZero() bool { return u == UUID{} }

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// ParseUUID reads the form that String writes, and no other. The error is of class Permanent, ErrInvalidSpec.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if !uuidForm.MatchString(s) {
		return u, invalidf("%q is not a UUID of the form 01234567-89ab-cdef-0123-456789abcdef", clip(s))
	}
	if _, err := hex.Decode(u[:], []byte(strings.ReplaceAll(s, "-", ""))); err != nil {
		return u, invalidf("%q is not a UUID: %v", s, err)
	}
	return u, nil
}

// idScheme is the scheme of kvm2's provider IDs.
const idScheme = "kvm2://"

// ID is the parsed form of a provider ID, kvm2://<host>/<uuid>.
type ID struct {
	// Host is the host's name as Config.Host gives it.
	Host string
	// UUID is the machine's UUID.
	UUID UUID
}

// String returns the provider ID.
func (id ID) String() string { return idScheme + url.PathEscape(id.Host) + "/" + id.UUID.String() }

// ParseID reads a provider ID. What is malformed, or another provider's, is an error of class Permanent,
// ErrInvalidSpec: it says nothing about whether a machine exists.
func ParseID(s string) (ID, error) {
	rest, ok := strings.CutPrefix(s, idScheme)
	if !ok {
		return ID{}, invalidf("provider ID %q does not start with %q", clip(s), idScheme)
	}
	host, uuid, ok := strings.Cut(rest, "/")
	if !ok {
		return ID{}, invalidf("provider ID %q has no UUID: want %s<host>/<uuid>", clip(s), idScheme)
	}
	name, err := url.PathUnescape(host)
	if err != nil || url.PathEscape(name) != host || !hostForm.MatchString(name) {
		return ID{}, invalidf("provider ID %q has no valid host: want %s<host>/<uuid>", clip(s), idScheme)
	}
	u, err := ParseUUID(uuid)
	if err != nil {
		return ID{}, fmt.Errorf("provider ID %q: %w", clip(s), err)
	}
	return ID{Host: name, UUID: u}, nil
}

// hostForm is what a host may be called in a provider ID: a host name, an IPv4 or an IPv6 address.
var hostForm = regexp.MustCompile(`^(::)?[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?$`)

// clip shortens foreign text for an error message.
func clip(s string) string { return clipTo(200, s) }

// clipTo cuts no character in two.
func clipTo(most int, s string) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "..."
}
