package rpcguard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// frame returns the bytes of a frame with the header h and the payload. A length
// of zero in h stands for the right one.
func frame(h header, payload ...byte) []byte {
	if h.length == 0 {
		h.length = headerLen + uint32(len(payload))
	}
	var b []byte
	for _, w := range []uint32{h.length, h.program, h.version, h.procedure, h.typ, h.serial, h.status} {
		b = binary.BigEndian.AppendUint32(b, w)
	}
	return append(b, payload...)
}

func callFrame(procedure, serial uint32, payload ...byte) []byte {
	return frame(header{program: remoteProgram, version: 1, procedure: procedure, serial: serial}, payload...)
}

func replyFrame(procedure, serial uint32, payload ...byte) []byte {
	return frame(header{program: remoteProgram, version: 1, procedure: procedure, typ: typeReply, serial: serial}, payload...)
}

func streamFrame(procedure, serial, status uint32, payload ...byte) []byte {
	return frame(header{program: remoteProgram, version: 1, procedure: procedure, typ: typeStream, serial: serial, status: status}, payload...)
}

// scriptConn is a connection of which the host's half is known beforehand.
type scriptConn struct {
	net.Conn
	in     io.Reader
	out    bytes.Buffer
	closed int
}

func (c *scriptConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *scriptConn) Write(p []byte) (int, error) { return c.out.Write(p) }
func (c *scriptConn) Close() error                { c.closed++; return nil }

// guarded returns a guard over which calls have been made and that then reads
// in.
func guarded(tb testing.TB, in io.Reader, calls ...[]byte) (*Conn, *scriptConn) {
	tb.Helper()
	inner := &scriptConn{in: in}
	c := New(inner)
	for _, call := range calls {
		if _, err := c.Write(call); err != nil {
			tb.Fatal(err)
		}
	}
	return c, inner
}

const (
	procPlain  = 157 // CONNECT_GET_LIB_VERSION
	procUpload = 208 // STORAGE_VOL_UPLOAD
)

func TestRead_BadFrameEndsTheConnection(t *testing.T) {
	plain := header{program: remoteProgram, version: 1, procedure: procPlain, typ: typeReply, serial: 1}
	tests := []struct {
		name string
		in   []byte
		why  string
	}{
		{"shorter than a header", withLength(plain, headerLen-1), "go-libvirt panics on it"},
		{"zero", []byte{0, 0, 0, 0}, "a length alone is judged at once"},
		{"just the length word", withLength(plain, 4), ""},
		{"longer than the protocol allows", withLength(plain, maxFrameLen+1), ""},
		{"longest number", withLength(plain, 1<<32-1), "it must not turn negative"},
		{"unknown serial", replyFrame(procPlain, 7), ""},
		{"serial zero", replyFrame(procPlain, 0), ""},
		{"second reply", append(replyFrame(procPlain, 1), replyFrame(procPlain, 1)...), "it would block the client for good"},
		{"second reply to a stream", append(replyFrame(procUpload, 2), replyFrame(procUpload, 2)...), ""},
		{"other procedure", replyFrame(procPlain+1, 1), "the procedure of an event would swallow the reply"},
		{"other program", frame(header{program: 0x20008087, version: 1, procedure: procPlain, typ: typeReply, serial: 1}), ""},
		{"other version", frame(header{program: remoteProgram, version: 2, procedure: procPlain, typ: typeReply, serial: 1}), ""},
		{"reply to be continued", frame(header{program: remoteProgram, version: 1, procedure: procPlain, typ: typeReply, serial: 1, status: statusContinue}), "the client would take it for success"},
		{"reply with an unknown status", frame(header{program: remoteProgram, version: 1, procedure: procPlain, typ: typeReply, serial: 1, status: 9}), ""},
		{"call from the host", callFrame(procPlain, 1), ""},
		{"reply with file descriptors", frame(header{program: remoteProgram, version: 1, procedure: procPlain, typ: 5, serial: 1}), "the client does not read them"},
		{"stream hole", frame(header{program: remoteProgram, version: 1, procedure: procUpload, typ: 6, serial: 2}), "the client would write it as data"},
		{"unknown type", frame(header{program: remoteProgram, version: 1, procedure: procPlain, typ: 77, serial: 1}), ""},
		{"stream before the reply", streamFrame(procUpload, 2, statusContinue, 1), "the client would take it for the reply"},
		{"stream of a call that has none", streamFrame(procPlain, 1, statusOK), ""},
		{"stream with an unknown status", streamFrame(procUpload, 99, 3), ""},
		{"stream of another procedure", append(replyFrame(procUpload, 2), streamFrame(procUpload+1, 2, statusOK)...), ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			never := readerFunc(func([]byte) (int, error) { t.Fatal("read on after a bad frame"); return 0, nil })
			c, inner := guarded(t, io.MultiReader(bytes.NewReader(test.in), never), callFrame(procPlain, 1), callFrame(procUpload, 2))

			_, err := io.ReadAll(c)
			var frameErr *FrameError
			if !errors.As(err, &frameErr) {
				t.Fatalf("Read error = %v, want a *FrameError: %s", err, test.why)
			}
			if inner.closed != 1 {
				t.Errorf("connection closed %d times, want once", inner.closed)
			}
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, frameErr) {
				t.Errorf("next Read error = %v, want the same", err)
			}
			if _, err := c.Write(callFrame(procPlain, 3)); !errors.Is(err, frameErr) {
				t.Errorf("next Write error = %v, want the same", err)
			}
			if !errors.Is(c.Err(), frameErr) {
				t.Errorf("Err() = %v, want the same", c.Err())
			}
		})
	}
}

func withLength(h header, length uint32) []byte {
	h.length = length
	return frame(h)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestRead_BadFrameNeverReachesTheReader(t *testing.T) {
	good := replyFrame(procPlain, 1, 1, 2, 3, 4)
	bad := replyFrame(procPlain, 9, 5, 6, 7, 8)
	c, _ := guarded(t, bytes.NewReader(append(bytes.Clone(good), bad...)), callFrame(procPlain, 1))

	got, err := io.ReadAll(c)
	if !bytes.Equal(got, good) {
		t.Errorf("read % x, want % x", got, good)
	}
	if _, ok := errors.AsType[*FrameError](err); !ok {
		t.Errorf("error = %v, want a *FrameError", err)
	}
}

func TestRead_LongestFramePasses(t *testing.T) {
	const size = maxFrameLen - headerLen
	in := io.MultiReader(
		bytes.NewReader(withLength(header{program: remoteProgram, version: 1, procedure: procPlain, typ: typeReply, serial: 1}, maxFrameLen)),
		io.LimitReader(zeros{}, size))
	c, _ := guarded(t, in, callFrame(procPlain, 1))

	n, err := io.Copy(io.Discard, c)
	if n != maxFrameLen || err != nil {
		t.Errorf("read %d bytes, error %v, want %d and none", n, err, maxFrameLen)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func TestRead_SurplusOfAStreamIsDropped(t *testing.T) {
	reply := replyFrame(procUpload, 1)
	tests := []struct {
		name string
		end  []byte
	}{
		{"after an error", streamFrame(procUpload, 1, statusError, 0, 0, 0, 38)},
		{"after a confirmation", streamFrame(procUpload, 1, statusOK)},
		{"after an end of file", streamFrame(procUpload, 1, statusContinue)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var in []byte
			in = append(in, reply...)
			in = append(in, streamFrame(procUpload, 1, statusContinue, 1, 2, 3)...)
			in = append(in, test.end...)
			want := bytes.Clone(in)
			in = append(in, streamFrame(procUpload, 1, statusOK)...)
			in = append(in, streamFrame(procUpload, 1, statusError, 9, 9, 9, 9)...)
			in = append(in, streamFrame(procUpload, 4711, statusContinue, make([]byte, 5000)...)...)
			in = append(in, replyFrame(procPlain, 2, 8)...)
			want = append(want, replyFrame(procPlain, 2, 8)...)

			c, _ := guarded(t, bytes.NewReader(in), callFrame(procUpload, 1), callFrame(procPlain, 2))
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("read % x, error %v\nwant % x", got, err, want)
			}
			if stats := c.Stats(); stats.Dropped != 3 {
				t.Errorf("dropped %d frames, want 3", stats.Dropped)
			}
		})
	}
}

func TestRead_MessagesAreDropped(t *testing.T) {
	event := frame(header{program: remoteProgram, version: 1, procedure: 318, typ: typeMessage, serial: 1}, make([]byte, 40)...)
	ping := frame(header{program: 0x6b656570, version: 1, procedure: 1, typ: typeMessage})
	reply := replyFrame(procPlain, 1, 1, 2, 3, 4)
	c, inner := guarded(t, bytes.NewReader(bytes.Join([][]byte{event, ping, reply, event}, nil)), callFrame(procPlain, 1))
	inner.out.Reset()

	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, reply) {
		t.Errorf("read % x, error %v, want % x", got, err, reply)
	}
	if inner.out.Len() > 0 {
		t.Errorf("guard wrote % x of its own", inner.out.Bytes())
	}
	if stats := c.Stats(); stats.Dropped != 3 || stats.Replies != 1 {
		t.Errorf("stats = %+v, want 3 dropped and 1 reply", stats)
	}
}

func TestRead_CutOffFrameIsUnexpectedEOF(t *testing.T) {
	reply := replyFrame(procPlain, 1, 1, 2, 3, 4)
	for cut := range len(reply) + 1 {
		c, inner := guarded(t, bytes.NewReader(reply[:cut]), callFrame(procPlain, 1))
		_, err := readAll(c)
		want := io.ErrUnexpectedEOF
		if cut == 0 || cut == len(reply) {
			want = io.EOF
		}
		if err != want { //nolint:errorlint // the client compares io.EOF by identity
			t.Errorf("cut at %d: error %v, want %v", cut, err, want)
		}
		if inner.closed != 1 {
			t.Errorf("cut at %d: connection closed %d times, want once", cut, inner.closed)
		}
	}
}

// readAll is io.ReadAll without hiding io.EOF.
func readAll(r io.Reader) ([]byte, error) {
	var all []byte
	buf := make([]byte, 512)
	for {
		n, err := r.Read(buf)
		all = append(all, buf[:n]...)
		if err != nil {
			return all, err
		}
	}
}

func TestRead_LastFrameArrivesTogetherWithTheError(t *testing.T) {
	reply := replyFrame(procPlain, 1)
	first := true
	in := readerFunc(func(p []byte) (int, error) {
		if first {
			first = false
			return copy(p, reply[:10]), nil
		}
		return copy(p, reply[10:]), io.EOF
	})
	c, _ := guarded(t, in, callFrame(procPlain, 1))
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, reply) {
		t.Errorf("read % x, error %v, want % x", got, err, reply)
	}
}

func TestRead_TemporaryErrorIsFinalAndNoOpError(t *testing.T) {
	tests := []struct {
		name string
		err  error
	}{
		{"timeout of a deadline", &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
		{"timeout of the connection", &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ETIMEDOUT)}},
		{"reset", &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			reads := 0
			c, inner := guarded(t, readerFunc(func([]byte) (int, error) { reads++; return 0, test.err }))
			for range 3 {
				_, err := c.Read(make([]byte, 100))
				if !errors.Is(err, test.err) {
					t.Errorf("error = %v, want it to wrap %v", err, test.err)
				}
				if _, ok := err.(*net.OpError); ok { //nolint:errorlint // the client asserts the type itself
					t.Error("error is a bare *net.OpError")
				}
			}
			if reads != 1 || inner.closed != 1 {
				t.Errorf("%d reads and %d closes, want one each", reads, inner.closed)
			}
		})
	}
}

func TestRead_AnyBufferSizeGivesTheSameBytes(t *testing.T) {
	var in, want []byte
	for serial := range uint32(20) {
		part := replyFrame(procPlain, serial+1, make([]byte, serial*serial)...)
		in = append(in, part...)
		want = append(want, part...)
		in = append(in, streamFrame(procUpload, 1000, statusContinue, make([]byte, serial*7)...)...)
	}
	for size := 1; size < 200; size++ {
		var calls [][]byte
		for serial := range uint32(20) {
			calls = append(calls, callFrame(procPlain, serial+1))
		}
		c, _ := guarded(t, bytes.NewReader(in), calls...)
		got, err := io.ReadAll(struct{ io.Reader }{readerFunc(func(p []byte) (int, error) {
			return c.Read(p[:min(size, len(p))])
		})})
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("buffer of %d: error %v, bytes equal %t", size, err, bytes.Equal(got, want))
		}
	}
}

func TestRead_PayloadIsNotBuffered(t *testing.T) {
	const frames, size = 64, 256 << 10
	head := withLength(header{program: remoteProgram, version: 1, procedure: 209, typ: typeStream, serial: 1, status: statusContinue}, size+headerLen)
	c, inner := guarded(t, bytes.NewReader(replyFrame(209, 1)), callFrame(209, 1))
	buf := make([]byte, size)
	if _, err := io.ReadFull(c, buf[:headerLen]); err != nil {
		t.Fatal(err)
	}
	source := bytes.NewReader(head)
	inner.in = readerFunc(func(p []byte) (int, error) {
		if n, _ := source.Read(p); n > 0 {
			return n, nil
		}
		return len(p), nil
	})
	allocs := testing.AllocsPerRun(frames, func() {
		source.Reset(head)
		if _, err := io.ReadFull(c, buf[:headerLen]); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for a frame, want none", allocs)
	}
}

func TestWrite_BytesPassUnchangedInAnySplit(t *testing.T) {
	all := bytes.Join([][]byte{
		callFrame(procUpload, 1, make([]byte, 99)...),
		streamFrame(procUpload, 1, statusContinue, make([]byte, 300)...),
		callFrame(procPlain, 2),
		streamFrame(procUpload, 1, statusOK),
		callFrame(procPlain, 3, 1),
	}, nil)
	for size := 1; size <= len(all); size++ {
		c, inner := guarded(t, nil)
		for rest := all; len(rest) > 0; rest = rest[min(size, len(rest)):] {
			if n, err := c.Write(rest[:min(size, len(rest))]); err != nil || n != min(size, len(rest)) {
				t.Fatalf("split by %d: Write = %d, %v", size, n, err)
			}
		}
		if !bytes.Equal(inner.out.Bytes(), all) {
			t.Fatalf("split by %d: bytes changed", size)
		}
		if stats := c.Stats(); stats.Calls != 3 || stats.BytesOut != uint64(len(all)) {
			t.Fatalf("split by %d: stats = %+v, want 3 calls and %d bytes", size, stats, len(all))
		}
	}
}

func TestWrite_DoesNotAllocatePerStreamPacket(t *testing.T) {
	packet := streamFrame(procUpload, 1, statusContinue, make([]byte, 256<<10)...)
	c := New(discardConn{})
	if allocs := testing.AllocsPerRun(50, func() { _, _ = c.Write(packet) }); allocs > 0 {
		t.Errorf("%v allocations a packet, want none", allocs)
	}
}

type discardConn struct{ net.Conn }

func (discardConn) Write(p []byte) (int, error) { return len(p), nil }

func TestWrite_OversizedCallIsRefused(t *testing.T) {
	c, inner := guarded(t, nil)
	_, err := c.Write(withLength(header{program: remoteProgram, version: 1, serial: 1}, maxFrameLen+1))
	if _, ok := errors.AsType[*FrameError](err); !ok {
		t.Errorf("error = %v, want a *FrameError", err)
	}
	if inner.out.Len() > 0 || inner.closed != 1 {
		t.Errorf("%d bytes written, closed %d times", inner.out.Len(), inner.closed)
	}
}

func TestWrite_ErrorEndsTheConnection(t *testing.T) {
	near, far := net.Pipe()
	if err := far.Close(); err != nil {
		t.Fatal(err)
	}
	c := New(near)
	_, err := c.Write(callFrame(procPlain, 1))
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("error = %v, want the connection's", err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Read error = %v, want that of the write", err)
	}
}

func TestRead_ReplyToAHalfWrittenCallWaits(t *testing.T) {
	tests := []struct {
		name   string
		finish func(far net.Conn)
		want   bool
	}{
		{"and passes once it is written", func(far net.Conn) {
			buf := make([]byte, 1000)
			if _, err := io.ReadFull(far, buf); err != nil {
				t.Error(err)
			}
		}, true},
		{"and is withheld when writing fails", func(far net.Conn) { _ = far.Close() }, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				c := New(near)
				defer func() { _ = c.Close() }()
				defer func() { _ = far.Close() }()

				go func() { _, _ = c.Write(callFrame(procPlain, 1, make([]byte, 1000)...)) }()
				if _, err := io.ReadFull(far, make([]byte, headerLen)); err != nil {
					t.Fatal(err)
				}
				passed := make(chan bool, 1)
				go func() {
					n, err := c.Read(make([]byte, 100))
					passed <- n > 0 && err == nil
				}()
				if _, err := far.Write(replyFrame(procPlain, 1)); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				select {
				case <-passed:
					t.Fatal("the read returned while the call was being written")
				default:
				}
				test.finish(far)
				if got := <-passed; got != test.want {
					t.Errorf("reply passed = %t, want %t", got, test.want)
				}
			})
		})
	}
}

func TestClose_EndsABlockedReadAndIsIdempotent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer func() { _ = far.Close() }()
		c := New(near)
		read := make(chan error, 1)
		go func() {
			_, err := c.Read(make([]byte, 100))
			read <- err
		}()
		synctest.Wait()
		for range 2 {
			if err := c.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if err := <-read; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Read error = %v, want net.ErrClosed", err)
		}
		if !errors.Is(c.Err(), net.ErrClosed) {
			t.Errorf("Err() = %v, want net.ErrClosed", c.Err())
		}
	})
}

func TestRead_PassedDeadlineEndsTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer func() { _ = far.Close() }()
		c := New(near)
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("error = %v, want os.ErrDeadlineExceeded", err)
		}
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("far end: %v, want io.EOF", err)
		}
	})
}

func TestStats_CountsRoundTripsAndBytes(t *testing.T) {
	in := bytes.Join([][]byte{
		replyFrame(procPlain, 1, 1, 2, 3, 4),
		replyFrame(procUpload, 2),
		streamFrame(procUpload, 2, statusOK),
		streamFrame(procUpload, 2, statusOK),
	}, nil)
	calls := [][]byte{callFrame(procPlain, 1), callFrame(procUpload, 2), streamFrame(procUpload, 2, statusOK)}
	c, _ := guarded(t, bytes.NewReader(in), calls...)
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Fatal(err)
	}
	want := Stats{BytesIn: uint64(len(in)), BytesOut: 3 * headerLen, Calls: 2, Replies: 2, Dropped: 1}
	if got := c.Stats(); got != want {
		t.Errorf("Stats() = %+v, want %+v", got, want)
	}
}
