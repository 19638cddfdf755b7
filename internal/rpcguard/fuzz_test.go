package rpcguard

import (
	"bytes"
	"io"
	"testing"
)

// FuzzRead feeds the guard any bytes in any portions, after calls with the
// serials 1 to 8 were made, and checks what comes out against the rules.
func FuzzRead(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add(replyFrame(procPlain, 1, 1, 2, 3), []byte{1})
	f.Add(append(replyFrame(procUpload, 2), streamFrame(procUpload, 2, statusError, 1)...), []byte{5, 30})
	f.Add(bytes.Join([][]byte{
		replyFrame(procUpload, 4), streamFrame(procUpload, 4, statusContinue, 1, 2), streamFrame(procUpload, 4, statusOK),
		streamFrame(procUpload, 4, statusOK), replyFrame(procPlain, 1),
	}, nil), []byte{29, 1, 255})
	f.Add(frame(header{program: 0x6b656570, version: 1, procedure: 1, typ: typeMessage}), []byte{27})
	f.Add(withLength(header{typ: typeReply}, 27), []byte{3})
	f.Add(withLength(header{typ: typeReply}, maxFrameLen+1), []byte{4})
	f.Add(append(replyFrame(procPlain, 3), replyFrame(procPlain, 3)...), []byte{0})

	f.Fuzz(func(t *testing.T, in, portions []byte) {
		got, err := readGuarded(t, in, portions)
		whole, wholeErr := readGuarded(t, in, nil)
		if !bytes.Equal(got, whole) || err.Error() != wholeErr.Error() {
			t.Fatalf("the portions matter: %d bytes and %v, at once %d bytes and %v", len(got), err, len(whole), wholeErr)
		}
		checkOutput(t, got)
	})
}

// readGuarded reads in through a guard until the error. The portions are the
// sizes of the reads on both sides of it, in turn.
func readGuarded(t *testing.T, in, portions []byte) ([]byte, error) {
	t.Helper()
	source := bytes.NewReader(in)
	turn := 0
	size := func(all int) int {
		if len(portions) == 0 {
			return all
		}
		turn++
		return min(int(portions[turn%len(portions)])+1, all)
	}
	inner := readerFunc(func(p []byte) (int, error) { return source.Read(p[:size(len(p))]) })
	var calls [][]byte
	for serial := range uint32(8) {
		procedure := uint32(procPlain)
		if serial%2 == 1 {
			procedure = procUpload
		}
		calls = append(calls, callFrame(procedure, serial+1))
	}
	c, _ := guarded(t, inner, calls...)

	var out []byte
	buf := make([]byte, 4096)
	for {
		n, err := c.Read(buf[:size(len(buf))])
		out = append(out, buf[:n]...)
		if err != nil {
			return out, err
		}
	}
}

// checkOutput fails unless out is a sequence of frames, the last perhaps cut
// off, that the client can take.
func checkOutput(t *testing.T, out []byte) {
	t.Helper()
	replied, ended := map[uint32]bool{}, map[uint32]bool{}
	for len(out) > 0 {
		if len(out) < headerLen {
			t.Fatal("a part of a header was passed on")
		}
		h := parseHeader(out)
		if checkLength(h.length) != nil {
			t.Fatalf("length %d was passed on", h.length)
		}
		if h.serial < 1 || h.serial > 8 {
			t.Fatalf("a frame for serial %d was passed on", h.serial)
		}
		switch {
		case h.typ == typeReply && !replied[h.serial]:
			replied[h.serial], ended[h.serial] = true, h.status != statusOK
		case h.typ == typeStream && replied[h.serial] && !ended[h.serial] && h.serial%2 == 0:
			ended[h.serial] = h.status != statusContinue || h.payload() == 0
		default:
			t.Fatalf("frame %+v was passed on", h)
		}
		out = out[min(len(out), int(h.length)):]
	}
}

func BenchmarkRead(b *testing.B) {
	const size = 256 << 10
	packet := streamFrame(209, 1, statusContinue, make([]byte, size)...)
	source := bytes.NewReader(nil)
	inner := readerFunc(func(p []byte) (int, error) {
		if source.Len() == 0 {
			source.Reset(packet)
		}
		return source.Read(p)
	})
	c, scripted := guarded(b, bytes.NewReader(replyFrame(209, 1)), callFrame(209, 1))
	if _, err := io.ReadFull(c, make([]byte, headerLen)); err != nil {
		b.Fatal(err)
	}
	scripted.in = inner
	b.SetBytes(int64(len(packet)))
	buf := make([]byte, len(packet))
	for b.Loop() {
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	packet := streamFrame(procUpload, 1, statusContinue, make([]byte, 256<<10)...)
	c := New(discardConn{})
	b.SetBytes(int64(len(packet)))
	for b.Loop() {
		if _, err := c.Write(packet); err != nil {
			b.Fatal(err)
		}
	}
}
