#!/usr/bin/env bash
#
# image.sh FILE makes a bootable Debian 12 image like the ones for clouds: qcow2, one
# partition, cloud-init, console on the first serial port. It needs root, but neither loop
# devices nor disk mounts, so it works in a container. Beside FILE it writes FILE.sha256
# and FILE.recipe, the checksum of this script: as long as that is the same, FILE is kept.

set -euo pipefail
umask 022
export LC_ALL=C

image=${1:?usage: image.sh FILE}
release=bookworm
disk_mib=2048

# Without cloud-guest-utils the root file system does not grow, and without locales
# cloud-init ends with an error.
packages=(
	linux-image-cloud-amd64 systemd-sysv systemd-resolved udev dbus zstd
	cloud-init cloud-guest-utils netplan.io qemu-guest-agent openssh-server
	fdisk e2fsprogs iproute2 locales sudo python3-minimal ca-certificates
)

say() { printf 'image: %s\n' "$*" >&2; }

die() {
	say "$*"
	exit 1
}

recipe() { sha256sum <"${BASH_SOURCE[0]}" | cut -d ' ' -f 1; }

checksum() { sha256sum <"$1" | cut -d ' ' -f 1; }

# current: the image is whole, and this very recipe made it.
current() {
	[[ -s $image && -s $image.sha256 && -s $image.recipe ]] &&
		[[ $(<"$image.recipe") == "$(recipe)" ]] &&
		[[ $(cut -d ' ' -f 1 "$image.sha256") == "$(checksum "$image")" ]]
}

# ---------------------------------------------------------------------------- packages

# mirror prints where this machine gets Debian itself from, whichever format its source
# lists have. apt knows the origin only once it has fetched the package lists.
mirror() {
	apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' |
		awk -v release="$release" '
			found || $2 != release || $3 != "main" { next }
			$4 == "Debian" || $1 ~ /\/debian\/?$/ { print $1; found = 1 }'
}

# apt_options prints, as options of mmdebstrap, what this machine needs to reach its mirror.
apt_options() {
	local key value
	for key in Acquire::http::Proxy Acquire::https::Proxy Acquire::Check-Valid-Until Acquire::Check-Date; do
		value=$(apt-config dump --format '%v' "$key")
		[[ -z $value ]] || printf -- '--aptopt=%s "%s"\n' "$key" "$value"
	done
}

# The initial RAM disk holds only the drivers of virtual disks: a third of the size, and
# emulated machines unpack it slowly. Its settings must be there before the kernel is.
bootstrap() {
	local root=$1 source options
	source=$(mirror)
	[[ -n $source ]] || die "apt's sources name no mirror of Debian $release"
	mapfile -t options < <(apt_options)
	say "installing Debian $release"
	mmdebstrap --quiet --variant=apt "${options[@]}" \
		--include="$(IFS=, && echo "${packages[*]}")" \
		--essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"' \
		--essential-hook='printf "%s\n" MODULES=list COMPRESS=zstd >"$1/etc/initramfs-tools/conf.d/testhost"' \
		--essential-hook='printf "%s\n" virtio_pci virtio_blk virtio_scsi sd_mod ext4 >"$1/usr/share/initramfs-tools/modules.d/testhost"' \
		"$release" "$root" "$source"
}

# ---------------------------------------------------------------------------- settings

configure() {
	local root=$1
	echo 'LABEL=root / ext4 defaults 0 1' >"$root/etc/fstab"
	echo "deb http://deb.debian.org/debian $release main" >"$root/etc/apt/sources.list"
	ln -sf ../run/systemd/resolve/stub-resolv.conf "$root/etc/resolv.conf"
	chroot "$root" passwd --quiet --lock root
	chroot "$root" systemctl --quiet enable systemd-networkd.service systemd-resolved.service

	cat >"$root/etc/cloud/cloud.cfg.d/90_testhost.cfg" <<-'CONFIG'
		datasource_list: [NoCloud, ConfigDrive]
		apt: {preserve_sources_list: true}
		locale: C.UTF-8
		# The rest only saves time. An RSA key takes an emulated machine many seconds to make.
		ssh_genkeytypes: [ed25519, ecdsa]
		ssh: {emit_keys_to_console: false}
		no_ssh_fingerprints: true
		grub_dpkg: {enabled: false}
	CONFIG

	# Mitigations cost time and protect nobody here, and so do self-tests.
	mkdir -p "$root/boot/grub"
	cat >"$root/boot/grub/grub.cfg" <<-'CONFIG'
		linux /vmlinuz root=LABEL=root ro console=ttyS0,115200 mitigations=off cryptomgr.notests
		initrd /initrd.img
		boot
	CONFIG
}

# hasten leaves out what an emulated machine with a short life boots well without: a fifth
# of the processor time up to the end of cloud-init.
hasten() {
	local root=$1
	chroot "$root" systemctl --quiet mask \
		apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer \
		e2scrub_all.timer e2scrub_reap.service \
		systemd-binfmt.service proc-sys-fs-binfmt_misc.automount systemd-pstore.service \
		modprobe@.service kmod-static-nodes.service \
		dev-hugepages.mount dev-mqueue.mount sys-fs-fuse-connections.mount \
		sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount

	# An emulated processor claims to have everything, and gets a driver for all of it.
	printf 'blacklist %s\n' kvm kvm_amd kvm_intel powernow_k8 aesni_intel ghash_clmulni_intel \
		crc32_pclmul crct10dif_pclmul sha1_ssse3 sha256_ssse3 sha512_ssse3 psmouse pcspkr \
		>"$root/etc/modprobe.d/testhost.conf"

	# Two minutes is the default, and a machine without a network waits for the whole of it.
	mkdir -p "$root/etc/systemd/system/systemd-networkd-wait-online.service.d"
	cat >"$root/etc/systemd/system/systemd-networkd-wait-online.service.d/testhost.conf" <<-'UNIT'
		[Service]
		ExecStart=
		ExecStart=/lib/systemd/systemd-networkd-wait-online --timeout=30
	UNIT
}

# forget removes what must differ between machines, what came from this one, and what
# nobody reads in a test.
forget() {
	local root=$1
	: >"$root/etc/machine-id"
	rm -f "$root/etc/hostname" "$root/etc/apt/apt.conf.d/99mmdebstrap" \
		"$root"/etc/ssh/ssh_host_* "$root/var/lib/dbus/machine-id" "$root/var/lib/systemd/random-seed"
	rm -rf "$root"/var/lib/cloud/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* \
		"$root"/usr/share/{doc,man,info}/* "$root"/usr/share/locale/*
	find "$root/var/log" -type f -delete
}

# ---------------------------------------------------------------------------- disk

# make_disk ROOT RAW lays out a BIOS disk: boot sector, GRUB, and from 1 MiB on one
# partition, the last thing on the disk, so that it can grow.
make_disk() {
	local root=$1 raw=$2 work
	work=$(dirname "$raw")
	truncate -s "${disk_mib}M" "$raw"
	sfdisk --quiet "$raw" <<<'label: dos
		start=2048, type=83, bootable'
	# GRUB cannot read every feature that a newer mkfs switches on.
	mkfs.ext4 -q -L root -O ^metadata_csum_seed,^orphan_file -d "$root" \
		-E offset=$((1 << 20)) "$raw" "$((disk_mib - 1))M"

	cat >"$work/early.cfg" <<-'CONFIG'
		search.fs_label root root
		set prefix=($root)/boot/grub
		configfile $prefix/grub.cfg
	CONFIG
	grub-mkimage -O i386-pc -p /boot/grub -c "$work/early.cfg" -o "$work/core.img" \
		biosdisk part_msdos ext2 search search_label configfile linux normal
	(($(stat -c %s "$work/core.img") <= 2047 * 512)) || die "GRUB does not fit before the partition"
	# Byte 440 on is the disk's own signature and the partition table.
	dd if=/usr/lib/grub/i386-pc/boot.img of="$raw" bs=440 count=1 conv=notrunc status=none
	dd if="$work/core.img" of="$raw" bs=512 seek=1 conv=notrunc status=none
}

# publish WORK moves the finished files into place, the recipe last: only it makes the
# other two count.
publish() {
	local work=$1 name
	name=$(basename "$image")
	printf '%s  %s\n' "$(checksum "$work/disk.qcow2")" "$name" >"$work/sha256"
	recipe >"$work/recipe"
	rm -f "$image.recipe"
	mv "$work/disk.qcow2" "$image"
	mv "$work/sha256" "$image.sha256"
	mv "$work/recipe" "$image.recipe"
}

build() {
	mkdir -p "$(dirname "$image")"
	# Left over from a run that was killed.
	rm -rf "$image".build.*
	work=$(mktemp -d "$image.build.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	chmod 0755 "$work" # mmdebstrap's download user has to get in
	bootstrap "$work/root"
	configure "$work/root"
	hasten "$work/root"
	forget "$work/root"
	say "making the disk"
	make_disk "$work/root" "$work/disk.raw"
	qemu-img convert -c -O qcow2 -o compat=1.1 "$work/disk.raw" "$work/disk.qcow2"
	publish "$work"
	say "made $image"
}

current || build
