package kvm2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/kvm2/kvm2/internal/sshconfig"
	"github.com/kvm2/kvm2/internal/sshdial"
)

// A frozen peer is noticed after sshKeepalive * sshKeepaliveCount.
const (
	sshKeepalive      = 15 * time.Second
	sshKeepaliveCount = 3
)

const defaultSSHUser = "root"

// connectSSH reaches the daemon over SSH.
func (d *libvirtDialer) connectSSH(ctx context.Context) (net.Conn, error) {
	w := &sshWay{libvirtDialer: d, home: homeDir()}
	hops, err := w.hops()
	if err != nil {
		return nil, &sshdial.MaterialError{Path: d.ssh.ConfigFile, What: sshConfigMaterial, Err: err}
	}
	last := len(hops) - 1
	cfg := sshdial.Config{
		Hop: hops[last], Jumps: hops[:last],
		Passphrase: d.passphrase, Signers: d.signers, DialTCP: d.dialTCP,
		KeepaliveInterval: sshKeepalive, KeepaliveCount: sshKeepaliveCount,
	}
	cfg.Sockets, cfg.Commands = d.uri.remoteWays()
	return sshdial.Dial(ctx, cfg)
}

// sshConfigMaterial is what a MaterialError about the configuration file says it is.
const sshConfigMaterial = "configuration"

// remoteWays are the sockets to ask the SSH server for, and the commands to run where it refuses. Without a word about
// it in the URI, forwarding comes first: it needs nothing on the host.
func (h hostURI) remoteWays() ([]string, []sshdial.Command) {
	sockets := h.sockets
	if sockets == nil && h.isSystem() {
		sockets = systemSockets
	}
	var commands []sshdial.Command
	if h.sockets == nil && h.proxy != "netcat" { // the helper cannot be told a socket
		commands = append(commands, sshdial.HelperCommand(h.driver))
	}
	if h.proxy != "native" {
		commands = append(commands, sshdial.NetcatCommand(cmp.Or(h.netcat, "nc"), sockets))
	}
	if h.proxy != "" {
		return nil, commands
	}
	return sockets, commands
}

// jumps are the servers of ProxyJump.
func (c SSHConfig) jumps() ([]sshconfig.Jump, error) {
	if c.ProxyJump == "" {
		return nil, nil
	}
	return sshconfig.ParseJumps(c.ProxyJump)
}

// sshWay finds the servers on the way to a host.
type sshWay struct {
	*libvirtDialer
	home string
	host sshdial.Hop // the host itself, whose values those of a jump host without any are
}

// maxHops bounds the ProxyJump lines that lead from one to the next.
const maxHops = 8

// hops are the servers on the way, the host itself last.
func (w *sshWay) hops() ([]sshdial.Hop, error) {
	found, err := w.lookUp(sshconfig.Jump{User: w.uri.user, Host: w.uri.host, Port: w.uri.port}, defaultSSHUser)
	if err != nil {
		return nil, err
	}
	w.host = w.hop(w.uri.user, w.uri.host, w.uri.port, found)
	w.host.User = cmp.Or(w.host.User, defaultSSHUser)
	if w.uri.keyFiles != nil {
		w.host.KeyFiles = w.uri.keyFiles
	}
	if w.uri.knownHosts != nil {
		w.host.KnownHostsFiles = w.uri.knownHosts
	} else if w.host.KnownHostsFiles == nil && !found.NoKnownHosts {
		w.host.KnownHostsFiles = []string{filepath.Join(w.home, ".ssh", "known_hosts")}
	}
	w.host.AgentSocket = w.agent(w.host, found)

	jumps, err := sshconfig.ParseJumps(cmp.Or(w.ssh.ProxyJump, found.ProxyJump, "none"))
	if err != nil {
		return nil, err
	}
	hops, err := w.through(jumps, 0)
	return append(hops, w.host), err
}

// through are the servers of a list of jump hosts, and before them those that the first needs.
func (w *sshWay) through(jumps []sshconfig.Jump, depth int) ([]sshdial.Hop, error) {
	var hops []sshdial.Hop
	for i, jump := range jumps {
		found, err := w.lookUp(jump, w.host.User)
		if err != nil {
			return nil, err
		}
		if i == 0 && found.ProxyJump != "" {
			if hops, err = w.before(found.ProxyJump, depth+1); err != nil {
				return nil, err
			}
		}
		hops = append(hops, w.jumpHop(jump, found))
	}
	return hops, nil
}

func (w *sshWay) before(list string, depth int) ([]sshdial.Hop, error) {
	if depth > maxHops {
		return nil, errors.New("jump hosts lead from one to another without an end")
	}
	jumps, err := sshconfig.ParseJumps(list)
	if err != nil {
		return nil, err
	}
	return w.through(jumps, depth)
}

// jumpHop is a jump host; what is not said about it is as for the host.
func (w *sshWay) jumpHop(jump sshconfig.Jump, found sshconfig.Settings) sshdial.Hop {
	hop := w.hop(jump.User, jump.Host, jump.Port, found)
	hop.User = cmp.Or(hop.User, w.host.User)
	if hop.KeyFiles == nil && !found.NoIdentity {
		hop.KeyFiles = w.host.KeyFiles
	}
	if hop.KnownHostsFiles == nil && !found.NoKnownHosts {
		hop.KnownHostsFiles = w.host.KnownHostsFiles
	}
	hop.AgentSocket = w.agent(hop, found)
	return hop
}

// hop is a server as a URI or a list of jump hosts names it, completed from the configuration file.
func (w *sshWay) hop(user, host string, port int, found sshconfig.Settings) sshdial.Hop {
	return sshdial.Hop{
		User: cmp.Or(user, found.User), Host: cmp.Or(found.HostName, host), Port: cmp.Or(port, found.Port),
		KeyFiles: found.IdentityFiles, KnownHostsFiles: found.KnownHostsFiles,
	}
}

// agent is the agent to ask: none where keys are configured, since a server counts every key that it is offered.
func (w *sshWay) agent(hop sshdial.Hop, found sshconfig.Settings) string {
	if len(hop.KeyFiles) > 0 || w.signers != nil || found.IdentityAgent == "none" {
		return ""
	}
	if found.IdentityAgent != "" && found.IdentityAgent != "SSH_AUTH_SOCK" {
		return found.IdentityAgent
	}
	return os.Getenv("SSH_AUTH_SOCK")
}

// lookUp asks the configuration file, if there is one.
func (w *sshWay) lookUp(server sshconfig.Jump, defaultUser string) (sshconfig.Settings, error) {
	if w.ssh.ConfigFile == "" {
		return sshconfig.Settings{}, nil
	}
	found, err := sshconfig.Lookup(w.ssh.ConfigFile, sshconfig.Query{
		Host: server.Host, User: server.User, Port: server.Port, DefaultUser: defaultUser, Home: w.home,
	})
	if err != nil {
		return found, fmt.Errorf("of %q: %w", server.Host, err)
	}
	return found, nil
}
