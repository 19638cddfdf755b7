// Package sshdial opens a connection to a unix socket of a remote host through
// SSH, as one net.Conn that owns everything under it. The way is stream-local
// forwarding (direct-streamlocal@openssh.com), or a command on the host that
// connects to the socket; jump hosts may lie before it.
//
// The host key of every server is always verified against known_hosts files, before
// a credential is offered; there is no way to turn that off and no trust on first
// use. Authentication is by public
// key only. Keys, certificates, known_hosts and the agent are read again at
// every [Dial], so a rotation needs no restart.
//
// Failures have types that say what has to change for the next attempt to
// succeed: [MaterialError] (a local file or agent), [HostKeyError],
// [AuthError], [TunnelError] (a jump host will not connect), [ForwardError] (the
// server will not open the socket), [CommandError], [NoWayError] for several of
// these, and [DialError] for the network and everything else on the way. A connection that
// dies of silence later on reports a [KeepaliveError].
package sshdial
