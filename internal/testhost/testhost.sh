#!/usr/bin/env bash
#
# testhost.sh turns a Debian 12 machine into a libvirt host to test kvm2 against.
#
#   testhost.sh up           install, start, and make what is missing (the default)
#   testhost.sh down         take it away again, but keep the guest image
#   testhost.sh down --all   take the guest image away too
#   testhost.sh env          print testhost.json, which the Go package testhost reads
#
# Run it as root, as often as you like: what is there already is kept. It works on a
# machine with systemd, and in a container or sandbox without it, where it starts the
# libvirt daemons itself. Guests run under plain emulation, so /dev/kvm is not needed.
#
# Everything lies in one directory. In libvirt it makes one storage pool and one network,
# both called kvm2-test, and leaves all others alone. The network is isolated: its guests
# reach this host and each other, nothing else. Debian packages stay installed, and
# Debian starts an SSH server of its own when it installs openssh-server with systemd.
#
# Environment:
#   KVM2_TESTHOST_DIR        where everything goes   /var/lib/kvm2-testhost
#   KVM2_TESTHOST_SSH_PORT   loopback port for SSH   22022
#   KVM2_TESTHOST_SUBNET     a /24, three numbers    192.168.231

set -euo pipefail
umask 022
export LC_ALL=C

dir=${KVM2_TESTHOST_DIR:-/var/lib/kvm2-testhost}
ssh_port=${KVM2_TESTHOST_SSH_PORT:-22022}
subnet=${KVM2_TESTHOST_SUBNET:-192.168.231}
pool=kvm2-test
network=kvm2-test # also the name of the bridge, so at most 15 characters

arguments=("$@")
script_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
marker=$dir/.kvm2-testhost
json=$dir/testhost.json
run_dir=$dir/run
ssh_dir=$dir/ssh
pool_dir=$dir/pool
image=$dir/image/debian-12-cloud.qcow2

packages=(
	libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients
	qemu-system-x86 qemu-utils
	dnsmasq-base iptables iproute2
	openssh-server openssh-client netcat-openbsd
	genisoimage xorriso libarchive-tools libxml2-utils # which unit tests hold kvm2's own output against
	mmdebstrap debian-archive-keyring fdisk e2fsprogs grub-pc-bin grub-common
)

say() { printf 'testhost: %s\n' "$*" >&2; }

die() {
	say "$*"
	exit 1
}

usage() { die "usage: testhost.sh [up | down [--all] | env]"; }

# wait_for SECONDS WHAT COMMAND... repeats the command until it succeeds.
wait_for() {
	local deadline=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		((SECONDS < deadline)) || die "gave up waiting for $what"
		sleep 0.2
	done
}

# ---------------------------------------------------------------------------- safety

# The directory's name ends up in URIs, XML and configuration files, and "down" deletes
# what is in it: so it has a plain name, and bears our mark before we write to it.
check_settings() {
	[[ $dir =~ ^(/[A-Za-z0-9][A-Za-z0-9._-]*)+$ ]] ||
		die "KVM2_TESTHOST_DIR must be an absolute path of letters, digits, '.', '_' and '-': '$dir'"
	[[ $ssh_port =~ ^[1-9][0-9]{0,4}$ ]] ||
		die "KVM2_TESTHOST_SSH_PORT must be a port number: '$ssh_port'"
	[[ $subnet =~ ^[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}$ ]] ||
		die "KVM2_TESTHOST_SUBNET must be the first three numbers of an IPv4 address: '$subnet'"
}

check_machine() {
	((EUID == 0)) || die "must run as root"
	[[ $(uname -m) == x86_64 ]] || die "only x86_64 is supported, this is $(uname -m)"
	command -v apt-get >/dev/null || die "needs a Debian machine: apt-get not found"
	[[ -c /dev/net/tun ]] || modprobe tun 2>/dev/null || true
	[[ -c /dev/net/tun ]] || die "no /dev/net/tun: guests could have no network"
}

# alone starts the script again under a lock on the directory: two runs at once would step
# on each other. flock -o keeps the lock out of the hands of the daemons.
alone() {
	if [[ -n ${KVM2_TESTHOST_LOCKED:-} ]]; then
		unset KVM2_TESTHOST_LOCKED
		return
	fi
	KVM2_TESTHOST_LOCKED=1 exec flock -o "$dir" "$BASH" "${BASH_SOURCE[0]}" "${arguments[@]}"
}

claim_dir() {
	if [[ -d $dir && ! -e $marker && -n $(ls -A "$dir") ]]; then
		die "'$dir' is not empty and was not made by this script: choose another KVM2_TESTHOST_DIR"
	fi
	install -d -m 0755 "$dir" "$run_dir"
	install -d -m 0711 "$pool_dir"
	install -d -m 0700 "$ssh_dir"
	touch "$marker"
}

# ---------------------------------------------------------------------------- packages

install_packages() {
	local missing=() p
	for p in "${packages[@]}"; do
		[[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null) == ?i* ]] || missing+=("$p")
	done
	((${#missing[@]})) || return 0
	say "installing ${missing[*]}"
	apt_install "${missing[@]}" && return
	# Package lists that are absent or out of date make the first attempt fail.
	apt-get -q -o DPkg::Lock::Timeout=600 update >&2
	apt_install "${missing[@]}" || die "apt-get could not install: ${missing[*]}"
}

apt_install() {
	DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
		-o DPkg::Lock::Timeout=600 install "$@" >&2
}

# ---------------------------------------------------------------------------- daemons

# running PIDFILE NAME: the process in the file is alive and is what we take it for. One that was killed keeps its name
# until its parent has noticed, which an init of a sandbox may not do at once: it is a zombie until then.
running() {
	local pid
	pid=$(cat "$1" 2>/dev/null) && [[ -n $pid && $(cat "/proc/$pid/comm" 2>/dev/null) == "$2" ]] &&
		! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null
}

# stop_daemon PIDFILE NAME ends a daemon which this script started, and no other.
stop_daemon() {
	if running "$1" "$2"; then
		say "stopping $2"
		kill "$(cat "$1")"
		wait_for 30 "$2 to stop" not running "$1" "$2"
	fi
	rm -f "$1"
}

not() { ! "$@"; }

answers() {
	case $1 in
	libvirtd) timeout 10 virsh -c qemu:///system list ;;
	*) timeout 10 virt-admin -c "$1:///system" srv-list ;;
	esac >/dev/null 2>&1
}

# Without udev nobody gives /dev/kvm to the group kvm, as Debian's rule for it does. libvirtd,
# which is root, then finds KVM usable and qemu's user does not, and it never believes what it
# knows of qemu: it asks anew, for 10 to 20 seconds, at every define and start.
own_kvm_device() {
	[[ -c /dev/kvm && $(stat -c %G:%a /dev/kvm) == root:600 ]] || return 0
	say "/dev/kvm: giving it to the group kvm, as udev does"
	chgrp kvm /dev/kvm
	chmod 660 /dev/kvm
}

start_libvirt() {
	local d
	for d in virtlogd virtlockd libvirtd; do
		answers "$d" || start_daemon "$d"
	done
	answers libvirtd || die "'virsh -c qemu:///system list' does not work"
}

start_daemon() {
	say "starting $1"
	if [[ -d /run/systemd/system ]]; then
		systemctl start "$1"
	elif ! running "$run_dir/$1.pid" "$1"; then
		# A pid file left by a daemon that was killed does no harm: libvirt's daemons hold
		# a lock on theirs, and a stale file has none.
		install -d -m 0755 "$run_dir"
		"/usr/sbin/$1" -d -p "$run_dir/$1.pid"
	fi
	wait_for 30 "$1 to answer" answers "$1"
}

# ---------------------------------------------------------------------------- libvirt objects

lv() { virsh -q -c qemu:///system "$@"; }

make_pool() {
	if ! lv pool-info "$pool" >/dev/null 2>&1; then
		lv pool-define-as "$pool" dir --target "$pool_dir" >&2
	fi
	[[ $(lv pool-dumpxml "$pool") == *"<path>$pool_dir</path>"* ]] ||
		die "pool '$pool' exists and is not at '$pool_dir': run 'down' with the KVM2_TESTHOST_DIR it was made with"
	if [[ ! $(lv pool-info "$pool") =~ State:\ *running ]]; then
		lv pool-start "$pool" >&2
	fi
	check_traversable
}

# QEMU runs as a user of its own. libvirt hands it the disk files, but not the directories
# above them.
check_traversable() {
	id libvirt-qemu >/dev/null 2>&1 || return 0
	setpriv --reuid=libvirt-qemu --regid="$(id -g libvirt-qemu)" --clear-groups test -x "$pool_dir" ||
		die "user libvirt-qemu cannot enter '$pool_dir': a directory above it lacks the x permission for others"
}

# No <forward>: the network is isolated. Two minutes is the shortest lease dnsmasq grants,
# so that tests which make and delete many machines do not run out of addresses.
network_xml() {
	cat <<-XML
		<network>
		  <name>$network</name>
		  <bridge name='$network' stp='off' delay='0'/>
		  <ip address='$subnet.1' netmask='255.255.255.0'>
		    <dhcp>
		      <range start='$subnet.10' end='$subnet.250'>
		        <lease expiry='2' unit='minutes'/>
		      </range>
		    </dhcp>
		  </ip>
		</network>
	XML
}

make_network() {
	if ! lv net-info "$network" >/dev/null 2>&1; then
		lv net-define <(network_xml) >&2
	fi
	[[ $(lv net-dumpxml "$network") == *"<ip address='$subnet.1' "* ]] ||
		die "network '$network' exists and is not $subnet.0/24: run 'down' first"
	if [[ ! $(lv net-info "$network") =~ Active:\ *yes ]]; then
		lv net-start "$network" >&2
	fi
}

# users_of_objects prints the domains which have a disk in our pool or a card on our network.
users_of_objects() {
	local uuid ours="'$pool_dir/|<source [^>]*(network='$network'|pool='$pool')"
	for uuid in $(lv list --all --uuid); do
		if [[ $(lv dumpxml "$uuid") =~ $ours ]]; then
			lv domname "$uuid"
		fi
	done
}

remove_objects() {
	local users
	command -v virsh >/dev/null || return 0
	start_libvirt
	users=$(users_of_objects)
	[[ -z $users ]] || die "domains still use pool or network '$pool', undefine them first: ${users//$'\n'/ }"
	if lv net-info "$network" >/dev/null 2>&1; then
		lv net-destroy "$network" >/dev/null 2>&1 || true
		lv net-undefine "$network" >&2
	fi
	if lv pool-info "$pool" >/dev/null 2>&1; then
		lv pool-destroy "$pool" >/dev/null 2>&1 || true
		lv pool-undefine "$pool" >&2
	fi
}

# ---------------------------------------------------------------------------- ssh

make_keys() {
	local type
	for type in ed25519 rsa; do
		[[ -s $ssh_dir/host_$type ]] ||
			ssh-keygen -q -t "$type" -N '' -C kvm2-testhost -f "$ssh_dir/host_$type"
		printf '[127.0.0.1]:%s ' "$ssh_port"
		cut -d ' ' -f 1,2 "$ssh_dir/host_$type.pub"
	done >"$ssh_dir/known_hosts"
	[[ -s $ssh_dir/client_ed25519 ]] ||
		ssh-keygen -q -t ed25519 -N '' -C kvm2-testhost -f "$ssh_dir/client_ed25519"
	install -m 0600 "$ssh_dir/client_ed25519.pub" "$ssh_dir/authorized_keys"
}

# StrictModes would refuse a directory below a world-writable one, such as /tmp, although
# ours and the files in it are writable by root alone.
sshd_config() {
	cat <<-CONFIG
		ListenAddress 127.0.0.1:$ssh_port
		HostKey $ssh_dir/host_ed25519
		HostKey $ssh_dir/host_rsa
		PidFile $run_dir/sshd.pid
		AuthorizedKeysFile $ssh_dir/authorized_keys
		StrictModes no
		UsePAM no
		AllowUsers root
		PermitRootLogin prohibit-password
		AuthenticationMethods publickey
		PasswordAuthentication no
		KbdInteractiveAuthentication no
		AllowStreamLocalForwarding yes
		X11Forwarding no
		PrintMotd no
		UseDNS no
	CONFIG
}

# start_sshd keeps a running server, unless its configuration has changed.
start_sshd() {
	if [[ $(getent shadow root | cut -d : -f 2) == '!'* ]]; then
		die "root's account is locked ('!' in /etc/shadow), so sshd would refuse its key: usermod -p '*' root"
	fi
	make_keys
	if ! sshd_config | cmp -s - "$ssh_dir/sshd_config"; then
		stop_daemon "$run_dir/sshd.pid" sshd
		sshd_config >"$ssh_dir/sshd_config"
	fi
	if ! running "$run_dir/sshd.pid" sshd; then
		say "starting sshd on 127.0.0.1:$ssh_port"
		install -d -m 0755 /run/sshd
		/usr/sbin/sshd -f "$ssh_dir/sshd_config" -E "$ssh_dir/sshd.log" ||
			die "sshd does not start: $(tail -n 3 "$ssh_dir/sshd.log")"
	fi
	wait_for 10 "a login through sshd, see $ssh_dir/sshd.log" ssh_login true
}

ssh_login() {
	timeout 10 ssh -F none -p "$ssh_port" -i "$ssh_dir/client_ed25519" -o IdentitiesOnly=yes -o IdentityAgent=none \
		-o BatchMode=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile="$ssh_dir/known_hosts" \
		root@127.0.0.1 "$@" </dev/null
}

# ---------------------------------------------------------------------------- testhost.json

# own_pid_file DAEMON prints the pid file of a daemon which this script started.
own_pid_file() { if running "$run_dir/$1.pid" "$1"; then echo "$run_dir/$1.pid"; fi; }

libvirt_socket() {
	local s=/var/run/libvirt/libvirt-sock
	[[ -S $s ]] || die "no '$s': kvm2's tests need the monolithic libvirtd"
	echo "$s"
}

# version_of NAME picks a line such as "Running hypervisor: QEMU 7.2.22" from virsh version.
version_of() { lv version | sed -n "s/^$1: .* \([0-9][0-9.]*\)$/\1/p"; }

virtual_size() { qemu-img info --output=json "$image" | sed -n 's/^    "virtual-size": \([0-9]*\).*/\1/p'; }

# Nothing in here needs escaping: see check_settings.
describe() {
	local socket
	socket=$(libvirt_socket)
	cat <<-JSON
		{
		  "dir": "$dir",
		  "pool": "$pool",
		  "pool_path": "$pool_dir",
		  "network": "$network",
		  "subnet": "$subnet.0/24",
		  "unix_uri": "qemu+unix:///system?socket=$socket",
		  "ssh_uri": "qemu+ssh://root@127.0.0.1:$ssh_port/system?keyfile=$ssh_dir/client_ed25519&known_hosts=$ssh_dir/known_hosts&socket=$socket",
		  "socket": "$socket",
		  "ssh_port": $ssh_port,
		  "sshd_pid_file": "$run_dir/sshd.pid",
		  "sshd_config": "$ssh_dir/sshd_config",
		  "host_key_files": ["$ssh_dir/host_ed25519", "$ssh_dir/host_rsa"],
		  "key_file": "$ssh_dir/client_ed25519",
		  "known_hosts": "$ssh_dir/known_hosts",
		  "image": "$image",
		  "image_sha256": "$(cut -d ' ' -f 1 "$image.sha256")",
		  "image_size": $(stat -c %s "$image"),
		  "virtual_size": $(virtual_size),
		  "libvirt_version": "$(version_of 'Using library')",
		  "qemu_version": "$(version_of 'Running hypervisor')",
		  "libvirtd_pid_file": "$(own_pid_file libvirtd)",
		  "guest_arch": "x86_64"
		}
	JSON
}

# ---------------------------------------------------------------------------- subcommands

up() {
	check_machine
	claim_dir
	alone
	install_packages
	own_kvm_device
	start_libvirt
	make_pool
	make_network
	start_sshd
	"$script_dir/image.sh" "$image"
	describe >"$json.new"
	mv "$json.new" "$json"
	say "ready: $json"
}

down() {
	local keep_image=$1 d
	if [[ ! -e $marker ]]; then
		say "nothing to do: '$dir' was not made by this script"
		return
	fi
	((EUID == 0)) || die "must run as root"
	alone
	remove_objects
	stop_daemon "$run_dir/sshd.pid" sshd
	for d in libvirtd virtlockd virtlogd; do
		stop_daemon "$run_dir/$d.pid" "$d"
	done
	rm -rf "$json" "$run_dir" "$ssh_dir" "$pool_dir"
	if [[ $keep_image == no ]]; then
		rm -rf "$dir/image" "$marker"
		rmdir "$dir"
	fi
}

env_json() { cat "$json" 2>/dev/null || die "no test host at '$dir': run 'testhost.sh up'"; }

check_settings

case "$*" in
"" | up) up ;;
down) down yes ;;
"down --all") down no ;;
env) env_json ;;
*) usage ;;
esac
