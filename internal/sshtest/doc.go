// Package sshtest runs an SSH server inside a test process: one that forwards to
// unix sockets as OpenSSH does, and one that misbehaves in chosen ways. It also
// makes the keys and certificates for both sides.
package sshtest
