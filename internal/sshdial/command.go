package sshdial

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// Command is a program on the host that connects its standard input and output
// to the daemon.
type Command struct {
	// Name is what errors call it.
	Name string
	// Script is what a POSIX shell on the host is given. Where it does not end at
	// once, it says ready and becomes the program. Status 127 means that the host
	// does not have it.
	Script string
}

// ready is what a script says before it becomes the program. What shell profiles
// print before that is skipped.
const (
	readyWord = "kvm2-connected"
	ready     = readyWord + "\n"
)

// maxNoise is how much may stand before it.
const maxNoise = 16 << 10

// maxStderr is how much of the end of a command's standard error is kept.
const maxStderr = 2 << 10

// statusNotFound is a shell's exit status for a command that does not exist.
const statusNotFound = 127

// HelperCommand runs libvirt's own proxy, virt-ssh-helper, which finds the daemon
// for a libvirt URI by itself.
func HelperCommand(uri string) Command {
	return Command{Name: "virt-ssh-helper", Script: need("virt-ssh-helper") + sayReady + "exec virt-ssh-helper " + quote(uri)}
}

// NetcatCommand runs a netcat that knows unix sockets, on the first of the sockets
// that exists. Where it has an option -q, it needs it to end with its input.
func NetcatCommand(netcat string, sockets []string) Command {
	nc := quote(netcat)
	quoted := make([]string, len(sockets))
	for i, socket := range sockets {
		quoted[i] = quote(socket)
	}
	script := need(netcat) + "set -- " + strings.Join(quoted, " ") + "; " +
		`for s do if test -S "$s"; then ` + sayReady +
		`case "$(` + nc + ` -q 2>&1 </dev/null)" in *"requires an argument"*) exec ` + nc + ` -q 0 -U "$s";; esac; ` +
		`exec ` + nc + ` -U "$s"; fi; done; ` +
		`echo "none of these is a socket: $*" >&2; exit 1`
	return Command{Name: netcat, Script: script}
}

const sayReady = "echo " + readyWord + "; "

// need ends a script with statusNotFound where a program does not exist.
func need(program string) string {
	return "command -v " + quote(program) + " >/dev/null 2>&1 || exit 127; "
}

// quote makes s one word for a POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// line is what the server is asked to run. The user's own shell, which need not
// be a POSIX shell, gets only a command with one quoted argument to parse.
func (c Command) line() string { return "exec sh -c " + quote(c.Script) }

// startCommand runs a command and waits until it is ready.
func startCommand(client *ssh.Client, command Command) (net.Conn, error) {
	channel, requests, err := client.OpenChannel("session", nil)
	if refused, ok := errors.AsType[*ssh.OpenChannelError](err); ok {
		return nil, &CommandError{Command: command.Name, Status: -1, Err: refused}
	}
	if err != nil {
		return nil, err
	}
	c := newCommandConn(channel, requests, command.Name)
	if err := c.start(command.line()); err != nil {
		_ = channel.Close()
		return nil, err
	}
	return c, nil
}

// commandConn is the standard input and output of a command.
type commandConn struct {
	ssh.Channel
	name   string
	status int // set before ended is closed, like stderr
	stderr tail
	ended  chan struct{}
}

func newCommandConn(channel ssh.Channel, requests <-chan *ssh.Request, name string) *commandConn {
	c := &commandConn{Channel: channel, name: name, status: -1, ended: make(chan struct{})}
	go func() {
		var stderr sync.WaitGroup
		stderr.Go(func() { _, _ = io.Copy(&c.stderr, channel.Stderr()) })
		for request := range requests {
			var exit struct{ Status uint32 }
			if request.Type == "exit-status" && ssh.Unmarshal(request.Payload, &exit) == nil {
				c.status = int(exit.Status)
			}
			if request.WantReply {
				_ = request.Reply(false, nil)
			}
		}
		stderr.Wait()
		close(c.ended)
	}()
	return c
}

// start runs the command line.
func (c *commandConn) start(line string) error {
	accepted, err := c.SendRequest("exec", true, ssh.Marshal(struct{ Command string }{line}))
	if err != nil {
		return err
	}
	if !accepted {
		return &CommandError{Command: c.name, Status: -1, Err: errors.New("the server does not run commands")}
	}
	var said []byte
	for one := make([]byte, 1); !bytes.HasSuffix(said, []byte(ready)); {
		if len(said) == maxNoise {
			return &CommandError{Command: c.name, Status: -1, Err: errors.New("something else answers in its place")}
		}
		if _, err := io.ReadFull(c, one); err != nil {
			return c.unready(err)
		}
		said = append(said, one[0])
	}
	return nil
}

// unready is the error of a command that ended before it was ready.
func (c *commandConn) unready(err error) error {
	if errors.Is(err, io.EOF) && c.status >= 0 {
		return &CommandError{Command: c.name, Status: c.status, Stderr: c.stderr.String()}
	}
	return err
}

// Read reads from the command. Its end is io.EOF only where it ended in success.
func (c *commandConn) Read(p []byte) (int, error) {
	n, err := c.Channel.Read(p)
	return n, c.reason(err)
}

// Write writes to the command.
func (c *commandConn) Write(p []byte) (int, error) {
	n, err := c.Channel.Write(p)
	return n, c.reason(err)
}

// reason returns how the command ended in place of io.EOF.
func (c *commandConn) reason(err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	<-c.ended // the server tells its status behind the end of its output, or the connection ends
	if c.status <= 0 {
		return err
	}
	return &CommandError{Command: c.name, Status: c.status, Stderr: c.stderr.String()}
}

func (c *commandConn) LocalAddr() net.Addr  { return commandAddr("") }
func (c *commandConn) RemoteAddr() net.Addr { return commandAddr(c.name) }

// The deadlines are those of conn.
func (c *commandConn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *commandConn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *commandConn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

type commandAddr string

func (commandAddr) Network() string  { return "ssh-command" }
func (a commandAddr) String() string { return string(a) }

// tail keeps the end of what is written to it.
type tail struct{ data []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.data = append(t.data, p[max(0, len(p)-maxStderr):]...)
	t.data = t.data[max(0, len(t.data)-maxStderr):]
	return len(p), nil
}

func (t *tail) String() string { return strings.TrimSpace(string(t.data)) }
