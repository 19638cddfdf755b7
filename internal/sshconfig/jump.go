package sshconfig

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
)

// Jump is a server to go through, or an alias for one.
type Jump struct {
	User string // empty if none is named
	Host string
	Port int // 0 if none is named
}

const (
	maxJumps     = 8
	maxJumpsText = 1024
)

var (
	userForm = regexp.MustCompile(`^[A-Za-z0-9_.\\+][A-Za-z0-9_.\\+-]*$`)
	hostForm = regexp.MustCompile(`^[A-Za-z0-9_:]([A-Za-z0-9._:%-]*[A-Za-z0-9_:.])?$`)
)

// ParseJumps reads the value of ProxyJump: [USER@]HOST[:PORT], several separated by
// commas, the nearest first; an IPv6 address with a port is in brackets. For "none"
// it returns none.
func ParseJumps(text string) ([]Jump, error) {
	if strings.EqualFold(text, none) {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	if len(text) > maxJumpsText || len(parts) > maxJumps {
		return nil, fmt.Errorf("%d jump hosts in %d bytes: want at most %d in %d", len(parts), len(text), maxJumps, maxJumpsText)
	}
	var jumps []Jump
	for _, part := range parts {
		jump, err := parseJump(strings.Trim(part, " "))
		if err != nil {
			return nil, err
		}
		jumps = append(jumps, jump)
	}
	return jumps, nil
}

func parseJump(text string) (Jump, error) {
	var j Jump
	var err error
	if at := strings.LastIndexByte(text, '@'); at >= 0 {
		j.User = text[:at]
		if !userForm.MatchString(j.User) { // it could be a password, so it is not shown
			return Jump{}, errors.New("a jump host's user: want letters, digits and _.+-")
		}
		text = text[at+1:]
	}
	j.Host = strings.Trim(text, "[]")
	if strings.HasPrefix(text, "[") && !strings.HasSuffix(text, "]") || strings.Count(text, ":") == 1 {
		var port string
		if j.Host, port, err = net.SplitHostPort(text); err != nil {
			return Jump{}, fmt.Errorf("jump host %q: want [USER@]HOST[:PORT]", text)
		}
		if j.Port, err = parsePort(port); err != nil {
			return Jump{}, fmt.Errorf("jump host %q: %w", text, err)
		}
	}
	if !hostForm.MatchString(j.Host) {
		return Jump{}, fmt.Errorf("jump host %q: want [USER@]HOST[:PORT]", text)
	}
	return j, nil
}
