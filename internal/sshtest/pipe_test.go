package sshtest

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/synctest"
)

func TestPipe_BothSidesMaySpeakFirst(t *testing.T) {
	near, far := Pipe()
	for _, end := range []io.Writer{near, far} {
		if _, err := io.WriteString(end, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	for _, end := range []io.ReadCloser{near, far} {
		got := make([]byte, 5)
		if _, err := io.ReadFull(end, got); err != nil || string(got) != "hello" {
			t.Errorf("read %q, error %v", got, err)
		}
	}
}

func TestPipe_WriteBlocksWhenFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := Pipe()
		sent := bytes.Repeat([]byte("0123456789"), pipeSize/10*3)
		wrote := make(chan error, 1)
		go func() {
			_, err := near.Write(sent)
			wrote <- err
			_ = near.Close()
		}()
		synctest.Wait()
		select {
		case err := <-wrote:
			t.Fatalf("the write did not block: %v", err)
		default:
		}
		got, err := io.ReadAll(far)
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("read %d bytes, error %v, want %d", len(got), err, len(sent))
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	})
}

func TestPipe_CloseEndsBothSides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := Pipe()
		errs := make(chan error, 2)
		for _, end := range []io.Reader{near, far} {
			go func() {
				_, err := end.Read(make([]byte, 1))
				errs <- err
			}()
		}
		synctest.Wait()
		_ = near.Close()
		for range 2 {
			if err := <-errs; !errors.Is(err, io.EOF) {
				t.Errorf("Read: %v, want io.EOF", err)
			}
		}
		if _, err := far.Write([]byte{1}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("Write: %v, want io.ErrClosedPipe", err)
		}
	})
}
