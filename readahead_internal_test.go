package kvm2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/iotest"
	"testing/synctest"
)

// drain takes everything that a readAhead has.
func drain(a *readAhead) ([]byte, error) {
	var got []byte
	for {
		piece, err := a.next()
		if err != nil {
			return got, err
		}
		got = append(got, piece...)
	}
}

func TestReadAhead_GivesAllThatTheSourceHas(t *testing.T) {
	for _, size := range []int{0, 1, readAheadBytes - 1, readAheadBytes, readAheadBytes + 1, 10*readAheadBytes + 17} {
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(i * 7 >> 3)
		}
		for name, source := range map[string]func(io.Reader) io.Reader{
			"plain":             func(r io.Reader) io.Reader { return r },
			"half of what fits": iotest.HalfReader,
			"end with the data": iotest.DataErrReader,
		} {
			t.Run(fmt.Sprintf("%s %d", name, size), func(t *testing.T) {
				moved := 0
				a := startReadAhead(source(bytes.NewReader(content)), func(n int) { moved += n })
				defer a.stop()
				got, err := drain(a)
				if !errors.Is(err, io.EOF) || !bytes.Equal(got, content) {
					t.Errorf("got %d bytes and %v, want the %d of the source and io.EOF", len(got), err, size)
				}
				if _, err := a.next(); !errors.Is(err, io.EOF) {
					t.Errorf("next() after the end = %v, want io.EOF again", err)
				}
				if n := a.count(); n != int64(size) || moved != size {
					t.Errorf("count() = %d, and %d were reported; want %d", n, moved, size)
				}
			})
		}
	}
}

func TestReadAhead_ErrorOfTheSourceComesAfterWhatItGave(t *testing.T) {
	errMine := errors.New("an error of the source's own")
	a := startReadAhead(io.MultiReader(bytes.NewReader([]byte("before")), iotest.ErrReader(errMine)), func(int) {})
	defer a.stop()
	got, err := drain(a)
	if string(got) != "before" || err != errMine { //nolint:errorlint // it must be this very value
		t.Errorf("got %q and %v, want what was read and the error as it is", got, err)
	}
}

func TestReadAhead_EachReadIsReportedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		read := 0
		a := startReadAhead(r, func(n int) { read += n })
		_, _ = w.Write([]byte("slow"))
		synctest.Wait()
		if read != 4 {
			t.Errorf("%d bytes were reported, want 4: a slow source must not look like one that stands still", read)
		}
		a.stop()
		_ = w.Close()
	})
}

func TestReadAhead_MemoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read := 0
		a := startReadAhead(zeroReader{}, func(n int) { read += n })
		synctest.Wait() // nobody takes anything
		if want := readAheadBytes; read != want {
			t.Errorf("%d bytes were read ahead of the first receiver, want %d", read, want)
		}
		if _, err := a.next(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if limit := readAheadBuffers * readAheadBytes; read > limit {
			t.Errorf("%d bytes were read ahead, want at most %d", read, limit)
		}
		a.stop()
	})
}

func TestReadAhead_StopEndsItWhereverItIs(t *testing.T) {
	for name, source := range map[string]io.Reader{"full": zeroReader{}, "at its end": bytes.NewReader(nil)} {
		t.Run("source "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // which fails if a goroutine is left
				a := startReadAhead(source, func(int) {})
				a.stop()
				a.stop()
			})
		})
	}
	t.Run("source blocked, until it is closed", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, w := io.Pipe()
			a := startReadAhead(r, func(int) { t.Error("a read was reported after stop") })
			received := make(chan error)
			go func() {
				_, err := a.next()
				received <- err
			}()
			synctest.Wait()
			a.stop()
			if err := <-received; !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("next() = %v, want io.ErrClosedPipe", err)
			}
			_ = w.CloseWithError(io.ErrUnexpectedEOF)
		})
	})
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
