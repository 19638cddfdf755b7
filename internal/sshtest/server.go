package sshtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/crypto/ssh"
)

// Behaviour is what a server does to its clients.
type Behaviour int

const (
	// Serve serves them.
	Serve Behaviour = iota
	// SilentAfterAccept accepts the connection and says nothing.
	SilentAfterAccept
	// SilentAfterVersion sends its version and then nothing.
	SilentAfterVersion
	// DropAfterVersion sends its version and closes the connection.
	DropAfterVersion
	// SilentOnOpen lets clients in and does not answer the request to open a
	// channel.
	SilentOnOpen
	// DropOnOpen lets clients in and closes the connection when they ask to open a
	// channel.
	DropOnOpen
	// IgnoreRequests serves them, but answers no keepalive.
	IgnoreRequests
)

// Config is the configuration of a Server. It must not be changed while the
// server runs.
type Config struct {
	// HostKeys are the keys or certificates that the server shows.
	HostKeys []ssh.Signer
	// User is the only account, empty for any.
	User string
	// AuthorizedKeys are the keys that may log in.
	AuthorizedKeys []ssh.PublicKey
	// UserAuthorities sign certificates that may log in.
	UserAuthorities []ssh.PublicKey
	// Password, if not empty, is the only way to log in.
	Password string
	// MaxAuthTries is how often a client may fail; zero means 6. As many keys may
	// be asked about beforehand.
	MaxAuthTries int
	// Behaviour is what the server does to its clients.
	Behaviour Behaviour
	// Reject, if not nil, is the answer to the request to open a socket, by path.
	// Where it returns nil, the socket is opened.
	Reject func(path string) *ssh.OpenChannelError
	// Connect opens a socket; nil means that of the file system.
	Connect func(path string) (net.Conn, error)
	// ConnectTCP opens a TCP connection, as a jump host does; nil means that the
	// server forbids it.
	ConnectTCP func(addr string) (net.Conn, error)
	// Exec runs a command and returns its exit status; nil means that the server
	// knows no sessions. It must return when its input ends.
	Exec func(command string, in io.Reader, out, stderr io.Writer) int
}

// Server is an SSH server for tests. It is safe for concurrent use.
type Server struct {
	config    Config
	ssh       *ssh.ServerConfig
	listener  net.Listener // nil if there is none
	serving   sync.WaitGroup
	keepalive atomic.Int64
	auths     atomic.Int64

	closeOnce sync.Once
	mu        sync.Mutex
	conns     map[*serverConn]struct{}
	closed    bool
}

// New returns a server that listens nowhere: connections are given to it with
// [Server.Dial].
func New(config Config) *Server {
	if config.Connect == nil {
		config.Connect = func(path string) (net.Conn, error) { return net.Dial("unix", path) }
	}
	s := &Server{config: config, conns: make(map[*serverConn]struct{})}
	s.ssh = &ssh.ServerConfig{MaxAuthTries: config.MaxAuthTries}
	s.ssh.AuthLogCallback = func(ssh.ConnMetadata, string, error) { s.auths.Add(1) }
	if config.Password != "" {
		s.ssh.PasswordCallback = func(_ ssh.ConnMetadata, password []byte) (*ssh.Permissions, error) {
			if string(password) != config.Password {
				return nil, errors.New("wrong password")
			}
			return nil, nil
		}
	} else {
		s.ssh.PublicKeyCallback = s.authorize
	}
	for _, key := range config.HostKeys {
		s.ssh.AddHostKey(key)
	}
	return s
}

// Start returns a server that listens on a port of the loopback interface.
func Start(config Config) (*Server, error) {
	s := New(config)
	var err error
	s.listener, err = net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s.serving.Go(s.accept)
	return s, nil
}

// Host returns the address that the server listens on.
func (s *Server) Host() string { return "127.0.0.1" }

// Port returns the port that the server listens on.
func (s *Server) Port() int { return s.listener.Addr().(*net.TCPAddr).Port }

// Addr returns both.
func (s *Server) Addr() string { return net.JoinHostPort(s.Host(), strconv.Itoa(s.Port())) }

// Dial connects to the server through memory, whatever the address.
func (s *Server) Dial(context.Context, string, string) (net.Conn, error) {
	near, far := Pipe()
	s.start(far)
	return near, nil
}

// Conns returns the number of open connections.
func (s *Server) Conns() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Keepalives returns the number of keepalive requests received.
func (s *Server) Keepalives() int { return int(s.keepalive.Load()) }

// Auths returns the number of attempts to authenticate, of any method.
func (s *Server) Auths() int { return int(s.auths.Load()) }

// Freeze makes the server neither read nor write any more on the connections
// that are open now, without closing them.
func (s *Server) Freeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.conns {
		conn.freeze()
	}
}

// Close closes the listener and all connections, and waits for them. Calls after
// the first do nothing.
func (s *Server) Close() error {
	var err error
	s.closeOnce.Do(func() { err = s.close() })
	return err
}

func (s *Server) close() error {
	s.mu.Lock()
	s.closed = true
	for conn := range s.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()

	var err error
	if s.listener != nil {
		err = s.listener.Close()
	}
	s.serving.Wait()
	return err
}

func (s *Server) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.start(conn)
	}
}

// start serves a connection in the background.
func (s *Server) start(conn net.Conn) {
	guarded := &serverConn{Conn: conn, frozen: make(chan struct{}), gone: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = guarded.Close()
		return
	}
	s.conns[guarded] = struct{}{}
	s.serving.Go(func() {
		s.serve(guarded)
		_ = guarded.Close()
		s.mu.Lock()
		delete(s.conns, guarded)
		s.mu.Unlock()
	})
}

func (s *Server) serve(conn *serverConn) {
	switch s.config.Behaviour {
	case SilentAfterAccept:
		drain(conn)
	case SilentAfterVersion:
		_, _ = io.WriteString(conn, "SSH-2.0-silent\r\n")
		drain(conn)
	case DropAfterVersion:
		_, _ = io.WriteString(conn, "SSH-2.0-dropping\r\n")
		_, _ = conn.Read(make([]byte, 64))
	default:
		s.serveSSH(conn)
	}
}

// drain reads until the connection ends.
func drain(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

func (s *Server) serveSSH(conn net.Conn) {
	client, channels, requests, err := ssh.NewServerConn(conn, s.ssh)
	if err != nil {
		return
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer func() { _ = client.Close() }()
	work.Go(func() {
		for request := range requests {
			if request.Type == "keepalive@openssh.com" {
				s.keepalive.Add(1)
			}
			if s.config.Behaviour != IgnoreRequests {
				_ = request.Reply(false, nil)
			}
		}
	})
	for channel := range channels {
		switch s.config.Behaviour {
		case SilentOnOpen:
			continue
		case DropOnOpen:
			return
		default:
			work.Go(func() { s.open(channel) })
		}
	}
}

// authorize decides about a public key or a certificate.
func (s *Server) authorize(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
	if s.config.User != "" && meta.User() != s.config.User {
		return nil, errors.New("unknown user")
	}
	checker := ssh.CertChecker{
		IsUserAuthority: func(authority ssh.PublicKey) bool { return contains(s.config.UserAuthorities, authority) },
		UserKeyFallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if !contains(s.config.AuthorizedKeys, key) {
				return nil, errors.New("unknown key")
			}
			return nil, nil
		},
	}
	return checker.Authenticate(meta, key)
}

func contains(keys []ssh.PublicKey, key ssh.PublicKey) bool {
	return slices.ContainsFunc(keys, func(k ssh.PublicKey) bool { return bytes.Equal(k.Marshal(), key.Marshal()) })
}

// open serves a request for a channel.
func (s *Server) open(request ssh.NewChannel) {
	switch request.ChannelType() {
	case "direct-streamlocal@openssh.com":
		var target struct {
			Path      string
			Reserved  string
			Reserved2 uint32
		}
		if err := ssh.Unmarshal(request.ExtraData(), &target); err != nil {
			_ = request.Reject(ssh.ConnectionFailed, "malformed request")
			return
		}
		s.forward(request, target.Path, s.config.Connect)
	case "direct-tcpip":
		var target struct {
			Host     string
			Port     uint32
			FromHost string
			FromPort uint32
		}
		if err := ssh.Unmarshal(request.ExtraData(), &target); err != nil {
			_ = request.Reject(ssh.ConnectionFailed, "malformed request")
			return
		}
		if s.config.ConnectTCP == nil {
			_ = request.Reject(ssh.Prohibited, "administratively prohibited")
			return
		}
		s.forward(request, net.JoinHostPort(target.Host, strconv.Itoa(int(target.Port))), s.config.ConnectTCP)
	case "session":
		s.session(request)
	default:
		_ = request.Reject(ssh.UnknownChannelType, "unknown channel type")
	}
}

// forward connects a channel to the target that it asks for.
func (s *Server) forward(request ssh.NewChannel, target string, connect func(string) (net.Conn, error)) {
	if s.config.Reject != nil {
		if reject := s.config.Reject(target); reject != nil {
			_ = request.Reject(reject.Reason, reject.Message)
			return
		}
	}
	socket, err := connect(target)
	if err != nil {
		_ = request.Reject(ssh.ConnectionFailed, "open failed") // as OpenSSH, whatever the cause
		return
	}
	defer func() { _ = socket.Close() }()
	channel, requests, err := request.Accept()
	if err != nil {
		return
	}
	defer func() { _ = channel.Close() }()
	go ssh.DiscardRequests(requests)

	var up sync.WaitGroup
	up.Go(func() {
		_, _ = io.Copy(socket, channel)
		closeWrite(socket)
	})
	_, _ = io.Copy(channel, socket)
	_ = channel.Close()
	_ = socket.Close()
	up.Wait()
}

// session runs one command.
func (s *Server) session(request ssh.NewChannel) {
	if s.config.Exec == nil {
		_ = request.Reject(ssh.UnknownChannelType, "unknown channel type")
		return
	}
	channel, requests, err := request.Accept()
	if err != nil {
		return
	}
	defer func() { _ = channel.Close() }()
	for r := range requests {
		var run struct{ Command string }
		if r.Type != "exec" || ssh.Unmarshal(r.Payload, &run) != nil {
			_ = r.Reply(false, nil)
			continue
		}
		_ = r.Reply(true, nil)
		status := s.config.Exec(run.Command, channel, channel, channel.Stderr())
		_, _ = channel.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(status)}))
		return
	}
}

// closeWrite tells the socket that there is no more, if it can be told without
// closing it.
func closeWrite(socket net.Conn) {
	if unix, ok := socket.(*net.UnixConn); ok {
		_ = unix.CloseWrite()
		return
	}
	_ = socket.Close()
}

// serverConn is a connection that can be frozen.
type serverConn struct {
	net.Conn
	once, goneOnce sync.Once
	frozen, gone   chan struct{}
}

func (c *serverConn) freeze() { c.once.Do(func() { close(c.frozen) }) }

// Read reads, unless the connection is frozen when it begins or ends.
func (c *serverConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.thaw()
	return n, err
}

// Write writes, unless the connection is frozen.
func (c *serverConn) Write(p []byte) (int, error) {
	c.thaw()
	return c.Conn.Write(p)
}

// thaw waits, if the connection is frozen, until it is closed.
func (c *serverConn) thaw() {
	select {
	case <-c.frozen:
		<-c.gone
	default:
	}
}

// Close closes the connection.
func (c *serverConn) Close() error {
	c.goneOnce.Do(func() { close(c.gone) })
	return c.Conn.Close()
}
