package kvm2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
)

// ImageOpener opens the file at a URL of a scheme of one's own, from the byte at offset on. It returns the size of the
// whole file, 0 while it is unknown.
//
// The offset is not 0 when a transfer goes on that broke off: a file whose size has changed, and the error
// errors.ErrUnsupported, have the transfer start over instead. It and the body's Read must return soon after ctx has ended. An
// *Error keeps its class; a file that does not exist, or may not be read, is ErrImage (Permanent); all else is
// Transient, and tried again. The text of errors stands in those of Create, so it must hold no secrets. It is called
// by several goroutines.
type ImageOpener func(ctx context.Context, u *url.URL, offset int64) (body io.ReadCloser, size int64, err error)

// WithImageScheme has images, and the files of Image.ChecksumURL, whose URLs have this scheme opened by open. The
// scheme is lower case (RFC 3986, section 3.1), and not http, https or file.
func WithImageScheme(scheme string, open ImageOpener) Option {
	return func(o *options) {
		if !schemeForm.MatchString(scheme) || slices.Contains(builtinSchemes, scheme) || open == nil {
			o.fault("WithImageScheme: scheme %q: want an opener and a lower-case scheme that is not one of %s", clip(scheme), quotedList(builtinSchemes))
			return
		}
		openers := maps.Clone(o.sources.openers)
		if openers == nil {
			openers = map[string]ImageOpener{}
		}
		openers[scheme] = open
		o.sources.openers = openers
	}
}

// FSOpener opens files of a file system, such as an embed.FS: SCHEME:///PATH is the file PATH. Where a file can be
// sought in, a transfer that broke off goes on.
func FSOpener(fsys fs.FS) ImageOpener {
	return func(_ context.Context, u *url.URL, offset int64) (io.ReadCloser, int64, error) {
		if u.Host != "" || !strings.HasPrefix(u.Path, "/") {
			return nil, 0, permanent(ErrImage, "image %q: want %s:///PATH", shownURL(u), u.Scheme)
		}
		f, err := fsys.Open(u.Path[1:])
		if err != nil {
			return nil, 0, err
		}
		size, err := seekTo(f, offset)
		if err != nil {
			_ = f.Close()
			return nil, 0, err
		}
		return f, size, nil
	}
}

// seekTo moves to the offset in a file and returns the file's size.
func seekTo(f fs.File, offset int64) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, permanent(ErrImage, "%q is not a regular file", info.Name())
	}
	if offset == 0 {
		return info.Size(), nil
	}
	s, ok := f.(io.Seeker)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	_, err = s.Seek(offset, io.SeekStart)
	return info.Size(), err
}

var (
	schemeForm     = regexp.MustCompile(`^[a-z][a-z0-9+.-]{0,31}$`)
	builtinSchemes = []string{"file", "http", "https"}
)

// imageSources is how files are opened: what the Options say about it.
type imageSources struct {
	client        *http.Client
	edit          func(*http.Request) error // nil: requests go as they are
	openers       map[string]ImageOpener    // by scheme
	decompressors []Decompressor            // beside those that are built in
}

// check makes sure that there is a way to open what an image names. It is called before anything is done for it.
func (s imageSources) check(i Image) error {
	return errors.Join(s.checkScheme("image.url", i.URL), s.checkScheme("image.checksumURL", i.ChecksumURL))
}

func (s imageSources) checkScheme(field, rawURL string) error {
	if rawURL == "" {
		return nil
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		return invalidf("%s: is not a URL", field)
	}
	if slices.Contains(builtinSchemes, u.Scheme) || s.openers[u.Scheme] != nil {
		return nil
	}
	known := slices.Sorted(slices.Values(slices.AppendSeq(slices.Clone(builtinSchemes), maps.Keys(s.openers))))
	return invalidf("%s: scheme %q is not known: want one of %s, or add it by WithImageScheme", field, clip(u.Scheme), quotedList(known))
}

func quotedList(items []string) string {
	quoted := make([]string, len(items))
	for i, item := range items {
		quoted[i] = fmt.Sprintf("%q", item)
	}
	return strings.Join(quoted, ", ")
}

// openFunc opens a file from the byte at offset on; an offset that is not 0 goes on where an earlier body broke off.
// The error errCannotResume says that only starting over will do.
type openFunc func(ctx context.Context, offset int64) (body io.ReadCloser, size int64, err error)

var errCannotResume = errors.New("the source cannot go on from there")

// remote is how the file at a URL is opened that may break off and go on; not that of a local file.
func (s imageSources) remote(u *url.URL) openFunc {
	if open := s.openers[u.Scheme]; open != nil {
		return func(ctx context.Context, offset int64) (io.ReadCloser, int64, error) {
			body, size, err := open(ctx, u, offset)
			if offset > 0 && errors.Is(err, errors.ErrUnsupported) {
				return nil, 0, errCannotResume
			}
			return body, max(0, size), openerError(u, err)
		}
	}
	return (&httpFile{client: s.client, edit: s.edit, url: u}).open
}

// openerError gives the error of a user's opener its class.
func openerError(u *url.URL, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	err = withoutURL(err)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrInvalid) {
		return permanent(ErrImage, "image %q: %w", shownURL(u), err)
	}
	return transient(nil, "image %q: %w", shownURL(u), err)
}

// source is an opened image file.
type source struct {
	body io.ReadCloser
	size int64 // 0 while unknown
}

// openSource opens the transfer's image, whose URL Spec.Validate has checked. A local file that cannot be read is
// not tried again.
func (t *imageTransfer) openSource(ctx context.Context) (source, error) {
	u, err := url.Parse(t.image.URL)
	if err != nil {
		return source{}, invalidf("image.url: is not a URL")
	}
	if u.Scheme == "file" {
		return openFile(u.Path)
	}
	open := t.sources.remote(u)
	body, size, err := open(ctx, 0)
	if err != nil {
		return source{}, err
	}
	resuming := &resumingBody{
		ctx: ctx, open: open, name: shownURL(u), retries: t.retries, wait: t.stalls.wait, body: body, size: size,
	}
	return source{body: resuming, size: size}, nil
}

func openFile(path string) (source, error) {
	f, err := os.Open(path) //nolint:gosec // the caller names the image
	if err != nil {
		return source{}, permanent(ErrImage, "%w", err)
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return source{}, permanent(ErrImage, "%q is not a regular file", path)
	}
	return source{body: f, size: info.Size()}, nil
}

// shownURL names a file without what tokens stand in: user and query.
func shownURL(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Opaque: u.Opaque, Host: u.Host, Path: u.Path}).String()
}
