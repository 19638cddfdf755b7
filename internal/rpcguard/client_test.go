package rpcguard

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	libvirt "github.com/digitalocean/go-libvirt"
)

// host is a scripted daemon at the far end of a pipe. Its writes fail without
// notice once the guard has closed the connection.
type host struct{ conn net.Conn }

// next reads the next frame that the client sends, and reports whether there
// was one.
func (h host) next() (header, bool) {
	head := make([]byte, headerLen)
	if _, err := io.ReadFull(h.conn, head); err != nil {
		return header{}, false
	}
	got := parseHeader(head)
	_, err := io.CopyN(io.Discard, h.conn, int64(got.payload()))
	return got, err == nil
}

func (h host) send(frames ...[]byte) { _, _ = h.conn.Write(bytes.Join(frames, nil)) }

// login answers the calls that the client makes to connect.
func (h host) login() {
	authNone := []byte{0, 0, 0, 1, 0, 0, 0, 0}
	for _, payload := range [][]byte{authNone, nil} {
		call, _ := h.next()
		h.send(replyFrame(call.procedure, call.serial, payload...))
	}
}

// drain reads what the client sends until the connection is closed.
func (h host) drain() { _, _ = io.Copy(io.Discard, h.conn) }

type pipeDialer struct{ conn net.Conn }

func (d pipeDialer) Dial() (net.Conn, error) { return d.conn, nil }

// withClient runs use with a client that is connected through a guard to a host
// that follows script. It must be called in a synctest bubble, which at its end
// reports every goroutine that is left.
func withClient(t *testing.T, script func(host), use func(*libvirt.Libvirt, *Conn)) {
	t.Helper()
	near, far := net.Pipe()
	done := make(chan struct{})
	connected := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = far.Close() }()
		h := host{far}
		h.login()
		// The client itself has a race between the end of Connect and the end of
		// the connection; the script must not start it.
		<-connected
		script(h)
	}()
	guard := New(near)
	client := libvirt.NewWithDialer(pipeDialer{guard})
	if err := client.Connect(); err != nil {
		t.Fatalf("Connect: %v", err)
	}
	close(connected)
	use(client, guard)
	if err := guard.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	<-done
	<-client.Disconnected()
}

// soon returns what call returns, or an error if it does not return.
func soon(call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Hour):
		return errHangs
	}
}

var errHangs = errors.New("the call does not return")

func libVersion(client *libvirt.Libvirt) error {
	return soon(func() error { _, err := client.ConnectGetLibVersion(); return err })
}

func TestClient_SurvivesAHostileHost(t *testing.T) {
	garbage := func(h host) {
		random := rand.New(rand.NewPCG(1, 2))
		buf := make([]byte, 4096)
		for {
			for i := range buf {
				buf[i] = byte(random.Uint32())
			}
			if _, err := h.conn.Write(buf); err != nil {
				return
			}
		}
	}
	answer := func(frames func(call header) [][]byte) func(host) {
		return func(h host) {
			call, _ := h.next()
			h.send(frames(call)...)
			h.drain()
		}
	}
	tests := []struct {
		name    string
		script  func(host)
		wantErr any // what Err returns, for errors.As
	}{
		{"short length", answer(func(call header) [][]byte {
			call.length, call.typ = 27, typeReply
			return [][]byte{frame(call)}
		}), new(*FrameError)},
		{"zero length", answer(func(header) [][]byte { return [][]byte{make([]byte, 4)} }), new(*FrameError)},
		{"huge length", answer(func(call header) [][]byte {
			call.length, call.typ = 1<<32-1, typeReply
			return [][]byte{frame(call)}
		}), new(*FrameError)},
		{"truncated frame", func(h host) {
			call, _ := h.next()
			h.send(replyFrame(call.procedure, call.serial, make([]byte, 8)...)[:30])
		}, nil},
		{"truncated header", func(h host) {
			call, _ := h.next()
			h.send(replyFrame(call.procedure, call.serial)[:11])
		}, nil},
		{"wrong serial", answer(func(call header) [][]byte {
			return [][]byte{replyFrame(call.procedure, call.serial+1, make([]byte, 8)...)}
		}), new(*FrameError)},
		{"earlier serial", answer(func(call header) [][]byte {
			return [][]byte{replyFrame(call.procedure, call.serial-1, make([]byte, 8)...)}
		}), new(*FrameError)},
		{"event procedure", answer(func(call header) [][]byte {
			return [][]byte{replyFrame(318, call.serial, make([]byte, 8)...)}
		}), new(*FrameError)},
		{"reply before the call", func(h host) {
			h.send(replyFrame(procPlain, 3, make([]byte, 8)...))
			h.drain()
		}, new(*FrameError)},
		{"reply to half a call", func(h host) {
			_, _ = io.ReadFull(h.conn, make([]byte, 10))
			h.send(replyFrame(procPlain, 3, make([]byte, 8)...))
		}, nil},
		{"endless garbage", garbage, new(*FrameError)},
		{"close without an answer", func(h host) { h.next() }, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				withClient(t, test.script, func(client *libvirt.Libvirt, guard *Conn) {
					synctest.Wait()
					for range 2 {
						if err := libVersion(client); err == nil || errors.Is(err, errHangs) {
							t.Errorf("call: %v, want an error of the connection", err)
						}
					}
					if err := guard.Err(); err == nil || test.wantErr != nil && !errors.As(err, test.wantErr) {
						t.Errorf("Err() = %v, want %T", err, test.wantErr)
					}
					if err := soon(client.Disconnect); errors.Is(err, errHangs) {
						t.Errorf("Disconnect: %v", err)
					}
				})
			})
		})
	}
}

// Without the guard the client's read goroutine can block for good on the second
// reply, with a lock held that Disconnect needs. Whether it does is a race, so
// there are many tries.
func TestClient_SecondReplyDoesNotWedge(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			script := func(h host) {
				call, _ := h.next()
				reply := replyFrame(call.procedure, call.serial, make([]byte, 8)...)
				h.send(reply, reply, reply)
				h.drain()
			}
			withClient(t, script, func(client *libvirt.Libvirt, guard *Conn) {
				if err := libVersion(client); err != nil {
					t.Errorf("first reply: %v", err)
				}
				synctest.Wait()
				if err := libVersion(client); err == nil || errors.Is(err, errHangs) {
					t.Errorf("next call: %v, want an error of the connection", err)
				}
				if _, ok := errors.AsType[*FrameError](guard.Err()); !ok {
					t.Errorf("Err() = %v, want a *FrameError", guard.Err())
				}
			})
		})
	}
}

// streamError is the payload of what libvirtd 9.0.0 sends when a pool is full,
// shortened.
var streamError = append([]byte{
	0, 0, 0, 38, // code: VIR_ERR_SYSTEM_ERROR
	0, 0, 0, 38, // domain
	0, 0, 0, 1, // there is a message
	0, 0, 0, 4,
}, "full\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x1c\xff\xff\xff\xff\x00\x00\x00\x00"...)

// A daemon whose write fails while the client's finish request waits in its
// queue sends an error and then a confirmation: seen with libvirtd 9.0.0.
func TestClient_UploadErrorFollowedByConfirmationLeavesAUsableConnection(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			script := func(h host) {
				call, _ := h.next()
				h.send(replyFrame(call.procedure, call.serial))
				for {
					if packet, ok := h.next(); !ok || packet.status == statusOK {
						break
					}
				}
				h.send(
					streamFrame(call.procedure, call.serial, statusError, streamError...),
					streamFrame(call.procedure, call.serial, statusOK),
					streamFrame(call.procedure, call.serial, statusOK))
				for {
					next, ok := h.next()
					if !ok {
						return
					}
					if next.typ == typeCall {
						h.send(replyFrame(next.procedure, next.serial, make([]byte, 8)...))
					}
				}
			}
			withClient(t, script, func(client *libvirt.Libvirt, guard *Conn) {
				err := soon(func() error {
					return client.StorageVolUpload(libvirt.StorageVol{}, strings.NewReader("data"), 0, 0, 0)
				})
				if lvErr, ok := errors.AsType[libvirt.Error](err); !ok || lvErr.Code != 38 || lvErr.Message != "full" {
					t.Errorf("upload: %v, want the host's error 38", err)
				}
				if err := libVersion(client); err != nil {
					t.Errorf("next call: %v", err)
				}
				if stats := guard.Stats(); stats.Dropped != 2 {
					t.Errorf("dropped %d frames, want 2", stats.Dropped)
				}
			})
		})
	}
}

func TestClient_StreamsOfBothDirectionsPass(t *testing.T) {
	const content = "the content of a volume"
	synctest.Test(t, func(t *testing.T) {
		script := func(h host) {
			upload, _ := h.next()
			h.send(replyFrame(upload.procedure, upload.serial))
			for packet, _ := h.next(); packet.status == statusContinue; {
				packet, _ = h.next()
			}
			h.send(streamFrame(upload.procedure, upload.serial, statusOK))

			download, _ := h.next()
			h.send(replyFrame(download.procedure, download.serial))
			h.send(streamFrame(download.procedure, download.serial, statusContinue, []byte(content[:5])...))
			h.send(streamFrame(download.procedure, download.serial, statusContinue, []byte(content[5:])...))
			h.send(streamFrame(download.procedure, download.serial, statusContinue))
			h.send(streamFrame(download.procedure, download.serial, statusOK))
			h.drain()
		}
		withClient(t, script, func(client *libvirt.Libvirt, guard *Conn) {
			err := soon(func() error {
				return client.StorageVolUpload(libvirt.StorageVol{}, strings.NewReader(content), 0, 0, 0)
			})
			if err != nil {
				t.Errorf("upload: %v", err)
			}
			var got strings.Builder
			err = soon(func() error {
				return client.StorageVolDownload(libvirt.StorageVol{}, &got, 0, 0, 0)
			})
			if err != nil || got.String() != content {
				t.Errorf("download: %q, %v, want %q", got.String(), err, content)
			}
		})
	})
}

func TestClient_ManyCallsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		script := func(h host) {
			calls := make(chan header, 1000)
			go func() {
				defer close(calls)
				for {
					call, ok := h.next()
					if !ok {
						return
					}
					calls <- call
				}
			}()
			for call := range calls {
				h.send(replyFrame(call.procedure, call.serial, make([]byte, 8)...))
			}
		}
		withClient(t, script, func(client *libvirt.Libvirt, guard *Conn) {
			errs := make(chan error)
			for range 500 {
				go func() { errs <- libVersion(client) }()
			}
			for range 500 {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
			if stats := guard.Stats(); stats.Calls != 502 || stats.Replies != 502 {
				t.Errorf("stats = %+v, want 502 calls and replies", stats)
			}
		})
	})
}

// The list of procedures with a stream must be that of the client: a procedure
// that is missing would wait for packets that the guard drops.
func TestClient_EveryMethodWithAStreamIsKnown(t *testing.T) {
	reader, writer := reflect.TypeFor[io.Reader](), reflect.TypeFor[io.Writer]()
	clientType := reflect.TypeFor[*libvirt.Libvirt]()
	found := 0
	for method := range clientType.Methods() {
		var args []reflect.Value
		streams := false
		for j := 1; j < method.Type.NumIn(); j++ {
			switch in := method.Type.In(j); in {
			case reader:
				args, streams = append(args, reflect.ValueOf(strings.NewReader(""))), true
			case writer:
				args, streams = append(args, reflect.ValueOf(io.Discard)), true
			default:
				args = append(args, reflect.Zero(in))
			}
		}
		if !streams {
			continue
		}
		found++
		synctest.Test(t, func(t *testing.T) {
			script := func(h host) {
				call, _ := h.next()
				if !opensStream(call.program, call.procedure) {
					t.Errorf("%s: procedure %d is not known to open a stream", method.Name, call.procedure)
				}
			}
			withClient(t, script, func(client *libvirt.Libvirt, _ *Conn) {
				err := soon(func() error {
					method.Func.Call(append([]reflect.Value{reflect.ValueOf(client)}, args...))
					return nil
				})
				if err != nil {
					t.Errorf("%s: %v", method.Name, err)
				}
			})
		})
	}
	if found == 0 {
		t.Error("no method with a stream found")
	}
}
