// Package sshconfig reads what an OpenSSH client configuration file (ssh_config(5))
// says about a host.
//
// It knows the part of the format that says where a host is and who logs in with
// what: Host with patterns and negation, Match all, Include, HostName, User, Port,
// IdentityFile, IdentityAgent, UserKnownHostsFile and ProxyJump, the tokens %%, %d,
// %h, %n, %p and %r, and ~ for the home directory. As in OpenSSH the first value
// wins, and IdentityFile collects.
//
// Keywords about which a library has nothing to decide are ignored (see ignored):
// what a terminal, a forwarded port or a shared connection needs. So are those that
// would weaken the check of host keys, StrictHostKeyChecking among them. Everything
// else that applies to the host is an error that names file and line: a ProxyCommand
// or a list of ciphers that was silently left out would make another connection than
// the one that its author meant.
package sshconfig
