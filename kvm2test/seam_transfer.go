package kvm2test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing/iotest"

	"github.com/kvm2/kvm2/internal/qcow2"
)

// pattern is content that is different everywhere, and no image.
func pattern(n int) []byte {
	b := make([]byte, n)
	x := uint32(2463534242)
	for i := range b {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		b[i] = byte(x)
	}
	return b
}

func (s *seam) upload(part string, content []byte) {
	s.Helper()
	s.uploadAt(part, 0, content)
}

func (s *seam) uploadAt(part string, offset int64, content []byte) {
	s.Helper()
	s.must(s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name(part), offset, bytes.NewReader(content)))
}

func (s *seam) download(part string) []byte {
	s.Helper()
	var b bytes.Buffer
	s.must(s.conn.DownloadVolume(s.ctx, s.caps.Pool, s.name(part), &b))
	return b.Bytes()
}

// wantContent compares without printing megabytes.
func (s *seam) wantContent(part string, want []byte) {
	s.Helper()
	got := s.download(part)
	if len(got) != len(want) {
		s.Fatalf("downloaded %d bytes, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			s.Fatalf("the content differs from byte %d on", i)
		}
	}
}

func transferCases() []seamCase {
	return append(brokenTransferCases(), []seamCase{
		{"UploadVolume/ReadsBack", "What was uploaded is downloaded again, over many packets.", needTransfers, func(s *seam) {
			content := pattern(3<<20 + 17)
			s.rawVolume("large", 0)
			s.upload("large", content)
			s.wantContent("large", content)
		}},
		{"UploadVolume/PhysicalSize", "After an upload into an empty volume the physical size is the number of bytes sent.", needTransfers, func(s *seam) {
			s.rawVolume("v", 0)
			s.upload("v", pattern(100_001))
			if v := s.volume("v"); v.PhysicalBytes != 100_001 {
				s.Errorf("got %+v, want a physical size of 100001", v)
			}
		}},
		{"UploadVolume/SmallReads", "A reader that gives one byte at a time is read to its end.", needTransfers, func(s *seam) {
			content := pattern(5000)
			s.rawVolume("v", 0)
			s.must(s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("v"), 0, iotest.OneByteReader(bytes.NewReader(content))))
			s.wantContent("v", content)
		}},
		{"UploadVolume/ErrorWithData", "A reader that gives its end together with the last bytes loses none.", needTransfers, func(s *seam) {
			content := pattern(70_000)
			s.rawVolume("v", 0)
			s.must(s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("v"), 0, iotest.DataErrReader(bytes.NewReader(content))))
			s.wantContent("v", content)
		}},
		{"UploadVolume/BeyondCapacity", "An upload larger than the volume makes it grow.", needTransfers, func(s *seam) {
			content := pattern(200_000)
			s.rawVolume("v", 4096)
			s.upload("v", content)
			s.wantContent("v", content)
		}},
		{"UploadVolume/DoesNotTruncate", "An upload shorter than the volume leaves the rest as it was.", needTransfers, func(s *seam) {
			content := pattern(100_000)
			s.rawVolume("v", 0)
			s.upload("v", content)
			s.upload("v", []byte("short"))
			s.wantContent("v", append([]byte("short"), content[5:]...))
		}},
		{"UploadVolume/Offset", "An upload at an offset replaces what is there, and leaves what is before and behind it.", needTransfers, func(s *seam) {
			content := pattern(100_000)
			s.rawVolume("v", 0)
			s.upload("v", content)
			s.uploadAt("v", 50_000, []byte("in the middle"))
			copy(content[50_000:], "in the middle")
			s.wantContent("v", content)
		}},
		{"UploadVolume/Ranges", "Ranges written one after another make a file: the gaps read as zeros, the physical size is the end of the last range.", needTransfers, func(s *seam) {
			const gap = 9 << 20
			s.rawVolume("v", 0)
			want := make([]byte, 3*gap+1)
			for _, r := range []struct{ offset, length int }{{0, 70_000}, {gap, 300_000}, {2*gap + 12_345, 1}, {3 * gap, 1}} {
				content := pattern(r.length)
				copy(want[r.offset:], content)
				s.uploadAt("v", int64(r.offset), content)
				if v, end := s.volume("v"), int64(r.offset+r.length); v.PhysicalBytes != end {
					s.Fatalf("got %+v, want a physical size of %d", v, end)
				}
			}
			if v := s.volume("v"); v.AllocatedBytes > gap {
				s.Errorf("got %+v, want the gaps not to be stored", v)
			}
			s.wantContent("v", want)
		}},
		{"UploadVolume/OffsetBeyondEnd", "An upload at an offset beyond the volume's capacity makes it grow.", needTransfers, func(s *seam) {
			s.rawVolume("v", 4096)
			s.uploadAt("v", 1<<20, []byte("far out"))
			s.wantContent("v", append(make([]byte, 1<<20), "far out"...))
		}},
		{"UploadVolume/Empty", "An upload of nothing succeeds and changes nothing.", needTransfers, func(s *seam) {
			s.rawVolume("v", 4096)
			s.upload("v", nil)
			s.wantContent("v", make([]byte, 4096))
		}},
		{"UploadVolume/SessionStaysUsable", "The session of an upload can be used again.", needTransfers, func(s *seam) {
			s.rawVolume("v", 0)
			s.upload("v", pattern(1000))
			s.wantUsable(s.conn)
		}},
		{"UploadVolume/ProbesContent", "A raw volume that got a qcow2 image becomes one, with the image's virtual size.", needTransfers, func(s *seam) {
			image, err := qcow2.MinimalImage(64 << 20)
			s.must(err)
			s.rawVolume("v", 0)
			s.upload("v", image)
			s.eventually("the volume's new format", func() bool {
				s.must(s.conn.RefreshPool(s.ctx, s.caps.Pool))
				v := s.volume("v")
				return v.Format == "qcow2" && v.CapacityBytes == 64<<20 && v.PhysicalBytes == int64(len(image))
			})
		}},
		{"UploadVolume/Missing", "An upload into a volume that does not exist is code 50.", needTransfers, func(s *seam) {
			s.wantCode(s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("none"), 0, strings.NewReader("x")), 50)
		}},
		{"UploadVolume/NoPool", "An upload into a pool that does not exist is code 49.", needTransfers, func(s *seam) {
			s.wantCode(s.conn.UploadVolume(s.ctx, s.name("none"), s.name("v"), 0, strings.NewReader("x")), 49)
		}},
		{"DownloadVolume/Zeros", "A volume that was never written to reads as zeros.", needTransfers, func(s *seam) {
			s.rawVolume("v", 300_000)
			s.wantContent("v", make([]byte, 300_000))
		}},
		{"DownloadVolume/Qcow2", "The download of a qcow2 volume is the image file.", needTransfers, func(s *seam) {
			s.qcow2Volume("base", 1<<20)
			s.overlay("v", 2<<20)
			content := s.download("v")
			h, err := qcow2.ParseHeader(content)
			s.must(err)
			if h.VirtualSize != 2<<20 || h.Version != 3 || !h.BackingFile || int64(len(content)) != s.volume("v").PhysicalBytes {
				s.Errorf("got %+v and %d bytes, want version 3, 2 MiB, a backing file, all of the file", h, len(content))
			}
		}},
		{"DownloadVolume/Missing", "The download of a volume that does not exist is code 50.", needTransfers, func(s *seam) {
			s.wantCode(s.conn.DownloadVolume(s.ctx, s.caps.Pool, s.name("none"), io.Discard), 50)
		}},
	}...)
}

func brokenTransferCases() []seamCase {
	errMine := errors.New("an error of the caller's own")
	return []seamCase{
		{"UploadVolume/ReaderFails", "An error of the reader comes back as it is, and breaks the session.", needTransfers, func(s *seam) {
			s.rawVolume("v", 0)
			r := io.MultiReader(bytes.NewReader(pattern(600_000)), iotest.ErrReader(errMine))
			err := s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("v"), 0, r)
			if !errors.Is(err, errMine) {
				s.Fatalf("got %v, want the reader's own error", err)
			}
			s.wantBroken(s.conn)
		}},
		{"DownloadVolume/WriterFails", "An error of the writer comes back as it is, and breaks the session.", needTransfers, func(s *seam) {
			s.rawVolume("v", 600_000)
			err := s.conn.DownloadVolume(s.ctx, s.caps.Pool, s.name("v"), failingWriter{errMine})
			if !errors.Is(err, errMine) {
				s.Fatalf("got %v, want the writer's own error", err)
			}
			s.wantBroken(s.conn)
		}},
		{"Volume/DuringUpload", "Another session sees a volume's size grow while an upload is under way, without a refresh.", needTransfers, func(s *seam) {
			s.rawVolume("v", 0)
			r, w := io.Pipe()
			result := make(chan error, 1)
			go func() { result <- s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("v"), 0, r) }()
			other := s.dial()
			for sent := int64(1 << 20); sent <= 3<<20; sent += 1 << 20 {
				_, err := w.Write(pattern(1 << 20))
				s.must(err)
				s.eventually("seeing what was sent", func() bool {
					v, err := other.Volume(s.ctx, s.caps.Pool, s.name("v"))
					s.must(err)
					return v.PhysicalBytes > sent-1<<19 && v.PhysicalBytes <= sent
				})
			}
			_ = w.Close()
			var err error
			s.promptly("the upload", func() { err = <-result })
			s.must(err)
		}},
		{"DeleteVolume/DuringUpload", "A volume can be deleted while an upload into it is under way.", needTransfers, func(s *seam) {
			s.rawVolume("v", 0)
			r, w := io.Pipe()
			result := make(chan error, 1)
			go func() { result <- s.conn.UploadVolume(s.ctx, s.caps.Pool, s.name("v"), 0, r) }()
			_, err := w.Write([]byte("x"))
			s.must(err)
			other := s.dial()
			s.must(other.DeleteVolume(s.ctx, s.caps.Pool, s.name("v")))
			_ = w.Close()
			var uploadErr error // it may succeed or fail: nobody sees where it goes
			s.promptly("the upload", func() { uploadErr = <-result })
			s.Logf("the upload ended with: %v", uploadErr)
			_, err = other.Volume(s.ctx, s.caps.Pool, s.name("v"))
			s.wantCode(err, 50)
		}},
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }
