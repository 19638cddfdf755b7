package kvm2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// WithImageRequest has edit change each request to an image server before it is sent, typically to add credentials.
// What it sets is not sent to another host to which the server redirects, nor after that back to the first one; a
// redirect within the host is edited anew. It must leave the method and the headers Range and If-Range alone. An error
// that it returns fails the request: an *Error keeps its class, all else is Transient; its text stands in that of Create.
// It is called by several goroutines.
func WithImageRequest(edit func(*http.Request) error) Option {
	return func(o *options) { o.sources.edit = edit }
}

// httpFile is a file on a web server. What is known of it after it was opened makes sure that it is still the same
// one when it is opened again in the middle (RFC 9110, sections 13.1.5 and 14).
type httpFile struct {
	client *http.Client
	edit   func(*http.Request) error
	url    *url.URL
	secure bool // only https will do, redirects included

	validator string // for If-Range; empty when the server gives none
	etag      string
	size      int64
}

// open is an openFunc.
func (f *httpFile) open(ctx context.Context, offset int64) (io.ReadCloser, int64, error) {
	if offset > 0 && f.validator == "" {
		return nil, 0, errCannotResume
	}
	resp, err := f.get(ctx, offset)
	if err != nil {
		return nil, 0, err
	}
	if err := f.judge(resp, offset); err != nil {
		_ = resp.Body.Close()
		return nil, 0, err
	}
	return resp.Body, f.size, nil
}

func (f *httpFile) get(ctx context.Context, offset int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url.String(), nil)
	if err != nil {
		return nil, invalidf("image.url: %q cannot be asked for", shownURL(f.url))
	}
	own := f.headers(offset)
	req.Header = own.Clone()
	if err := f.prepare(req); err != nil {
		return nil, err
	}
	client := *f.client
	client.CheckRedirect = f.redirects(own, client.CheckRedirect)
	resp, err := client.Do(req)
	if err != nil {
		return nil, f.failed(err)
	}
	return resp, nil
}

// headers are those that a request needs, whoever answers it.
func (f *httpFile) headers(offset int64) http.Header {
	h := http.Header{}
	h.Set("Accept-Encoding", "identity") // the checksum is that of the file as it is stored
	if offset > 0 {
		h.Set("Range", fmt.Sprintf("bytes=%d-", offset))
		h.Set("If-Range", f.validator)
	}
	return h
}

func (f *httpFile) prepare(req *http.Request) error {
	if f.edit == nil {
		return nil
	}
	err := f.edit(req)
	if _, ok := errors.AsType[*Error](err); ok || err == nil {
		return err
	}
	return transient(nil, "image %q: preparing the request: %w", shownURL(f.url), withoutURL(err))
}

var errInsecureRedirect = errors.New("the server redirects to what is not https")

// redirects is the client's policy with kvm2's own before it: what was added to the request for one host goes to no
// other. net/http itself would drop only the headers that it knows, and would tell the next host the query of the URL.
func (f *httpFile) redirects(own http.Header, next func(*http.Request, []*http.Request) error) func(*http.Request, []*http.Request) error {
	const most = 10
	return func(req *http.Request, via []*http.Request) error {
		if f.secure && req.URL.Scheme != "https" {
			return permanent(ErrImage, "image %q: %w", shownURL(f.url), errInsecureRedirect)
		}
		req.Header = own.Clone() //nolint:gosec // G119: own holds nothing but Accept-Encoding, Range and If-Range
		if sameOrigin(req, via) {
			if err := f.prepare(req); err != nil {
				return err
			}
		}
		if next != nil {
			return next(req, via)
		}
		if len(via) >= most {
			return fmt.Errorf("stopped after %d redirects", most)
		}
		return nil
	}
}

// sameOrigin reports whether no request so far has left the first one's scheme and host.
func sameOrigin(req *http.Request, via []*http.Request) bool {
	for _, v := range via {
		if v.URL.Scheme != req.URL.Scheme || v.URL.Host != req.URL.Host {
			return false
		}
	}
	return true
}

func (f *httpFile) failed(err error) error {
	err = withoutURL(err)
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	if strings.Contains(err.Error(), "Location header") { // net/http quotes it, with any token in it
		err = errors.New("the server redirects to something that is not a URL")
	}
	return transient(nil, "image %q: %w", shownURL(f.url), err)
}

// judge decides whether an answer brings the file from the offset on.
func (f *httpFile) judge(resp *http.Response, offset int64) error {
	switch {
	case offset == 0 && resp.StatusCode == http.StatusOK:
		f.remember(resp)
		return nil
	case offset > 0 && resp.StatusCode == http.StatusPartialContent:
		return f.continues(resp, offset)
	case offset > 0 && (resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusPreconditionFailed ||
		resp.StatusCode == http.StatusRequestedRangeNotSatisfiable):
		return errCannotResume // it knows no ranges, or the file has changed
	}
	return statusError(shownURL(f.url), resp)
}

// remember keeps what a later request will refer to. A weak ETag does not say that every byte is the same.
func (f *httpFile) remember(resp *http.Response) {
	f.size, f.etag = max(0, resp.ContentLength), resp.Header.Get("ETag")
	f.validator = resp.Header.Get("Last-Modified")
	if strings.HasPrefix(f.etag, `"`) {
		f.validator = f.etag
	}
}

// continues makes sure that a partial answer is what was asked for: the rest of the same file.
func (f *httpFile) continues(resp *http.Response, offset int64) error {
	first, size, ok := parseContentRange(resp.Header.Get("Content-Range"))
	if !ok || first != offset || f.size > 0 && size > 0 && size != f.size {
		return errCannotResume
	}
	if etag := resp.Header.Get("ETag"); etag != "" && f.etag != "" && etag != f.etag {
		return errCannotResume
	}
	f.size = max(f.size, size)
	return nil
}

// parseContentRange reads "bytes FIRST-LAST/SIZE". The size is 0 when it is given as unknown.
func parseContentRange(s string) (first, size int64, ok bool) {
	rest, ok := strings.CutPrefix(s, "bytes ")
	if !ok {
		return 0, 0, false
	}
	span, whole, ok := strings.Cut(rest, "/")
	if !ok {
		return 0, 0, false
	}
	from, to, ok := strings.Cut(span, "-")
	first, err1 := strconv.ParseInt(from, 10, 64)
	last, err2 := strconv.ParseInt(to, 10, 64)
	if !ok || err1 != nil || err2 != nil || first < 0 || last < first {
		return 0, 0, false
	}
	if whole == "*" {
		return first, 0, true
	}
	size, err := strconv.ParseInt(whole, 10, 64)
	return first, size, err == nil && size > last
}

// statusError judges an HTTP status: what the server may overcome by itself is Transient.
func statusError(shown string, resp *http.Response) error {
	const format = "image %q: the server answered %d %s"
	status := resp.StatusCode
	if status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500 {
		err := transient(nil, format, shown, status, http.StatusText(status))
		return &delayedError{error: err, delay: serverDelay(resp)}
	}
	return permanent(ErrImage, format, shown, status, http.StatusText(status))
}

// delayedError is the error of a server that says when to come back.
type delayedError struct {
	error
	delay time.Duration
}

func (e *delayedError) Unwrap() error { return e.error }

// maxServerDelay is how long a server may make a transfer wait. It is as long as the longest wait of kvm2's own.
const maxServerDelay = retryQuota

// serverDelay reads Retry-After of 429 and 503 (RFC 9110, section 10.2.3): seconds or a date.
func serverDelay(resp *http.Response) time.Duration {
	if resp.StatusCode != http.StatusTooManyRequests && resp.StatusCode != http.StatusServiceUnavailable {
		return 0
	}
	value := strings.TrimSpace(resp.Header.Get("Retry-After"))
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return min(time.Duration(seconds)*time.Second, maxServerDelay)
	}
	if date, err := http.ParseTime(value); err == nil {
		return min(max(0, time.Until(date)), maxServerDelay)
	}
	return 0
}

// askedDelay is how long a server asked to be left alone, if err is its answer.
func askedDelay(err error) time.Duration {
	if e, ok := errors.AsType[*delayedError](err); ok {
		return e.delay
	}
	return 0
}

// withoutURL drops the URL, and any token in it, from the error of an HTTP client.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
