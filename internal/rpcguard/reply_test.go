package rpcguard

import (
	"bytes"
	"errors"
	"net"
	"runtime"
	"testing"

	libvirt "github.com/digitalocean/go-libvirt"
)

// serve gives a client, once it is connected, one reply with the payload to the one call that it makes. It returns
// what that made the process allocate, and the error of the call.
func serve(t testing.TB, status uint32, payload []byte, call func(*libvirt.Libvirt) error) (uint64, error) {
	t.Helper()
	near, far := net.Pipe()
	connected, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = far.Close() }()
		h := host{far}
		h.login()
		<-connected
		got, ok := h.next()
		if !ok {
			return
		}
		h.send(frame(header{
			program: remoteProgram, version: 1, procedure: got.procedure, typ: typeReply, serial: got.serial, status: status,
		}, payload...))
	}()
	guard := New(near)
	client := libvirt.NewWithDialer(pipeDialer{BoundReplies(guard)})
	if err := client.Connect(); err != nil {
		t.Fatalf("Connect: %v", err)
	}
	close(connected)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := call(client)
	runtime.ReadMemStats(&after)
	_ = guard.Close()
	<-done
	<-client.Disconnected()
	if frameErr, ok := errors.AsType[*FrameError](guard.Err()); ok {
		err = frameErr
	}
	return after.TotalAlloc - before.TotalAlloc, err
}

// lists are the calls whose replies have lengths in them.
var lists = map[string]func(*libvirt.Libvirt) error{
	"host name": func(c *libvirt.Libvirt) error { _, err := c.ConnectGetHostname(); return err },
	"domain":    func(c *libvirt.Libvirt) error { _, err := c.DomainLookupByName("x"); return err },
	"define":    func(c *libvirt.Libvirt) error { _, err := c.DomainDefineXMLFlags("x", 0); return err },
	"stats":     func(c *libvirt.Libvirt) error { _, err := c.ConnectGetAllDomainStats(nil, 1, 0); return err },
	"metadata":  func(c *libvirt.Libvirt) error { _, err := c.DomainGetMetadata(libvirt.Domain{}, 2, nil, 0); return err },
	"addresses": func(c *libvirt.Libvirt) error {
		_, err := c.DomainInterfaceAddresses(libvirt.Domain{}, 0, 0)
		return err
	},
	"leases": func(c *libvirt.Libvirt) error {
		_, _, err := c.NetworkGetDhcpLeases(libvirt.Network{}, nil, 1, 0)
		return err
	},
	"volumes": func(c *libvirt.Libvirt) error {
		_, _, err := c.StoragePoolListAllVolumes(libvirt.StoragePool{}, 1, 0)
		return err
	},
	"pool":    func(c *libvirt.Libvirt) error { _, err := c.StoragePoolLookupByName("x"); return err },
	"network": func(c *libvirt.Libvirt) error { _, err := c.NetworkLookupByName("x"); return err },
	"pool XML": func(c *libvirt.Libvirt) error {
		_, err := c.StoragePoolGetXMLDesc(libvirt.StoragePool{}, 0)
		return err
	},
	"volume": func(c *libvirt.Libvirt) error {
		_, err := c.StorageVolCreateXML(libvirt.StoragePool{}, "x", 0)
		return err
	},
	"volume XML": func(c *libvirt.Libvirt) error {
		_, err := c.StorageVolGetXMLDesc(libvirt.StorageVol{}, 0)
		return err
	},
	"capabilities": func(c *libvirt.Libvirt) error { _, err := c.ConnectGetCapabilities(); return err },
}

func TestBoundReplies_ClaimsAreNotBelieved(t *testing.T) {
	const limit = 4 << 20
	claim := []byte{0x08, 0, 0, 0} // 2^27 elements
	for name, call := range lists {
		t.Run(name, func(t *testing.T) {
			alloc, err := serve(t, statusOK, claim, call)
			if _, ok := errors.AsType[*FrameError](err); !ok || alloc > limit {
				t.Errorf("%d bytes allocated, error %v; want a FrameError and less than %d", alloc, err, limit)
			}
			alloc, err = serve(t, statusError, append(make([]byte, 12), claim...), call)
			if _, ok := errors.AsType[*FrameError](err); !ok || alloc > limit {
				t.Errorf("as an error: %d bytes allocated, error %v; want a FrameError and less than %d", alloc, err, limit)
			}
		})
	}
	t.Run("nested", func(t *testing.T) {
		record := append([]byte{0, 0, 0, 1}, make([]byte, 24)...) // one domain without a name
		alloc, err := serve(t, statusOK, append(record, claim...), lists["stats"])
		if _, ok := errors.AsType[*FrameError](err); !ok || alloc > limit {
			t.Errorf("%d bytes allocated, error %v; want a FrameError and less than %d", alloc, err, limit)
		}
	})
}

func TestBoundReplies_WhatIsTruePasses(t *testing.T) {
	str := []byte{0, 0, 0, 3, 'a', 'b', 'c', 0}
	record := bytes.Join([][]byte{
		{0, 0, 0, 1},
		str, make([]byte, 20),
		{0, 0, 0, 2},
		str,
		{0, 0, 0, 1, 0, 0, 0, 5},
		str,
		{0, 0, 0, 7},
		str,
	}, nil)
	if _, err := serve(t, statusOK, record, lists["stats"]); err != nil {
		t.Errorf("stats: %v", err)
	}
	if _, err := serve(t, statusOK, str, lists["host name"]); err != nil {
		t.Errorf("host name: %v", err)
	}
	lease := bytes.Join([][]byte{
		{0, 0, 0, 1},
		str, make([]byte, 12),
		{0, 0, 0, 1},
		str,
		{0, 0, 0, 0},
		str, make([]byte, 4),
		{0, 0, 0, 1},
		str,
		{0, 0, 0, 0},
		{0, 0, 0, 1},
	}, nil)
	if _, err := serve(t, statusOK, lease, lists["leases"]); err != nil {
		t.Errorf("leases: %v", err)
	}
}

// FuzzReply gives the client any payload as the reply to any of the calls: no panic, no claim that is believed.
func FuzzReply(f *testing.F) {
	names := []string{"stats", "leases", "addresses", "volumes", "domain", "host name", "volume"}
	for i := range names {
		f.Add(uint8(i), false, []byte{0, 0, 0, 1, 0, 0, 0, 0})
		f.Add(uint8(i), true, append(make([]byte, 12), 0x7f, 0xff, 0xff, 0xff))
	}
	f.Fuzz(func(t *testing.T, which uint8, failed bool, payload []byte) {
		var status uint32 = statusOK
		if failed {
			status = statusError
		}
		alloc, _ := serve(t, status, payload, lists[names[int(which)%len(names)]])
		if limit := uint64(1<<20 + 64*len(payload)); alloc > limit {
			t.Errorf("a reply of %d bytes made it allocate %d", len(payload), alloc)
		}
	})
}
