package sshdial

import (
	"context"
	"errors"
	"net"

	"golang.org/x/crypto/ssh"
)

// The steps of a dial, as they appear in a DialError.
const (
	stepMaterials = "reading keys"
	stepConnect   = "TCP connection"
	stepExchange  = "key exchange"
	stepAuth      = "authentication"
	stepTunnel    = "connection to the next server"
	stepOpen      = "opening the socket"
)

// journey is one Dial at work. It knows how far it came.
type journey struct {
	cfg  Config
	at   Hop
	step string
}

// leg is one server of a journey, with what is needed to log in.
type leg struct {
	Hop
	hosts *hostKeys
	creds *credentials
}

// run does the work of Dial.
func (j *journey) run(ctx context.Context) (net.Conn, error) {
	legs, err := j.prepare(ctx)
	defer func() {
		for _, l := range legs {
			l.creds.close()
		}
	}()
	if err != nil {
		return nil, err
	}
	j.at, j.step = legs[0].Hop, stepConnect
	tcp, err := j.cfg.DialTCP(ctx, "tcp", j.at.addr())
	if err != nil {
		return nil, err
	}
	// Nothing in x/crypto/ssh takes a context: closing the connection under it is
	// the way out, at every step.
	stop := context.AfterFunc(ctx, func() { _ = tcp.Close() })
	route := &route{tcp: tcp}
	channel, err := j.travel(route, legs)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		stop()
		_ = tcp.Close()
		return nil, err
	}
	return newConn(channel, route, j.cfg), nil
}

// prepare reads what is needed to log in everywhere: a file that cannot be used
// shows before anything is sent. What it returns is to be closed, also when it
// fails.
func (j *journey) prepare(ctx context.Context) ([]leg, error) {
	keys := &keyring{cfg: j.cfg}
	var legs []leg
	for _, hop := range append(j.cfg.Jumps, j.cfg.Hop) {
		j.at = hop
		hosts, err := loadHostKeys(hop.KnownHostsFiles, hop.Host, hop.Port)
		if err != nil {
			return legs, err
		}
		creds, err := keys.credentials(ctx, hop)
		if err != nil {
			return legs, err
		}
		legs = append(legs, leg{hop, hosts, creds})
	}
	return legs, nil
}

// travel logs in to one server after the other and opens the channel on the last.
func (j *journey) travel(r *route, legs []leg) (net.Conn, error) {
	under := r.tcp
	for i, l := range legs {
		if i > 0 {
			var err error
			if under, err = j.tunnel(r.client, l.Hop); err != nil {
				return nil, err
			}
		}
		j.at, j.step = l.Hop, stepExchange
		r.metered = &meteredConn{Conn: under}
		client, err := handshake(r.metered, l)
		if err != nil {
			j.step = l.creds.step()
			return nil, err
		}
		r.client = client
	}
	j.step = stepOpen
	return j.open(r.client)
}

// tunnel opens a TCP connection from the server where the journey is to the next.
func (j *journey) tunnel(client *ssh.Client, next Hop) (net.Conn, error) {
	j.step = stepTunnel
	conn, err := client.Dial("tcp", next.addr())
	if refused, ok := errors.AsType[*ssh.OpenChannelError](err); ok {
		return nil, &TunnelError{Jump: j.at.addr(), Addr: next.addr(), Reason: refused.Reason, Message: refused.Message}
	}
	return conn, err
}

// handshake makes an SSH client of conn, which it closes when it fails.
func handshake(conn net.Conn, l leg) (*ssh.Client, error) {
	config := &ssh.ClientConfig{
		User:              l.User,
		HostKeyCallback:   l.hosts.verify,
		HostKeyAlgorithms: l.hosts.algorithms,
		AuthCallback:      l.creds.next,
	}
	under, channels, requests, err := ssh.NewClientConn(conn, l.addr(), config)
	if err != nil {
		return nil, l.hosts.explainNegotiation(l.creds.explain(l.Hop, err))
	}
	return ssh.NewClient(under, channels, requests), nil
}

// open opens a way to the daemon on the host.
func (j *journey) open(client *ssh.Client) (net.Conn, error) {
	var refusals []error
	if len(j.cfg.Sockets) > 0 {
		conn, err := openFirst(client, j.cfg.Sockets)
		refused, ok := errors.AsType[*ForwardError](err)
		// A server that is short of resources says so of anything.
		if !ok || refused.Reason == ssh.ResourceShortage {
			return conn, err
		}
		refusals = append(refusals, refused)
	}
	for _, command := range j.cfg.Commands {
		conn, err := startCommand(client, command)
		refused, ok := errors.AsType[*CommandError](err)
		if !ok {
			return conn, err
		}
		refusals = append(refusals, refused)
	}
	if len(refusals) == 1 {
		return nil, refusals[0]
	}
	return nil, &NoWayError{Errs: refusals}
}

// openFirst opens a channel to the first socket that the server connects to. If
// it refuses all of them, the last refusal is reported.
func openFirst(client *ssh.Client, sockets []string) (net.Conn, error) {
	var refused *ssh.OpenChannelError
	for _, socket := range sockets {
		conn, err := client.Dial("unix", socket)
		if err == nil {
			return conn, nil
		}
		if !errors.As(err, &refused) {
			return nil, err
		}
	}
	return nil, &ForwardError{Sockets: sockets, Reason: refused.Reason, Message: refused.Message}
}

// describe gives err its final type.
func (j *journey) describe(ctx context.Context, err error) error {
	if hostKey, ok := errors.AsType[*HostKeyError](err); ok {
		return hostKey
	}
	if ctx.Err() != nil {
		// What the closed connections led to says nothing.
		return &DialError{User: j.at.User, Addr: j.at.addr(), Step: j.step, Err: ctx.Err()}
	}
	var (
		material *MaterialError
		auth     *AuthError
		tunnel   *TunnelError
		noWay    *NoWayError
		forward  *ForwardError
		command  *CommandError
	)
	switch {
	case errors.As(err, &material):
		return material
	case errors.As(err, &auth):
		return auth
	case errors.As(err, &tunnel):
		return tunnel
	case errors.As(err, &noWay):
		return noWay
	case errors.As(err, &forward):
		return forward
	case errors.As(err, &command):
		return command
	}
	return &DialError{User: j.at.User, Addr: j.at.addr(), Step: j.step, Err: err}
}

// route is what a connection rests on: a TCP connection, and SSH clients on it, each
// in a channel of the one before. When the TCP connection ends, all of them do.
type route struct {
	tcp     net.Conn
	client  *ssh.Client  // the last
	metered *meteredConn // what it runs over
}
