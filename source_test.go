package kvm2_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvm2/kvm2"
)

func TestSource_UnknownSchemeReachesNoHost(t *testing.T) {
	inLab(t, func(l *lab) {
		l.p = l.open(nil, kvm2.WithImageScheme("embed", kvm2.FSOpener(fstest.MapFS{})), kvm2.WithImageScheme("s3", kvm2.FSOpener(fstest.MapFS{})))
		for field, image := range map[string]kvm2.Image{
			"image.url":         {URL: "ftp://user:" + webSecret + "@host/i", Checksum: l.spec.Image.Checksum},
			"image.checksumURL": {URL: "embed:///i", ChecksumURL: "ftp://user:" + webSecret + "@host/SUMS"},
		} {
			l.spec.Image = image
			calls := l.calls("", func() {
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, kvm2.ClassPermanent, kvm2.ErrInvalidSpec)
				if want := field + `: scheme "ftp" is not known: want one of "embed", "file", "http", "https", "s3"`; !strings.Contains(fmt.Sprint(err), want) {
					l.Errorf("Create() = %v, want it to say %q", err, want)
				}
				if strings.Contains(fmt.Sprint(err), webSecret) {
					l.Errorf("%v tells the secret", err)
				}
			})
			if calls != 0 {
				l.Errorf("the host was called %d times", calls)
			}
			if _, err := l.p.Render(l.spec); !errors.Is(err, kvm2.ErrInvalidSpec) {
				l.Errorf("Render() = %v, want ErrInvalidSpec", err)
			}
		}
	})
}

func TestSource_OptionsThatCannotBeAreRefused(t *testing.T) {
	opener := kvm2.FSOpener(fstest.MapFS{})
	read := func(r io.Reader) (io.Reader, error) { return r, nil }
	for what, opt := range map[string]kvm2.Option{
		"WithImageScheme: scheme \"\"":      kvm2.WithImageScheme("", opener),
		"WithImageScheme: scheme \"S3\"":    kvm2.WithImageScheme("S3", opener),
		"WithImageScheme: scheme \"https\"": kvm2.WithImageScheme("https", opener),
		"WithImageScheme: scheme \"a b\"":   kvm2.WithImageScheme("a b", opener),
		"WithImageScheme: scheme \"s3\"":    kvm2.WithImageScheme("s3", nil),
		"WithDecompressor: \"\"":            kvm2.WithDecompressor(kvm2.Decompressor{Magic: []byte("m"), NewReader: read}),
		"WithDecompressor: \"no magic\"":    kvm2.WithDecompressor(kvm2.Decompressor{Name: "no magic", NewReader: read}),
		"WithDecompressor: \"long magic\"":  kvm2.WithDecompressor(kvm2.Decompressor{Name: "long magic", Magic: make([]byte, 65), NewReader: read}),
		"WithDecompressor: \"no reader\"":   kvm2.WithDecompressor(kvm2.Decompressor{Name: "no reader", Magic: []byte("m")}),
	} {
		p, err := kvm2.New(validConfig(), opt)
		if p != nil || !errors.Is(err, kvm2.ErrInvalidConfig) || !strings.Contains(fmt.Sprint(err), "kvm2: "+what) {
			t.Errorf("New() = %v, %v; want ErrInvalidConfig that says %s", p, err, what)
		}
	}
}

// opened is an opener that writes down from which offsets it was asked for a file.
type opened struct {
	open    kvm2.ImageOpener
	offsets []int64
	urls    []string
	break1  bool // the first body breaks off in the middle
}

func (o *opened) opener(ctx context.Context, u *url.URL, offset int64) (io.ReadCloser, int64, error) {
	o.offsets, o.urls = append(o.offsets, offset), append(o.urls, u.String())
	body, size, err := o.open(ctx, u, offset)
	if err == nil && o.break1 && len(o.offsets) == 1 {
		return brokenOff{io.MultiReader(io.LimitReader(body, size/2), failing{})}, size, nil
	}
	return body, size, err
}

type brokenOff struct{ io.Reader }

func (brokenOff) Close() error { return nil }

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errReset }

// unseekable hides that files can be sought in.
type unseekable struct{ fs.FS }

func (u unseekable) Open(name string) (fs.File, error) {
	f, err := u.FS.Open(name)
	return struct{ fs.File }{f}, err
}

func TestSource_OpenerOfAScheme(t *testing.T) {
	files := fstest.MapFS{"images/disk.raw": {Data: randomDisk(mib)}}
	tests := []struct {
		name    string
		fsys    fs.FS
		broken  bool
		offsets []int64
	}{
		{"at once", files, false, []int64{0}},
		{"goes on", files, true, []int64{0, mib / 2}},
		{"starts over", unseekable{files}, true, []int64{0, mib / 2, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				o := &opened{open: kvm2.FSOpener(tt.fsys), break1: tt.broken}
				w := &webImage{content: files["images/disk.raw"].Data}
				l.p = l.open(nil, kvm2.WithImageScheme("embed", o.opener))
				l.spec.Image = kvm2.Image{URL: "embed:///images/disk.raw?version=1", Checksum: w.checksum()}
				l.running(l.spec)
				l.wantImage(w)
				if !slices.Equal(o.offsets, tt.offsets) || o.urls[0] != l.spec.Image.URL {
					l.Errorf("opened %q at %d, want %d", o.urls, o.offsets, tt.offsets)
				}
			})
		})
	}
}

func TestSource_ErrorsOfAnOpenerHaveTheirClass(t *testing.T) {
	opener := func(err error) kvm2.ImageOpener {
		return func(context.Context, *url.URL, int64) (io.ReadCloser, int64, error) { return nil, 0, err }
	}
	tests := []struct {
		name  string
		open  kvm2.ImageOpener
		url   string
		class kvm2.Class
	}{
		{"anything", opener(errReset), "embed:///i", kvm2.ClassTransient},
		{"missing", opener(fs.ErrNotExist), "embed:///i", kvm2.ClassPermanent},
		{"forbidden", opener(fs.ErrPermission), "embed:///i", kvm2.ClassPermanent},
		{"its own", opener(&kvm2.Error{Class: kvm2.ClassQuota}), "embed:///i", kvm2.ClassQuota},
		{"URL of another", opener(&url.Error{Op: "Get", URL: webSecret, Err: errReset}), "embed:///i", kvm2.ClassTransient},
		{"not in the file system", kvm2.FSOpener(fstest.MapFS{}), "embed:///i", kvm2.ClassPermanent},
		{"above the file system", kvm2.FSOpener(fstest.MapFS{}), "embed:///../i", kvm2.ClassPermanent},
		{"directory", kvm2.FSOpener(fstest.MapFS{"a/b": {}}), "embed:///a", kvm2.ClassPermanent},
		{"with a host", kvm2.FSOpener(fstest.MapFS{"a": {}}), "embed://a/a", kvm2.ClassPermanent},
		{"without slashes", kvm2.FSOpener(fstest.MapFS{"a": {}}), "embed:a", kvm2.ClassPermanent},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				l.p = l.open(nil, kvm2.WithImageScheme("embed", tt.open))
				l.spec.Image.URL = tt.url + "?token=" + webSecret
				var err error
				for range 3 {
					if _, err = l.p.Create(l.Context(), l.spec); err != nil {
						break
					}
					l.wait(time.Second)
				}
				l.wantError("Create()", err, tt.class, nil)
				if strings.Contains(fmt.Sprint(err), webSecret) {
					l.Errorf("%v tells the secret", err)
				}
			})
		})
	}
}

// moved is an answer that redirects.
func moved(location string) *http.Response {
	resp := answerWith(http.StatusFound, strings.NewReader(""), 0)
	resp.Header.Set("Location", location)
	return resp
}

// withCredentials puts the secret wherever credentials may stand.
func withCredentials(r *http.Request) error {
	r.Header.Set("Authorization", "Bearer "+webSecret)
	r.Header.Set("X-Api-Key", webSecret)
	r.AddCookie(&http.Cookie{Name: "session", Value: webSecret})
	return nil
}

func tellsSecret(h http.Header) bool { return strings.Contains(fmt.Sprint(h), webSecret) }

func TestImageRequest_CredentialsGoToNoOtherHost(t *testing.T) {
	const first = "https://images.example/disk.raw"
	tests := []struct {
		name  string
		route []string // of redirects, from the first host on
		knows []bool   // whether each request may have the credentials, the first included
	}{
		{"no redirect", nil, []bool{true}},
		{"within the host", []string{"/mirror/disk.raw", first + "?v=2"}, []bool{true, true, true}},
		{"other host", []string{"https://cdn.example/disk.raw"}, []bool{true, false}},
		{"subdomain", []string{"https://cdn.images.example/disk.raw"}, []bool{true, false}},
		{"other port", []string{"https://images.example:8443/disk.raw"}, []bool{true, false}},
		{"without encryption", []string{"http://images.example/disk.raw"}, []bool{true, false}},
		{"and back", []string{"https://cdn.example/disk.raw", first}, []bool{true, false, false}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.flaky(nil)
				w.instead = func(n int) *http.Response {
					if n <= len(tt.route) {
						return moved(tt.route[n-1])
					}
					return nil
				}
				l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}), kvm2.WithImageRequest(withCredentials))
				l.running(l.spec)
				l.wantImage(w.webImage)
				for i, r := range w.requests {
					if i >= len(tt.knows) || tellsSecret(r.Header) != tt.knows[i] {
						l.Errorf("request %d, of %s, has the headers %q", i+1, r.URL.Host, r.Header)
					}
					if r.Header.Get("Referer") != "" {
						l.Errorf("request %d tells where it comes from: %q", i+1, r.Header)
					}
				}
			})
		})
	}
}

func TestImageRequest_IsEditedAnewWhenTheTransferGoesOn(t *testing.T) {
	inLab(t, func(l *lab) {
		w, n := l.flaky(nil), 0
		w.breaks = []int64{mib / 4, mib / 2}
		w.instead = func(n int) *http.Response {
			if n == 2 {
				return moved("/mirror/disk.raw")
			}
			return nil
		}
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}), kvm2.WithImageRequest(func(r *http.Request) error {
			n++
			r.Header.Set("X-Token", fmt.Sprintf("%d %s %s", n, r.URL.Path, r.Header.Get("Range")))
			return nil
		}))
		l.running(l.spec)
		l.wantImage(w.webImage)
		var got []string
		for _, r := range w.requests {
			got = append(got, r.Header.Get("X-Token"))
		}
		want := []string{"1 /disk.raw ", "2 /disk.raw bytes=262144-", "3 /mirror/disk.raw bytes=262144-", "4 /disk.raw bytes=524288-"}
		if !slices.Equal(got, want) || w.served != mib {
			l.Errorf("headers %q, want %q", got, want)
		}
	})
}

func TestImageRequest_ErrorFailsTheRequest(t *testing.T) {
	for class, failure := range map[kvm2.Class]error{
		kvm2.ClassTransient: errReset, kvm2.ClassPermanent: &kvm2.Error{Class: kvm2.ClassPermanent, Err: errReset},
	} {
		t.Run(class.String(), func(t *testing.T) {
			inLab(t, func(l *lab) {
				w := l.flaky(nil)
				l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}), kvm2.WithImageRequest(func(*http.Request) error { return failure }))
				if _, err := l.p.Create(l.Context(), l.spec); err != nil {
					l.Fatal(err)
				}
				l.wait(time.Second)
				_, err := l.p.Create(l.Context(), l.spec)
				l.wantError("Create()", err, class, errReset)
				if w.count() != 0 {
					l.Error("the request was sent all the same")
				}
			})
		})
	}
}

func TestImageRequest_SecretsStayOut(t *testing.T) {
	inLab(t, func(l *lab) {
		var log bytes.Buffer
		w := l.flaky(nil)
		w.instead = func(n int) *http.Response {
			switch n {
			case 1:
				return moved("https://cdn.example/%zz?token=" + webSecret)
			case 2:
				return moved("https://cdn.example/disk.raw?token=" + webSecret)
			}
			return answerWith(http.StatusServiceUnavailable, strings.NewReader(webSecret), -1)
		}
		l.p = l.open(nil, kvm2.WithHTTPClient(&http.Client{Transport: w}), kvm2.WithImageRequest(withCredentials),
			kvm2.WithLogger(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))))
		var said []string
		for range 20 {
			_, err := l.p.Create(l.Context(), l.spec)
			l.wait(time.Second)
			said = append(said, fmt.Sprint(err))
		}
		if err := l.p.Close(); err != nil {
			l.Error(err)
		}
		text := strings.Join(said, "\n") + log.String()
		if strings.Contains(text, webSecret) || !strings.Contains(text, "not a URL") || !strings.Contains(text, "503") {
			l.Errorf("errors and log: %s", text)
		}
	})
}

func TestImageRequest_TheClientsOwnRedirectPolicyHolds(t *testing.T) {
	inLab(t, func(l *lab) {
		w := l.flaky(nil)
		w.instead = func(int) *http.Response { return moved("/again") }
		own := errors.New("no redirects here")
		client := &http.Client{Transport: w, CheckRedirect: func(*http.Request, []*http.Request) error { return own }}
		for _, tt := range []struct {
			client   *http.Client
			requests int
			says     string
		}{{client, 1, own.Error()}, {&http.Client{Transport: w}, 10, "10 redirects"}} {
			w.requests = nil
			l.p = l.open(nil, kvm2.WithHTTPClient(tt.client))
			if _, err := l.p.Create(l.Context(), l.spec); err != nil {
				l.Fatal(err)
			}
			l.wait(time.Second)
			_, err := l.p.Create(l.Context(), l.spec)
			if !strings.Contains(fmt.Sprint(err), tt.says) || w.count() != tt.requests {
				l.Errorf("Create() = %v after %d requests, want %q after %d", err, w.count(), tt.says, tt.requests)
			}
		}
	})
}
