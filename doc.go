// Package kvm2 makes a libvirt/KVM host a machine provider: a controller hands it a [Spec], polls [Provider.Create]
// until the machine runs, asks [Provider.Get] and [Provider.List] what exists, and calls [Provider.Delete] until nothing
// is left.
//
// # The contract
//
// The four methods are made for controllers that reconcile: that call again and again, crash, restart and lose
// connections. Each call looks at the host first and then does what is missing; none waits for long; each ends with
// its context. A machine's provider ID follows from [Config.Scope] and [Spec.OwnerUID] alone, so it is known before
// anything exists and the same after a restart.
//
//	type MachineProvider interface {
//		Create(ctx context.Context, spec kvm2.Spec) (kvm2.Machine, error)
//		Get(ctx context.Context, id string) (kvm2.Machine, error)
//		Delete(ctx context.Context, id string) error
//		List(ctx context.Context) ([]kvm2.Machine, error)
//	}
//
// Declare such an interface where you use it; kvm2 exports the concrete [Provider].
//
// # Errors
//
// [ClassOf] sorts every error into Transient (call again), Permanent (do not), Quota (the host lacks space or memory)
// or NotFound, and [RetryAfter] says how long to wait. The sentinels, such as [ErrForeignOwner], are for errors.Is.
// What kvm2 does not recognise, and a context that ended, is Transient.
//
// # Ownership
//
// kvm2 writes scope, owner and phase into the domain's metadata, in a namespace of its own, and touches a domain only
// if they say that it is the machine in question. Everything else on the host is left alone.
//
// # Images
//
// An image is identified by its checksum. It is transferred once, on a connection of its own that a cancelled poll
// does not cut off, verified, and published; root disks are overlays on it. Create reports the transfer's progress and
// its failure; [WithImageProgress] tells of it as it goes on. A volume that is in the pool already can be used in place.
// [Provider.PruneImages] removes the images that nothing uses.
//
// # The host
//
// [Config.URI] is a libvirt URI. Behind it, [Dialer] and [Conn] are the seam to libvirt: go-libvirt over a unix socket,
// SSH, TLS or TCP, and, for tests, the in-memory host of package fake.
package kvm2
