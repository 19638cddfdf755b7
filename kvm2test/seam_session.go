package kvm2test

import (
	"context"
	"errors"
	"io"
	"path"
	"slices"

	"github.com/kvm2/kvm2"
)

func sessionCases() []seamCase {
	return []seamCase{
		{"Session/Independent", "Closing one session leaves another one usable.", "", func(s *seam) {
			other := s.dial()
			s.must(other.Close())
			s.wantUsable(s.conn)
		}},
		{"Session/SameHost", "What one session makes, another one sees.", "", func(s *seam) {
			s.rawVolume("v", 0)
			get[kvm2.Volume](s, "Volume")(s.dial().Volume(s.ctx, s.caps.Pool, s.name("v")))
		}},
		{"Session/LibvirtErrorKeepsIt", "An error that libvirt reported leaves the session usable.", "", func(s *seam) {
			_, err := s.conn.DomainByName(s.ctx, s.name("none"))
			s.wantCode(err, 42)
			s.wantUsable(s.conn)
		}},
		{"Session/ClosedFails", "A call after Close fails with an error that is not libvirt's.", "", func(s *seam) {
			s.must(s.conn.Close())
			s.wantBroken(s.conn)
		}},
		{"Session/CloseTwice", "Close may be called again.", "", func(s *seam) {
			s.must(s.conn.Close())
			s.promptly("the second Close", func() { _ = s.conn.Close() })
		}},
		{"Session/CancelledBefore", "A call whose context has ended returns that context's error, and breaks the session.", "", func(s *seam) {
			ctx, cancel := context.WithCancel(s.ctx)
			cancel()
			_, err := s.conn.Domains(ctx)
			if !errors.Is(err, context.Canceled) {
				s.Fatalf("got %v, want context.Canceled", err)
			}
		}},
		{"Session/CancelledDial", "Dial with a context that has ended returns that context's error.", "", func(s *seam) {
			ctx, cancel := context.WithCancel(s.ctx)
			cancel()
			_, err := s.dialer.Dial(ctx)
			if !errors.Is(err, context.Canceled) {
				s.Fatalf("got %v, want context.Canceled", err)
			}
		}},
		{"Session/CancelledDuring", "A call whose context ends returns soon with that context's error, and the session is broken.", needTransfers, func(s *seam) {
			ctx, cancel := context.WithCancel(s.ctx)
			err := s.duringUpload(ctx, cancel)
			if !errors.Is(err, context.Canceled) {
				s.Fatalf("got %v, want context.Canceled", err)
			}
			s.wantBroken(s.conn)
		}},
		{"Session/CloseEndsCall", "Close ends a call under way, with an error that is not libvirt's.", needTransfers, func(s *seam) {
			err := s.duringUpload(s.ctx, func() { _ = s.conn.Close() })
			if err == nil || codeOf(err) != 0 {
				s.Fatalf("got %v, want an error that is not libvirt's", err)
			}
			s.wantBroken(s.conn)
		}},
	}
}

// duringUpload starts an upload that never ends by itself, calls disturb while it is under way, and returns how the
// upload ended.
func (s *seam) duringUpload(ctx context.Context, disturb func()) error {
	s.Helper()
	s.rawVolume("stuck", 0)
	r, w := io.Pipe()
	defer func() { _ = w.Close() }()
	result := make(chan error, 1)
	go func() { result <- s.conn.UploadVolume(ctx, s.caps.Pool, s.name("stuck"), 0, r) }()
	// The write returns when it has been read, so the upload has begun by then.
	s.promptly("the upload's first read", func() { _, _ = w.Write([]byte("x")) })
	disturb()
	var err error
	s.promptly("the disturbed upload", func() { err = <-result })
	return err
}

func hostCases() []seamCase {
	return []seamCase{
		{"HostInfo/Complete", "HostInfo tells versions, architecture, CPUs and memory, and the domain types sorted.", "", func(s *seam) {
			i := get[kvm2.HostInfo](s, "HostInfo")(s.conn.HostInfo(s.ctx))
			if i.Hostname == "" || i.Libvirt < 1_000_000 || i.Hypervisor < 1_000_000 || i.Arch == "" || i.CPUs < 1 || i.MemoryBytes < 1<<20 {
				s.Errorf("got %+v, want every field filled", i)
			}
			if !slices.IsSorted(i.DomainTypes) || !slices.Contains(i.DomainTypes, s.caps.DomainType) {
				s.Errorf("got domain types %q, want them sorted and %q among them", i.DomainTypes, s.caps.DomainType)
			}
		}},
		{"Pool/Figures", "Pool tells name, state, directory and sizes.", "", func(s *seam) {
			p := s.pool()
			if p.Name != s.caps.Pool || !p.Active || !path.IsAbs(p.TargetPath) {
				s.Errorf("got %+v, want the active pool %q with an absolute path", p, s.caps.Pool)
			}
			if p.CapacityBytes <= 0 || p.AvailableBytes < 0 || p.AvailableBytes > p.CapacityBytes || p.AllocatedBytes > p.CapacityBytes {
				s.Errorf("got %+v, want sizes that agree", p)
			}
		}},
		{"Pool/Missing", "A pool that does not exist is code 49.", "", func(s *seam) {
			_, err := s.conn.Pool(s.ctx, s.name("none"))
			s.wantCode(err, 49)
		}},
		{"RefreshPool/KeepsVolumes", "RefreshPool finds the volumes that are there.", "", func(s *seam) {
			s.qcow2Volume("v", 1<<20)
			s.must(s.conn.RefreshPool(s.ctx, s.caps.Pool))
			if v := s.volume("v"); v.Format != "qcow2" || v.CapacityBytes != 1<<20 {
				s.Errorf("got %+v, want qcow2 of 1 MiB", v)
			}
		}},
		{"RefreshPool/Missing", "Refreshing a pool that does not exist is code 49.", "", func(s *seam) {
			s.wantCode(s.conn.RefreshPool(s.ctx, s.name("none")), 49)
		}},
		{"Network/Active", "Network tells name and state.", "", func(s *seam) {
			n := get[kvm2.Network](s, "Network")(s.conn.Network(s.ctx, s.caps.Network))
			if n.Name != s.caps.Network || !n.Active {
				s.Errorf("got %+v, want the active network %q", n, s.caps.Network)
			}
		}},
		{"Network/Missing", "A network that does not exist is code 43.", "", func(s *seam) {
			_, err := s.conn.Network(s.ctx, s.name("none"))
			s.wantCode(err, 43)
		}},
	}
}

func (s *seam) pool() kvm2.Pool {
	s.Helper()
	return get[kvm2.Pool](s, "Pool")(s.conn.Pool(s.ctx, s.caps.Pool))
}
