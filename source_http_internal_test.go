package kvm2

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestParseContentRange(t *testing.T) {
	tests := []struct {
		header      string
		first, size int64
		ok          bool
	}{
		{"bytes 5-9/10", 5, 10, true},
		{"bytes 0-0/1", 0, 1, true},
		{"bytes 5-9/*", 5, 0, true},
		{"", 0, 0, false},
		{"bytes */10", 0, 0, false}, // of an answer 416
		{"bytes 5-9", 0, 0, false},
		{"bytes 5-10/10", 0, 0, false},
		{"bytes 9-5/10", 0, 0, false},
		{"bytes -5-9/10", 0, 0, false},
		{"bytes 5-9/ten", 0, 0, false},
		{"bytes 5-99999999999999999999/*", 0, 0, false},
		{"items 5-9/10", 0, 0, false},
	}
	for _, tt := range tests {
		first, size, ok := parseContentRange(tt.header)
		if ok != tt.ok || ok && (first != tt.first || size != tt.size) {
			t.Errorf("parseContentRange(%q) = %d, %d, %t; want %d, %d, %t", tt.header, first, size, ok, tt.first, tt.size, tt.ok)
		}
	}
}

func TestServerDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tests := []struct {
			status int
			value  string
			want   time.Duration
		}{
			{429, "7", 7 * time.Second},
			{503, " 7 ", 7 * time.Second},
			{503, time.Now().Add(30 * time.Second).UTC().Format(http.TimeFormat), 30 * time.Second},
			{503, time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat), 0},
			{429, "86400", maxServerDelay},
			{429, time.Now().Add(24 * time.Hour).UTC().Format(http.TimeFormat), maxServerDelay},
			{429, "", 0},
			{429, "-1", 0},
			{429, "1.5", 0},
			{429, "99999999999999999999", 0},
			{429, "soon", 0},
			{500, "7", 0},
		}
		for _, tt := range tests {
			resp := &http.Response{StatusCode: tt.status, Header: http.Header{"Retry-After": {tt.value}}}
			if got := serverDelay(resp); got != tt.want {
				t.Errorf("%d with Retry-After %q: %v, want %v", tt.status, tt.value, got, tt.want)
			}
		}
	})
}

// breakingServer gives out a file over real connections, and cuts each one off after some bytes.
func breakingServer(t *testing.T, content []byte, cut int, ranges bool) (u *url.URL, sent *atomic.Int64) {
	t.Helper()
	sent = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !ranges {
			r.Header.Del("Range")
		}
		w.Header().Set("ETag", `"v1"`)
		http.ServeContent(&cutWriter{w, cut, sent}, r, "", time.Time{}, bytes.NewReader(content))
	}))
	t.Cleanup(server.Close)
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u, sent
}

type cutWriter struct {
	http.ResponseWriter
	left int
	sent *atomic.Int64
}

func (w *cutWriter) Write(p []byte) (int, error) {
	p = p[:min(len(p), w.left)]
	w.sent.Add(int64(len(p)))
	w.left -= len(p)
	n, err := w.ResponseWriter.Write(p)
	if w.left == 0 {
		_ = http.NewResponseController(w.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	return n, err
}

func TestResume_OverRealConnections(t *testing.T) {
	const size = 1000 * 1000
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content)
	for tenth := range 10 {
		cut := (tenth + 1) * size / 10
		t.Run(fmt.Sprintf("cut off after %d0%%", tenth+1), func(t *testing.T) {
			u, sent := breakingServer(t, content, cut, true)
			got, err := readAll(t, u, 20)
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("read %d bytes, %v; want all", len(got), err)
			}
			if sent.Load() != size {
				t.Errorf("the server sent %d bytes of %d", sent.Load(), size)
			}
		})
	}
	t.Run("server without ranges", func(t *testing.T) {
		u, _ := breakingServer(t, content, size/2, false)
		if _, err := readAll(t, u, 20); !strings.Contains(fmt.Sprint(err), errStartOver.Error()) {
			t.Errorf("error %v, want it to start over", err)
		}
	})
	t.Run("retries exhausted", func(t *testing.T) {
		u, sent := breakingServer(t, content, size/10, true)
		_, err := readAll(t, u, 5)
		if ClassOf(err) != ClassTransient || !strings.Contains(fmt.Sprint(err), "unexpected EOF") || sent.Load() != 6*size/10 {
			t.Errorf("error %v after %d bytes, want a Transient one with its cause after six tenths", err, sent.Load())
		}
	})
}

// readAll reads a file to its end, without a wait before retries.
func readAll(t *testing.T, u *url.URL, most int) ([]byte, error) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	open := (&httpFile{client: client, url: u}).open
	body, size, err := open(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	b := &resumingBody{
		ctx: t.Context(), open: open, name: shownURL(u), retries: &retries{most: most}, body: body, size: size,
		wait: func(context.Context, time.Duration) error { return nil },
	}
	defer func() { _ = b.Close() }()
	return io.ReadAll(b)
}
