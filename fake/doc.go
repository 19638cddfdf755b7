// Package fake is a libvirt host in memory, to test with what uses kvm2 without a hypervisor.
//
// A Host is a kvm2.Dialer. Give it to a Provider in place of a real host:
//
//	host := fake.NewHost()
//	defer host.Close()
//	provider, err := kvm2.New(config, kvm2.WithDialer(host))
//
// How to test a controller with it, from the smallest test to a crash at every call, is told in
// docs/testing-with-the-fake.md (https://github.com/kvm2/kvm2/blob/main/docs/testing-with-the-fake.md).
//
// It behaves as libvirt 9.0 with QEMU 7.2 and answers with the error numbers and texts seen there, including where
// libvirt is of no help: it redefines a domain in silence, lets disks in use be deleted, and does not notice when the
// end of an upload does not fit. The suite in kvm2test runs on the fake and on real hosts alike, and holds the two
// together.
//
// # What happens
//
// Options say what the host has, and how long things take. Methods of Host do what happens on a host without kvm2's
// doing: guests crash and power off (CrashGuest, PowerOff, PauseIOError), pools fill up (FillPool), administrators
// meddle (DestroyBehind, UndefineBehind, SetMetadataBehind, DeleteVolumeBehind), leases and guest agents come and go,
// and the daemon restarts (RestartDaemon). Such a method panics when what it is about does not exist: the test is wrong
// then.
//
// # What goes wrong
//
// AddFault makes calls fail: by an answer of libvirt (Fail), by a lost connection (Drop), by never returning before
// their context ends (Hang), by taking longer (Delay), or, for uploads, halfway (CutUpload, TruncateUpload). A Fault
// strikes before a call has done its work or after, when only the reply is lost. Fault.Nth counts all calls, so a test
// can make the first call fail, then the second, and so on until ActiveFault.Reached says that there was no such call.
// Intercept is for everything else.
//
// # What was done
//
// Calls is the log of all calls, Stats are counters. Domains, Volumes, VolumeBytes and Dump show the host's state. All
// of it are copies. Neither log nor dump holds what was uploaded; VolumeBytes does.
//
// # Time
//
// The fake uses the standard time package and starts no goroutine that outlives a call, so it works in a
// testing/synctest bubble, where waiting for a guest to boot or a lease to expire takes no time. A Host and its sessions
// must then be made in the bubble. There is one exception: a call that returns because its context has ended may leave a
// goroutine waiting in the caller's own Read or Write.
//
// # Misuse
//
// A session that two goroutines use at once panics. A call on a session that has ended fails. What libvirt could do and
// the fake cannot is an error that begins with "fake: unsupported".
//
// # How it differs from libvirt
//
//   - Guests do not run: nothing is booted, no disk is written to, user data have no effect. A guest asks for its leases
//     when the boot time is over, and its agent is connected when ConnectAgent says so.
//   - Calls take effect one after another. libvirt works on several at once, and lists what is half done.
//   - After an upload libvirt looks at the new content in its own time; the fake has done so when the upload returns.
//   - Of libvirt's schema only the elements right below <domain> and <devices> are known, and a few values. What is
//     checked on a host beyond that (CPU models, machine types, PCI addresses) is accepted.
//   - A domain's XML is kept as it came. libvirt adds addresses, controllers and defaults.
//   - Domains other than QEMU's, disks on other than files and volumes, volumes in other formats than raw and qcow2, and
//     snapshots beyond their names do not exist. Nor do devices that are plugged in while a guest runs.
//   - All pools are directories, each on a file system of its own, of any size up to the 16 TiB of an ext4 file.
//   - Memory is only compared with that of the host, guest by guest; guests do not compete for it.
//   - A backing file is looked for only in the pools' directories.
//   - Parse errors (code 35) carry the text of another parser.
//   - ARP entries are those of a guest's current leases. libvirt knows whom the host has talked to.
//   - DHCP leases are for IPv4, one hour long, and renewed every half hour.
//   - Permissions, access control, secrets and encryption do not exist.
package fake
