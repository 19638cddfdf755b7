package sshconfig

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// lookup writes a file and looks a host up in it.
func lookup(t testing.TB, content string, q Query) (Settings, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if q.Home == "" {
		q.Home = "/home/op"
	}
	return Lookup(path, q)
}

func TestLookup_Accepts(t *testing.T) {
	query := Query{Host: "kvm1"}
	tests := []struct {
		name, content string
		query         Query
		want          Settings
		why           string
	}{
		{name: "empty"},
		{
			name: "alias", query: query,
			content: "# comment\n\nHost kvm1\n  HostName 192.0.2.7\n\tUser op\n  Port 2222\n  IdentityFile ~/.ssh/id\n  UserKnownHostsFile /etc/hosts1 /etc/hosts2\n  ProxyJump bastion\n",
			want: Settings{
				HostName: "192.0.2.7", User: "op", Port: 2222, IdentityFiles: []string{"/home/op/.ssh/id"},
				KnownHostsFiles: []string{"/etc/hosts1", "/etc/hosts2"}, ProxyJump: "bastion",
			},
		},
		{name: "spellings", query: query, content: "HOST=kvm1\nhostname = a\nuser\t\"op\"\r\nport=22 # comment", want: Settings{HostName: "a", User: "op", Port: 22}},
		{name: "others", query: query, content: "Host kvm2\n User op\n"},
		{name: "before the first Host", query: query, content: "User op\nHost kvm2\nUser other\n", want: Settings{User: "op"}},
		{name: "first value wins", query: query, content: "Host kvm*\n User one\nHost *\n User two\n Port 23\n", want: Settings{User: "one", Port: 23}},
		{name: "identity files add up", query: query, content: "Host kvm1\nIdentityFile /a\nHost *\nIdentityFile /b\n", want: Settings{IdentityFiles: []string{"/a", "/b"}}},
		{name: "no identity", query: query, content: "IdentityFile none\nIdentityAgent none\n", want: Settings{NoIdentity: true, IdentityAgent: "none"}},
		{name: "agent", query: query, content: "IdentityAgent ~/agent\n", want: Settings{IdentityAgent: "/home/op/agent"}},
		{name: "agent of the environment", query: query, content: "IdentityAgent SSH_AUTH_SOCK\n", want: Settings{IdentityAgent: "SSH_AUTH_SOCK"}},
		{name: "no known hosts", query: query, content: "UserKnownHostsFile none\n", want: Settings{NoKnownHosts: true}},
		{name: "negation", query: query, content: "Host * !kvm1\n User op\n", why: "one that is excluded is not matched by any other pattern"},
		{name: "negation of another", query: query, content: "Host !kvm2 kvm?\n User op\n", want: Settings{User: "op"}},
		{name: "negation alone", query: query, content: "Host !kvm2\n User op\n", why: "it matches nothing (ssh_config(5), PATTERNS)"},
		{name: "case", query: Query{Host: "KVM1"}, content: "Host kvm1\n User op\n", want: Settings{User: "op"}},
		{name: "Match all", query: query, content: "Host kvm2\nMatch all\n User op\n", want: Settings{User: "op"}},
		{
			name: "tokens", query: Query{Host: "kvm1", DefaultUser: "root"},
			content: "HostName %h.example\nIdentityFile %d/%r@%h:%p-%n%%\n",
			want:    Settings{HostName: "kvm1.example", IdentityFiles: []string{"/home/op/root@kvm1.example:22-kvm1%"}},
		},
		{
			name: "tokens of what is given", query: Query{Host: "kvm1", User: "me", Port: 7, DefaultUser: "root"},
			content: "User op\nPort 9\nIdentityFile /%r-%p\n", want: Settings{User: "op", Port: 9, IdentityFiles: []string{"/me-7"}},
		},
		{
			name: "quotes", query: query, content: `IdentityFile "/a b/#id"` + "\nUserKnownHostsFile '/c d' /e\\ f\n",
			want: Settings{IdentityFiles: []string{"/a b/#id"}, KnownHostsFiles: []string{"/c d", "/e f"}},
		},
		{name: "weaker checks are ignored", query: query, content: "StrictHostKeyChecking no\nCheckHostIP no\nUser op\n", want: Settings{User: "op"}},
		{name: "unsupported for another host", query: query, content: "Host kvm2\nProxyCommand nc %h %p\nCiphers 3des-cbc\nNonsense\ty\n"},
		{name: "ProxyJump before ProxyCommand", query: query, content: "ProxyJump b\nProxyCommand nc %h %p\n", want: Settings{ProxyJump: "b"}},
		{name: "no ProxyCommand before ProxyJump", query: query, content: "ProxyCommand none\nProxyJump b\n", want: Settings{ProxyJump: "none"}},
		{name: "harmless value", query: query, content: "AddressFamily any\nCertificateFile none\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := lookup(t, tt.content, tt.query)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("settings differ (-want +got):\n%s%s", diff, tt.why)
			}
		})
	}
}

func TestLookup_RefusesWithFileAndLine(t *testing.T) {
	tests := []struct{ name, content, says, why string }{
		{"ProxyCommand", "User op\nProxyCommand nc %h %p\n", `2: "proxycommand"`, "the way would be another"},
		{"Match", "\n\nMatch host kvm1\n", "3: of Match", "what stands below could be missed"},
		{"ciphers", "Ciphers aes256-gcm@openssh.com\n", `1: "ciphers"`, ""},
		{"host key algorithms", "HostKeyAlgorithms +ssh-rsa\n", `"hostkeyalgorithms"`, ""},
		{"alias for known_hosts", "HostKeyAlias other\n", `"hostkeyalias"`, "another key would be looked up"},
		{"revoked keys", "RevokedHostKeys /etc/revoked\n", `"revokedhostkeys"`, "they would be trusted"},
		{"certificate", "CertificateFile /c\n", `"certificatefile"`, ""},
		{"bind address", "BindAddress 192.0.2.1\n", `"bindaddress"`, ""},
		{"address family", "AddressFamily inet6\n", `"addressfamily"`, ""},
		{"unknown keyword", "Usr op\n", `"usr"`, "OpenSSH refuses it too"},
		{"no value", "User\n", "has no value", ""},
		{"no value but a comment", "User # op\n", "has no value", ""},
		{"two values", "User a b\n", "one value", ""},
		{"port", "Port 0\n", "port", ""},
		{"port that is none", "Port ssh\n", "port", ""},
		{"quote", "User \"op\n", "quote", ""},
		{"token", "IdentityFile /%C\n", "token", ""},
		{"token at the end", "HostName x%\n", "token", ""},
		{"token in the user", "User %r\n", "token", "it would stand for itself"},
		{"environment", "IdentityFile ${HOME}/id\n", "environment", ""},
		{"relative key", "IdentityFile id\n", "absolute", "a controller has no working directory to speak of"},
		{"home of another", "IdentityFile ~op/id\n", "absolute", ""},
		{"jump host", "ProxyJump a:b\n", "1: ", ""},
		{"include", "Include /[\n", "pattern", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := lookup(t, tt.content, Query{Host: "kvm1"})
			fault, ok := errors.AsType[*Error](err)
			if !ok || !strings.Contains(err.Error(), tt.says) || filepath.Base(fault.File) != "config" || fault.Line == 0 {
				t.Errorf("error %v, want an *Error that says %q; %s", err, tt.says, tt.why)
			}
		})
	}
}

func TestLookup_FileThatCannotBeRead(t *testing.T) {
	if _, err := Lookup(filepath.Join(t.TempDir(), "absent"), Query{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	if _, err := Lookup(t.TempDir(), Query{}); err == nil {
		t.Error("a directory was read")
	}
}

func TestLookup_Include(t *testing.T) {
	home := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(home, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write(".ssh/conf.d/1", "Host kvm2\n User other\nHost kvm1\n User op\n")
	write(".ssh/conf.d/2", "Port 2222\n")
	write("tilde", "IdentityFile /id\n")
	loop := write("loop", "Include "+filepath.Join(home, "loop")+"\n")
	bad := write("bad", "User op\nProxyCommand x\n")
	q := Query{Host: "kvm1", Home: home}

	got, err := lookup(t, "Include conf.d/* ~/tilde /absent/*\nHost kvm1\nHostName h\n", q)
	want := Settings{HostName: "h", User: "op", Port: 2222, IdentityFiles: []string{"/id"}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("error %v; settings differ (-want +got):\n%s", err, diff)
	}
	got, err = lookup(t, "Host kvm2\nInclude conf.d/*\nHost kvm1\nHostName h\n", q)
	if diff := cmp.Diff(Settings{HostName: "h"}, got); err != nil || diff != "" {
		t.Errorf("included for another host: error %v; settings differ (-want +got):\n%s", err, diff)
	}
	_, err = lookup(t, "Include "+loop+"\n", q)
	if !is(err) || !strings.Contains(err.Error(), "too deeply") {
		t.Errorf("loop: %v", err)
	}
	_, err = lookup(t, "Include "+bad+"\n", q)
	if err == nil || !strings.HasPrefix(err.Error(), bad+":2: ") {
		t.Errorf("fault in an included file: %v, want it to name file and line", err)
	}
}

func is(err error) bool {
	_, ok := errors.AsType[*Error](err)
	return ok
}

func TestParseJumps(t *testing.T) {
	tests := []struct {
		text string
		want []Jump
	}{
		{"none", nil},
		{"bastion", []Jump{{Host: "bastion"}}},
		{"op@bastion:2222", []Jump{{User: "op", Host: "bastion", Port: 2222}}},
		{"a, op@b,c:1", []Jump{{Host: "a"}, {User: "op", Host: "b"}, {Host: "c", Port: 1}}},
		{"op@[2001:db8::1]:22", []Jump{{User: "op", Host: "2001:db8::1", Port: 22}}},
		{"[2001:db8::1]", []Jump{{Host: "2001:db8::1"}}},
		{"2001:db8::1", []Jump{{Host: "2001:db8::1"}}},
	}
	for _, tt := range tests {
		got, err := ParseJumps(tt.text)
		if diff := cmp.Diff(tt.want, got); err != nil || diff != "" {
			t.Errorf("ParseJumps(%q): error %v, differs (-want +got):\n%s", tt.text, err, diff)
		}
	}
	for _, text := range []string{
		"", ",", "a,", "@a", "a:", "a:0", "a:x", "a:65536", "a b", "-oProxyCommand=x", "a;b", "op@", "ssh://a", "op:hunter2@a",
		"[a", "a]:1x", "1,2,3,4,5,6,7,8,9", "a\n", strings.Repeat("a", 1025),
	} {
		if got, err := ParseJumps(text); err == nil {
			t.Errorf("ParseJumps(%q) = %+v, want an error", text, got)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("ParseJumps(%q): the error tells what may be a password: %v", text, err)
		}
	}
}

func FuzzLookup(f *testing.F) {
	f.Add("Host kvm* !kvm2\n HostName %h.example\n IdentityFile \"~/.ssh/%r\"\n", "kvm1")
	f.Add("Match all\nProxyJump a,b@[::1]:22\nUserKnownHostsFile none\n", "h")
	f.Add("Port=22 # x\nUser 'a", "h")
	f.Add("Host *a*b*c*\nUser op\n", "aabbcc")
	f.Fuzz(func(t *testing.T, content, host string) {
		if strings.Contains(strings.ToLower(content), "include") {
			return // it would read other files
		}
		s, err := lookup(t, content, Query{Host: host})
		if err != nil {
			return
		}
		for _, path := range append(s.IdentityFiles, s.KnownHostsFiles...) {
			if !filepath.IsAbs(path) {
				t.Errorf("relative path %q", path)
			}
		}
		if s.Port < 0 || s.Port > 65535 {
			t.Errorf("port %d", s.Port)
		}
		if s.ProxyJump != "" {
			if _, err := ParseJumps(s.ProxyJump); err != nil {
				t.Errorf("jump hosts %q: %v", s.ProxyJump, err)
			}
		}
	})
}
