package kvm2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvm2/kvm2/internal/imageprobe"
)

// pieces is a source that gives its content piece by piece, and then err.
type pieces struct {
	content []byte
	size    int
	err     error
}

func (p *pieces) next() ([]byte, error) {
	n := min(p.size, len(p.content))
	piece := p.content[:n]
	p.content = p.content[n:]
	if n == 0 {
		return nil, p.err
	}
	return piece, nil
}

type sentRange struct {
	Offset int64
	Length int
}

// sendRanges writes all ranges into a file as a host does, and returns it with what was sent.
func sendRanges(t *testing.T, d *dataRanges) (file []byte, sent []sentRange) {
	t.Helper()
	for {
		offset, err := d.begin()
		if errors.Is(err, io.EOF) {
			return file, sent
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(iotest.OneByteReader(d))
		if err != nil {
			t.Fatal(err)
		}
		if end := int(offset) + len(content); end > len(file) {
			file = append(file, make([]byte, end-len(file))...)
		}
		copy(file[offset:], content)
		sent = append(sent, sentRange{offset, len(content)})
		if d.offset != int64(len(file)) {
			t.Fatalf("after the range at %d the offset is %d, want %d", offset, d.offset, len(file))
		}
	}
}

// layout makes content of runs: positive ones of data, negative ones of zeros.
func layout(runs ...int) []byte {
	var b []byte
	for _, n := range runs {
		if n < 0 {
			b = append(b, make([]byte, -n)...)
		} else {
			b = append(b, bytes.Repeat([]byte{0xd1}, n)...)
		}
	}
	return b
}

func TestDataRanges_LeaveOutHoles(t *testing.T) {
	const hole = 100
	for _, tt := range []struct {
		name    string
		content []byte
		want    []sentRange
		why     string
	}{
		{name: "data only", content: layout(350), want: []sentRange{{0, 350}}},
		{name: "hole", content: layout(10, -101, 20), want: []sentRange{{0, 10}, {111, 20}}},
		{name: "zeros that are no hole", content: layout(10, -100, 20), want: []sentRange{{0, 130}}},
		{name: "several", content: layout(10, -200, 20, -50, 5, -500, 1), want: []sentRange{{0, 10}, {210, 75}, {785, 1}}},
		{name: "hole first", content: layout(-150, 5), want: []sentRange{{150, 5}}},
		{name: "hole last", content: layout(5, -150), want: []sentRange{{0, 5}, {154, 1}}, why: "the last byte gives the file its length"},
		{name: "hole last, short", content: layout(5, -101), want: []sentRange{{0, 5}, {105, 1}}},
		{name: "zeros last", content: layout(5, -100), want: []sentRange{{0, 105}}, why: "99 zeros and the last byte"},
		{name: "nothing but a hole", content: layout(-1000), want: []sentRange{{999, 1}}},
		{name: "one zero", content: layout(-1), want: []sentRange{{0, 1}}},
		{name: "nothing"},
	} {
		for _, size := range []int{1, 7, 64, 1000} {
			t.Run(fmt.Sprintf("%s in pieces of %d", tt.name, size), func(t *testing.T) {
				file, sent := sendRanges(t, &dataRanges{source: &pieces{tt.content, size, io.EOF}, hole: hole})
				if !bytes.Equal(file, tt.content) {
					t.Errorf("the copy is %x, want %x", file, tt.content)
				}
				// Zeros within one piece are no hole, however many there are.
				if diff := cmp.Diff(tt.want, sent); diff != "" && size < hole {
					t.Errorf("ranges (-want +got):\n%s%s", diff, tt.why)
				}
			})
		}
	}
}

func TestDataRanges_WithoutHolesThereIsOneRange(t *testing.T) {
	content := layout(-500, 10, -1000, 20, -300)
	file, sent := sendRanges(t, &dataRanges{source: &pieces{content, 64, io.EOF}, hole: math.MaxInt64})
	if want := []sentRange{{0, len(content)}}; !cmp.Equal(sent, want) || !bytes.Equal(file, content) {
		t.Errorf("sent %v, want %v and the same bytes", sent, want)
	}
}

func TestDataRanges_AnyFileArrivesWhole(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		var runs []int
		for range random.IntN(8) {
			runs = append(runs, random.IntN(600)-300)
		}
		content := layout(runs...)
		file, _ := sendRanges(t, &dataRanges{source: &pieces{content, 1 + random.IntN(50), io.EOF}, hole: 1 + random.Int64N(200)})
		if !bytes.Equal(file, content) {
			t.Fatalf("the copy of %v differs", runs)
		}
	}
}

func TestDataRanges_ErrorOfTheSourceComesAsItIs(t *testing.T) {
	errMine := errors.New("an error of the source's own")
	d := &dataRanges{source: &pieces{layout(10), 64, errMine}, hole: 100}
	if _, err := d.begin(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(d); len(got) != 10 || err != errMine { //nolint:errorlint // it must be this very value
		t.Errorf("got %d bytes and %v", len(got), err)
	}
	if _, err := d.begin(); err != errMine { //nolint:errorlint // it must be this very value
		t.Errorf("begin() = %v", err)
	}
}

// freshVolume is a host on which every volume already has a size.
type freshVolume struct {
	Conn
	physical int64
}

func (f freshVolume) Volume(context.Context, string, string) (Volume, error) {
	return Volume{PhysicalBytes: f.physical}, nil
}

func TestShortestHole_OnlyANewFileReadsAsZeros(t *testing.T) {
	for _, tt := range []struct {
		name     string
		format   imageprobe.Format
		physical int64
		want     int64
		why      string
	}{
		{name: "raw image, new file", format: imageprobe.FormatRaw, want: minHole},
		{name: "raw image, device", format: imageprobe.FormatRaw, physical: 4 * mib, want: math.MaxInt64, why: "what was on the device would show"},
		{name: "qcow2", format: imageprobe.FormatQCOW2, want: math.MaxInt64},
	} {
		t.Run(tt.name, func(t *testing.T) {
			transfer := &imageTransfer{imageCache: &imageCache{}}
			if got, err := transfer.shortestHole(t.Context(), freshVolume{physical: tt.physical}, tt.format, "v"); err != nil || got != tt.want {
				t.Errorf("shortestHole() = %d, %v; want %d %s", got, err, tt.want, tt.why)
			}
		})
	}
}
