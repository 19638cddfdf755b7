package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/internal/qcow2"
)

// demo is an in-memory host, and the server that its image comes from.
type demo struct {
	host   *fake.Host
	server *imageServer
	image  kvm2.Image
}

// The demo's size and pace: a transfer of some 2 s, and a guest that boots in less than one.
const (
	demoImageBytes = 8 << 20
	demoDiskBytes  = 1 << 30
	demoChunk      = 64 << 10
	demoPause      = 16 * time.Millisecond
	demoBoot       = 700 * time.Millisecond
	demoPoll       = 100 * time.Millisecond
	demoLatency    = time.Millisecond
)

func newDemo() (*demo, error) {
	image, err := demoImage()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(image)
	return &demo{
		host:   fake.NewHost(fake.WithBootTime(demoBoot), fake.WithLatency(demoLatency)),
		server: &imageServer{content: image, chunk: demoChunk, pause: demoPause},
		image:  kvm2.Image{URL: "https://images.example/demo.qcow2", Checksum: "sha256:" + hex.EncodeToString(sum[:])},
	}, nil
}

// demoImage is an empty disk, followed by zeros so that there is something to transfer.
func demoImage() ([]byte, error) {
	disk, err := qcow2.MinimalImage(demoDiskBytes)
	if err != nil {
		return nil, err
	}
	return append(disk, make([]byte, max(0, demoImageBytes-len(disk)))...), nil
}

// open returns a Provider of the demo's host.
func (d *demo) open(s settings) (*site, error) {
	s.config.URI, s.config.Host = "qemu:///system", "fake" // it names the host; nobody connects to it
	s.spec.Image = d.image
	host, err := openHost(s, kvm2.WithDialer(d.host), kvm2.WithHTTPClient(&http.Client{Transport: d.server}))
	if err != nil {
		return nil, err
	}
	host.title = "in memory; -uri names a real one"
	host.every = demoPoll
	host.leftovers = func() (string, error) { return d.leftovers(s.config) }
	return host, nil
}

// leftovers tells what is left on the host. Only the image may be.
func (d *demo) leftovers(c kvm2.Config) (string, error) {
	if domains := d.host.Domains(); len(domains) > 0 {
		return "", fmt.Errorf("domain %q is left on the host", domains[0].Name)
	}
	volumes := d.host.Volumes(c.Pool)
	for _, v := range volumes {
		if !strings.HasPrefix(v.Name, c.Scope+"-image-") {
			return "", fmt.Errorf("volume %q is left on the host", v.Name)
		}
	}
	return fmt.Sprintf("no domain, and no volumes but the %d of the cached image", len(volumes)), nil
}

// imageServer answers every request with one file, at a gentle pace. It stands in for the network.
type imageServer struct {
	content []byte
	chunk   int
	pause   time.Duration // after each chunk
}

// RoundTrip answers a request.
func (s *imageServer) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, ContentLength: int64(len(s.content)), Request: r,
		Body: &slowBody{ctx: r.Context(), server: s, rest: s.content},
	}, nil
}

// slowBody reads a file chunk by chunk.
type slowBody struct {
	ctx    context.Context // of the request: the body ends with it
	server *imageServer
	rest   []byte
}

// Read returns the next chunk after a pause.
func (b *slowBody) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		return 0, io.EOF
	}
	if err := sleep(b.ctx, b.server.pause); err != nil {
		return 0, err
	}
	n := copy(p[:min(len(p), b.server.chunk)], b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close does nothing: there is nothing to free.
func (*slowBody) Close() error { return nil }
