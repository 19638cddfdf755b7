package sshconfig

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Settings are what a file says about one host. The zero value of a field means
// that it says nothing.
type Settings struct {
	// HostName is the name or address to connect to.
	HostName string
	User     string
	Port     int
	// IdentityFiles are the paths of private keys. NoIdentity says that there is
	// none.
	IdentityFiles []string
	NoIdentity    bool
	// IdentityAgent is the socket of an agent, "SSH_AUTH_SOCK" for the one in that
	// environment variable, or "none".
	IdentityAgent string
	// KnownHostsFiles are paths. NoKnownHosts says that there is none.
	KnownHostsFiles []string
	NoKnownHosts    bool
	// ProxyJump are the hosts to go through, as ParseJumps reads them, or "none".
	ProxyJump string
}

// Error is a fault in a file.
type Error struct {
	// File and Line say where it is.
	File string
	Line int
	// Err says what it is.
	Err error
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err) }

// Unwrap returns what the fault is.
func (e *Error) Unwrap() error { return e.Err }

const (
	maxDepth = 16 // of Include, as in OpenSSH
	maxFile  = 1 << 20
)

// Query is what is asked of a file.
type Query struct {
	// Host is the name as the user gave it, which the patterns are compared with.
	Host string
	// User and Port, if not zero, are given and win over those in the file.
	User string
	Port int
	// DefaultUser is the user if nobody names one.
	DefaultUser string
	// Home is the home directory: of ~ and %d, and ~/.ssh of relative paths.
	Home string
}

// Lookup reads the file at path and returns what it says about a host. The error
// is an *Error for a fault in it or in a file that it includes.
func Lookup(path string, q Query) (Settings, error) {
	r := &reader{query: q}
	if err := r.file(path, 0); err != nil {
		return Settings{}, err
	}
	return r.settings()
}

// reader is one Lookup at work. It collects values as they stand in the file.
type reader struct {
	query Query

	hostName, user, port, agent, jump *value
	keys, knownHosts                  []value
}

// value is a word of a file.
type value struct {
	text string
	file string
	line int
}

func (v value) fault(err error) error { return &Error{File: v.file, Line: v.line, Err: err} }

func (r *reader) file(path string, depth int) error {
	data, err := readBounded(path)
	if err != nil {
		return err
	}
	applies := true
	number := 0
	for text := range strings.Lines(data) {
		number++
		l, err := parseLine(text)
		if err == nil {
			l.file, l.number = path, number
			applies, err = r.line(l, applies, depth)
		}
		if _, placed := errors.AsType[*Error](err); err != nil && !placed {
			err = &Error{File: path, Line: number, Err: err}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// line takes one line, and returns whether those that follow are about the host.
func (r *reader) line(l line, applies bool, depth int) (bool, error) {
	switch {
	case l.keyword == "host":
		return matches(l.args, r.query.Host), nil
	case l.keyword == "match":
		return true, matchAll(l.args)
	case l.keyword == "" || !applies:
		return applies, nil
	case l.keyword == "include":
		return applies, r.include(l.args, depth)
	}
	return applies, r.set(l)
}

func readBounded(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return "", fmt.Errorf("%q is not a configuration file", path)
	}
	data, err := os.ReadFile(path) //nolint:gosec // reading the configured file is the purpose
	return string(data), err
}

// include reads the files that the patterns match, relative ones in ~/.ssh. One
// that matches none is no fault.
func (r *reader) include(patterns []string, depth int) error {
	if depth == maxDepth {
		return errors.New("files include each other too deeply")
	}
	for _, pattern := range patterns {
		pattern = r.absolute(pattern)
		files, err := filepath.Glob(pattern)
		if err != nil {
			return fmt.Errorf("pattern %q: %w", pattern, err)
		}
		for _, file := range files {
			if err := r.file(file, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// line is a line of a file: a keyword in lower case, empty where there is nothing,
// and its arguments.
type line struct {
	file    string
	number  int
	keyword string
	args    []string
}

// parseLine takes a line apart. Keyword and arguments are separated by white space
// or an equals sign.
func parseLine(text string) (line, error) {
	text = strings.TrimSpace(text)
	if text == "" || text[0] == '#' {
		return line{}, nil
	}
	end := strings.IndexAny(text, " \t=")
	if end < 0 {
		return line{}, fmt.Errorf("%q has no value", text)
	}
	rest := strings.TrimLeft(text[end:], " \t")
	args, err := words(strings.TrimPrefix(rest, "="))
	if err == nil && len(args) == 0 {
		err = fmt.Errorf("%q has no value", text[:end])
	}
	return line{keyword: strings.ToLower(text[:end]), args: args}, err
}

// words splits at white space outside of quotes. A hash at the beginning of a word
// starts a comment.
func words(s string) ([]string, error) {
	var out []string
	for {
		s = strings.TrimLeft(s, " \t")
		if s == "" || s[0] == '#' {
			return out, nil
		}
		var word strings.Builder
		for s != "" && s[0] != ' ' && s[0] != '\t' {
			switch quote := s[0]; {
			case quote == '"' || quote == '\'':
				end := strings.IndexByte(s[1:], quote)
				if end < 0 {
					return nil, errors.New("a quote is not closed")
				}
				word.WriteString(s[1 : 1+end])
				s = s[end+2:]
			case quote == '\\' && len(s) > 1 && strings.IndexByte(`\"' `, s[1]) >= 0:
				word.WriteByte(s[1])
				s = s[2:]
			default:
				word.WriteByte(quote)
				s = s[1:]
			}
		}
		out = append(out, word.String())
	}
}

// matches reports whether a Host line is about host: one of its patterns matches
// and none of those with an exclamation mark does.
func matches(patterns []string, host string) bool {
	found := false
	for _, pattern := range patterns {
		negated, isNegated := strings.CutPrefix(pattern, "!")
		if !wildcard(strings.ToLower(negated), strings.ToLower(host)) {
			continue
		}
		if isNegated {
			return false
		}
		found = true
	}
	return found
}

// wildcard matches a name with a pattern of *, ? and characters.
func wildcard(pattern, name string) bool {
	star, from := -1, 0 // where to go back to
	p, n := 0, 0
	for n < len(name) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, n
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == name[n]):
			p++
			n++
		case star >= 0:
			from++
			p, n = star+1, from
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// matchAll takes "Match all". Whether another Match is about the host cannot be
// told, so what stands below it could be missed.
func matchAll(args []string) error {
	if len(args) == 1 && strings.EqualFold(args[0], "all") {
		return nil
	}
	return errors.New(`of Match only "Match all" is supported; use Host`)
}

// set takes the value of a keyword, unless there is one.
func (r *reader) set(l line) error {
	single := map[string]**value{
		"hostname": &r.hostName, "user": &r.user, "port": &r.port, "identityagent": &r.agent, "proxyjump": &r.jump, "proxycommand": &r.jump,
	}
	if field, ok := single[l.keyword]; ok {
		return first(field, l)
	}
	switch {
	case l.keyword == "identityfile":
		if err := l.one(); err != nil {
			return err
		}
		r.keys = append(r.keys, l.value(0))
		return nil
	case l.keyword == "userknownhostsfile":
		if r.knownHosts == nil {
			for i := range l.args {
				r.knownHosts = append(r.knownHosts, l.value(i))
			}
		}
		return nil
	case ignored[l.keyword], len(l.args) == 1 && strings.EqualFold(l.args[0], harmless[l.keyword]):
		return nil
	}
	return fmt.Errorf("%q is not supported, and to leave it out could make another connection than is meant", l.keyword)
}

// first takes a value unless there is one. ProxyCommand and ProxyJump are rivals:
// the first of the two counts.
func first(field **value, l line) error {
	if *field != nil {
		return nil
	}
	if l.keyword == "proxycommand" && !strings.EqualFold(l.args[0], none) {
		return errors.New(`"proxycommand" is not supported; use ProxyJump`)
	}
	if err := l.one(); err != nil {
		return err
	}
	v := l.value(0)
	*field = &v
	return nil
}

func (l line) value(i int) value { return value{l.args[i], l.file, l.number} }

func (l line) one() error {
	if len(l.args) != 1 {
		return fmt.Errorf("%q: want one value", l.keyword)
	}
	return nil
}

const none = "none"

// settings expands what was collected.
func (r *reader) settings() (Settings, error) {
	var s Settings
	t := tokens{'%': "%", 'd': r.query.Home, 'n': r.query.Host, 'h': r.query.Host}
	var err error
	if s.HostName, err = t.expand(r.hostName, "%h"); err != nil {
		return s, err
	}
	if s.HostName != "" {
		t['h'] = s.HostName
	}
	if s.User, err = t.expand(r.user, "%"); err != nil {
		return s, err
	}
	if s.Port, err = portOf(r.port); err != nil {
		return s, err
	}
	t['r'] = cmp.Or(r.query.User, s.User, r.query.DefaultUser)
	t['p'] = strconv.Itoa(cmp.Or(r.query.Port, s.Port, 22))
	if r.jump != nil {
		s.ProxyJump = r.jump.text
		if _, err := ParseJumps(r.jump.text); err != nil {
			return s, r.jump.fault(err)
		}
	}
	return s, r.paths(t, &s)
}

// paths expands those values that are paths.
func (r *reader) paths(t tokens, s *Settings) (err error) {
	if r.agent != nil {
		s.IdentityAgent = r.agent.text
		if s.IdentityAgent != none && s.IdentityAgent != "SSH_AUTH_SOCK" {
			if s.IdentityAgent, err = r.path(t, *r.agent); err != nil {
				return err
			}
		}
	}
	if s.IdentityFiles, s.NoIdentity, err = r.pathList(t, r.keys); err != nil {
		return err
	}
	s.KnownHostsFiles, s.NoKnownHosts, err = r.pathList(t, r.knownHosts)
	return err
}

// pathList expands paths, and reports whether "none" says that there is none.
func (r *reader) pathList(t tokens, values []value) (paths []string, no bool, _ error) {
	for _, v := range values {
		if strings.EqualFold(v.text, none) {
			no = true
			continue
		}
		path, err := r.path(t, v)
		if err != nil {
			return nil, false, err
		}
		paths = append(paths, path)
	}
	return paths, no && len(paths) == 0, nil
}

// path expands a path.
func (r *reader) path(t tokens, v value) (string, error) {
	text, err := t.expand(&v, "%dhnpr")
	if err != nil {
		return "", err
	}
	if rest, ok := strings.CutPrefix(text, "~/"); ok {
		return filepath.Join(r.query.Home, rest), nil
	}
	if !filepath.IsAbs(text) {
		return "", v.fault(fmt.Errorf("path %q: want an absolute one, or one that begins with ~/", text))
	}
	return text, nil
}

// absolute is a path of Include.
func (r *reader) absolute(path string) string {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		return filepath.Join(r.query.Home, rest)
	}
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(r.query.Home, ".ssh", path)
}

// tokens are what stands behind a percent sign, and for what.
type tokens map[byte]string

// expand replaces tokens, of which those in allowed may occur. Environment variables
// are refused: what they hold is not the business of a file that others write.
func (t tokens) expand(v *value, allowed string) (string, error) {
	if v == nil {
		return "", nil
	}
	if strings.Contains(v.text, "${") {
		return "", v.fault(fmt.Errorf("%q: environment variables are not supported", v.text))
	}
	var out strings.Builder
	for i := 0; i < len(v.text); i++ {
		c := v.text[i]
		if c != '%' {
			out.WriteByte(c)
			continue
		}
		i++
		if i == len(v.text) || (v.text[i] != '%' && strings.IndexByte(allowed, v.text[i]) < 0) {
			return "", v.fault(fmt.Errorf("%q: a token that is not supported here", v.text))
		}
		out.WriteString(t[v.text[i]])
	}
	return out.String(), nil
}

func portOf(v *value) (int, error) {
	if v == nil {
		return 0, nil
	}
	n, err := parsePort(v.text)
	if err != nil {
		return 0, v.fault(err)
	}
	return n, nil
}

func parsePort(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q: want 1 to 65535", text)
	}
	return int(n), nil
}
