package kvm2

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
)

// sumsKey is what a checksum is looked up by: the file of checksums, and the image's name in it.
type sumsKey struct{ sumsURL, name string }

// sumsJob is one checksum's look-up, under way or done.
type sumsJob struct {
	done      bool
	checksum  string
	err       error
	until     time.Time // when what was found is looked up anew
	failures  int
	stale     bool // the image did not fit it: it is to be looked up anew
	rechecked bool // it was, after such a failure
}

const (
	// sumsTTL is how long a checksum that was found is good for. Distributions publish their builds once a day or less;
	// machines that are begun together should start from the same one.
	sumsTTL = 10 * time.Minute

	maxSumsBytes = 1 << 20
)

// checksumOf puts the algorithm before a digest, which its length tells; empty for what is no digest.
func checksumOf(digest string) string {
	for _, algorithm := range []string{"sha256:", "sha512:"} {
		if digestForm.MatchString(algorithm + digest) {
			return algorithm + digest
		}
	}
	return ""
}

// resolve returns the checksum that an image's file of checksums holds. While it is looked up it returns the progress
// instead; when that failed, its error.
func (c *imageCache) resolve(image Image) (string, *ImageProgress, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return "", nil, permanent(ErrClosed, "no checksum can be looked up")
	}
	key := sumsKey{image.ChecksumURL, baseName(image.URL)}
	job := c.sums[key]
	if job != nil && job.done && time.Now().Before(job.until) {
		return job.checksum, nil, job.err
	}
	if job == nil || job.done {
		job = c.lookUpSums(key, job)
	}
	return "", &ImageProgress{Phase: ImageOpening, Attempt: job.failures + 1}, nil
}

// lookUpSums starts a look-up after the last one, and forgets what nobody asked for any more.
func (c *imageCache) lookUpSums(key sumsKey, last *sumsJob) *sumsJob {
	for k, old := range c.sums {
		if old.done && time.Since(old.until) > sumsTTL {
			delete(c.sums, k)
		}
	}
	job := &sumsJob{}
	if last != nil && last.err != nil {
		job.failures = last.failures
	}
	job.rechecked = last != nil && last.stale
	c.sums[key] = job
	c.wg.Go(func() { c.findChecksum(key, job) })
	return job
}

func (c *imageCache) findChecksum(key sumsKey, job *sumsJob) {
	ctx, cancel := context.WithTimeout(c.ctx, time.Duration(c.cfg.CallTimeout))
	defer cancel()
	checksum, err := c.sources.checksum(ctx, key)

	c.mu.Lock()
	defer c.mu.Unlock()
	job.done, job.checksum, job.err = true, checksum, err
	job.until = time.Now().Add(sumsTTL)
	if err == nil {
		job.failures = 0
		return
	}
	job.failures++
	job.until = time.Now().Add(max(retryDelay(job.failures), askedDelay(err)))
	c.log.LogAttrs(ctx, slog.LevelWarn, "image checksum not found",
		slog.String("image", key.name), slog.Int("failures", job.failures), slog.String("error", err.Error()))
}

// recheck has a checksum looked up anew that the image did not fit, once: a new build may have been published between
// the two.
func (c *imageCache) recheck(image Image) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	job := c.sums[sumsKey{image.ChecksumURL, baseName(image.URL)}]
	if job == nil || !job.done || job.rechecked {
		return false
	}
	job.stale, job.until = true, time.Now()
	return true
}

// checksum reads a file of checksums and finds the one of a name.
func (s imageSources) checksum(ctx context.Context, key sumsKey) (string, error) {
	u, err := url.Parse(key.sumsURL)
	if err != nil {
		return "", invalidf("image.checksumURL: is not a URL")
	}
	body, err := s.openSums(ctx, u)
	if err != nil {
		return "", fmt.Errorf("checksums: %w", err)
	}
	defer func() { _ = body.Close() }()
	data, err := io.ReadAll(io.LimitReader(body, maxSumsBytes+1))
	if err != nil {
		return "", transient(nil, "checksums %q: %w", shownURL(u), withoutURL(err))
	}
	if len(data) > maxSumsBytes {
		return "", permanent(ErrImage, "checksums %q: the file has more than %d bytes", shownURL(u), maxSumsBytes)
	}
	checksum, err := findSum(data, key.name)
	if err != nil {
		return "", permanent(ErrImage, "checksums %q: %w", shownURL(u), err)
	}
	return checksum, nil
}

func (s imageSources) openSums(ctx context.Context, u *url.URL) (io.ReadCloser, error) {
	if u.Scheme == "file" {
		f, err := openFile(u.Path)
		return f.body, err
	}
	open := s.remote(u)
	if u.Scheme == "https" {
		open = (&httpFile{client: s.client, edit: s.edit, url: u, secure: true}).open
	}
	body, _, err := open(ctx, 0)
	return body, err
}

// The lines of coreutils' sha256sum and sha512sum: as they are, and with --tag. A backslash at the beginning says that
// the name has escapes.
var (
	sumLine = regexp.MustCompile(`^(\\?)([0-9a-fA-F]{64}|[0-9a-fA-F]{128}) [ *](.+)$`)
	tagLine = regexp.MustCompile(`^(\\?)SHA(256|512) \((.+)\) = ([0-9a-fA-F]+)$`)
)

// findSum finds the checksum of a file name. Lines of other kinds, such as comments, checksums of other algorithms and
// the armour of a signature, are passed over. If there are both, SHA-512 is taken.
func findSum(data []byte, name string) (string, error) {
	found := map[string][]string{} // by algorithm
	for line := range bytes.Lines(data) {
		entry, checksum := parseSum(strings.TrimRight(string(line), "\r\n"))
		if path.Base(entry) != name || checksum == "" {
			continue
		}
		algorithm, _, _ := strings.Cut(checksum, ":")
		if !slices.Contains(found[algorithm], checksum) {
			found[algorithm] = append(found[algorithm], checksum)
		}
	}
	for _, algorithm := range []string{"sha512", "sha256"} {
		switch sums := found[algorithm]; len(sums) {
		case 0:
		case 1:
			return sums[0], nil
		default:
			return "", fmt.Errorf("there are %d different %s entries for %q", len(sums), algorithm, clip(name))
		}
	}
	return "", fmt.Errorf("there is no SHA-256 or SHA-512 entry for %q", clip(name))
}

// parseSum reads one line. The checksum is empty if it is no entry.
func parseSum(line string) (name, checksum string) {
	if m := sumLine.FindStringSubmatch(line); m != nil {
		return unescapeName(m[1], m[3]), checksumOf(strings.ToLower(m[2]))
	}
	m := tagLine.FindStringSubmatch(line)
	if m == nil {
		return "", ""
	}
	checksum = "sha" + m[2] + ":" + strings.ToLower(m[4])
	if !digestForm.MatchString(checksum) {
		return "", ""
	}
	return unescapeName(m[1], m[3]), checksum
}

var escapes = strings.NewReplacer(`\\`, `\`, `\n`, "\n", `\r`, "\r")

func unescapeName(mark, name string) string {
	if mark == "" {
		return name
	}
	return escapes.Replace(name)
}

// baseName is the name of the file at a URL; empty if it has none.
func baseName(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil || u.Path == "" || strings.HasSuffix(u.Path, "/") {
		return ""
	}
	return path.Base(u.Path)
}

// identity is what says which image it is: the checksum, whatever the URL; or else the two URLs, without the tokens in
// them, which rotate.
func (i Image) identity() Image {
	if i.ChecksumURL == "" {
		i.URL = ""
		return i
	}
	for _, field := range []*string{&i.URL, &i.ChecksumURL} {
		if u, err := url.Parse(*field); err == nil {
			*field = shownURL(u)
		}
	}
	return i
}
