package kvm2

import (
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"testing"
	"time"
)

// rpcFrame is a frame of libvirt's RPC protocol with a length word of its own.
func rpcFrame(length, program, procedure, typ, serial, status uint32, payload []byte) []byte {
	var b []byte
	for _, word := range []uint32{length, program, 1, procedure, typ, serial, status} {
		b = binary.BigEndian.AppendUint32(b, word)
	}
	return append(b, payload...)
}

// rpcPeer is a daemon that lets a client log in and then misbehaves.
type rpcPeer struct{ net.Conn }

// rpcHead is what a peer looks at of a frame.
type rpcHead struct{ procedure, typ, serial, status uint32 }

// frame reads the next frame and drops its payload.
func (p rpcPeer) frame() (rpcHead, error) {
	head := make([]byte, 28)
	if _, err := io.ReadFull(p, head); err != nil {
		return rpcHead{}, err
	}
	_, err := io.CopyN(io.Discard, p, int64(binary.BigEndian.Uint32(head))-28)
	word := func(i int) uint32 { return binary.BigEndian.Uint32(head[4*i:]) }
	return rpcHead{procedure: word(3), typ: word(4), serial: word(5), status: word(6)}, err
}

// call reads the next call and returns its procedure and serial.
func (p rpcPeer) call() (procedure, serial uint32, err error) {
	head, err := p.frame()
	return head.procedure, head.serial, err
}

func (p rpcPeer) reply(procedure, serial uint32, payload []byte) {
	_, _ = p.Write(rpcFrame(uint32(28+len(payload)), remoteProgramNumber, procedure, 1, serial, 0, payload))
}

const remoteProgramNumber = 0x20008086

// login answers what a client asks when it connects.
func (p rpcPeer) login() {
	for _, payload := range [][]byte{{0, 0, 0, 1, 0, 0, 0, 0}, nil} {
		procedure, serial, err := p.call()
		if err != nil {
			return
		}
		p.reply(procedure, serial, payload)
	}
}

func TestSession_HostilePeersAreBounded(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	endless := func(frame []byte) func(rpcPeer) {
		return func(p rpcPeer) {
			for {
				if _, err := p.Write(frame); err != nil {
					return
				}
			}
		}
	}
	answer := func(frame func(procedure, serial uint32) []byte) func(rpcPeer) {
		return func(p rpcPeer) {
			if procedure, serial, err := p.call(); err == nil {
				_, _ = p.Write(frame(procedure, serial))
			}
			_, _ = io.Copy(io.Discard, p)
		}
	}
	lie := func(length, program, procedure, serial uint32) func(rpcPeer) {
		return answer(func(asked, number uint32) []byte {
			return rpcFrame(length, program, asked+procedure, 1, number+serial, 0, nil)
		})
	}
	peers := map[string]func(rpcPeer){
		"length too short":  lie(27, remoteProgramNumber, 0, 0),
		"length too long":   lie(1<<31, remoteProgramNumber, 0, 0),
		"wrong serial":      lie(28, remoteProgramNumber, 0, 1),
		"wrong program":     lie(28, 1, 0, 0),
		"wrong procedure":   lie(28, remoteProgramNumber, 1, 0),
		"truncated payload": lie(1<<20, remoteProgramNumber, 0, 0),
		"endless list": answer(func(asked, serial uint32) []byte {
			return rpcFrame(32, remoteProgramNumber, asked, 1, serial, 0, []byte{0x7f, 0xff, 0xff, 0xff})
		}),
		"endless events": endless(rpcFrame(32, remoteProgramNumber, 318, 2, 0, 0, make([]byte, 4))),
		"endless stream": endless(rpcFrame(28+4096, remoteProgramNumber, 209, 3, 9, 2, make([]byte, 4096))),
		"garbage": func(p rpcPeer) {
			buf := make([]byte, 4096)
			for i := range buf {
				buf[i] = byte(random.Uint32())
			}
			endless(buf)(p)
		},
		"closed": func(rpcPeer) {},
	}
	for name, misbehave := range peers {
		t.Run(name, func(t *testing.T) { hostilePeer(t, misbehave) })
	}
}

func hostilePeer(t *testing.T, misbehave func(rpcPeer)) {
	near, far := net.Pipe()
	done, connected := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = far.Close() }()
		p := rpcPeer{far}
		p.login()
		<-connected
		misbehave(p)
	}()
	d := (&stubDialer{}).decorator(io.Discard)
	d.timeout = 200 * time.Millisecond
	conn, err := openLibvirt(t.Context(), near, "qemu:///system")
	if err != nil {
		t.Fatal(err)
	}
	s := &session{conn: conn, d: d}
	close(connected)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err = s.Domains(ctx)
	runtime.ReadMemStats(&after)
	if err == nil || ClassOf(err) != ClassTransient || !s.broken || ctx.Err() != nil {
		t.Errorf("Domains() = %v (%s), broken %t; want Transient and a session that is given up", err, ClassOf(err), s.broken)
	}
	if alloc := after.TotalAlloc - before.TotalAlloc; alloc > 64<<20 {
		t.Errorf("%d bytes were allocated", alloc)
	}
	_ = s.Close()
	<-done
	<-conn.client.Disconnected() // the client's own goroutine has ended
}
