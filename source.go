package kvm2

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
)

// source is an opened image file.
type source struct {
	body io.ReadCloser
	size int64 // 0 while unknown
}

// openSource opens an image by its URL, which Spec.Validate has checked. Errors name the file without query and user,
// where tokens stand.
func openSource(ctx context.Context, client *http.Client, rawURL string) (source, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return source{}, invalidf("image.url: is not a URL")
	}
	if u.Scheme == "file" {
		return openFile(u.Path)
	}
	return openHTTP(ctx, client, u)
}

func openFile(path string) (source, error) {
	f, err := os.Open(path) //nolint:gosec // the caller names the image
	if err != nil {
		return source{}, permanent(ErrImage, "%w", err)
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return source{}, permanent(ErrImage, "%q is not a regular file", path)
	}
	return source{body: f, size: info.Size()}, nil
}

func openHTTP(ctx context.Context, client *http.Client, u *url.URL) (source, error) {
	shown := (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return source{}, invalidf("image.url: %q cannot be asked for", shown)
	}
	req.Header.Set("Accept-Encoding", "identity") // the checksum is that of the file as it is stored
	resp, err := client.Do(req)
	if err != nil {
		return source{}, transient(nil, "image %q: %w", shown, withoutURL(err))
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return source{}, statusError(shown, resp.StatusCode)
	}
	return source{body: resp.Body, size: max(0, resp.ContentLength)}, nil
}

// statusError judges an HTTP status: what the server may overcome by itself is Transient.
func statusError(shown string, status int) error {
	const format = "image %q: the server answered %d %s"
	if status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500 {
		return transient(nil, format, shown, status, http.StatusText(status))
	}
	return permanent(ErrImage, format, shown, status, http.StatusText(status))
}

// withoutURL drops the URL, and any token in it, from the error of an HTTP client.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
