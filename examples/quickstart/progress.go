package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/kvm2/kvm2"
)

// bar shows an image transfer: drawn in place on a terminal, and otherwise as a line for each phase and each tenth.
type bar struct {
	screen *screen

	last    kvm2.ImageProgress // the zero value before the first
	began   time.Time          // the beginning of what the rate is measured over
	from    int64              // the bytes done by then
	tenth   int64              // the tenths that have been shown
	spelled time.Time          // when a line of a transfer of unknown size was last written
}

// unknownSizeEvery is how often a transfer of unknown size is told of where lines cannot be redrawn.
const unknownSizeEvery = 5 * time.Second

// show shows the progress as it is now.
func (b *bar) show(p kvm2.ImageProgress) {
	if p.TotalBytes > 0 {
		p.DoneBytes = min(p.DoneBytes, p.TotalBytes) // a file that grows meanwhile has more than its total
	}
	again := p.Phase != b.last.Phase || p.Attempt != b.last.Attempt || p.DoneBytes < b.last.DoneBytes
	if again && p.Phase == kvm2.ImageTransferring {
		b.began, b.from, b.tenth = time.Now(), p.DoneBytes, tenths(p)
	}
	b.last = p
	if b.screen.terminal {
		b.screen.redraw("image", b.text(string(p.Phase), p))
		return
	}
	if again || b.due(p) {
		b.tenth, b.spelled = tenths(p), time.Now()
		b.screen.event("image", "%s", b.text(string(p.Phase), p))
	}
}

// due reports whether a line is worth writing.
func (b *bar) due(p kvm2.ImageProgress) bool {
	if p.Phase != kvm2.ImageTransferring {
		return false
	}
	if p.TotalBytes == 0 {
		return time.Since(b.spelled) >= unknownSizeEvery
	}
	return tenths(p) > b.tenth
}

// finish shows the whole once the image is there. The last progress that was seen is nearly always short of that.
func (b *bar) finish() {
	if b.last.Phase == "" {
		return
	}
	p := b.last
	p.DoneBytes = max(p.DoneBytes, p.TotalBytes)
	text := b.text("ready", p)
	b.last = kvm2.ImageProgress{}
	if b.screen.terminal {
		b.screen.redraw("image", text)
		b.screen.endLine()
		return
	}
	b.screen.event("image", "%s", text)
}

func tenths(p kvm2.ImageProgress) int64 {
	if p.TotalBytes == 0 {
		return 0
	}
	return p.DoneBytes * 10 / p.TotalBytes
}

// text is the bar itself: phase, bar, percentage, bytes and rate, as far as they are known.
func (b *bar) text(phase string, p kvm2.ImageProgress) string {
	if phase == string(kvm2.ImageOpening) && p.Attempt > 1 {
		return fmt.Sprintf("%s, attempt %d", phase, p.Attempt)
	}
	if phase == string(kvm2.ImageOpening) || p.DoneBytes == 0 && p.TotalBytes == 0 {
		return phase // when opened anew, the bytes are still those of the time before
	}
	text := fmt.Sprintf("%-12s ", phase)
	if p.TotalBytes == 0 {
		text += size(p.DoneBytes)
	} else {
		text += drawing(p)
	}
	if phase == string(kvm2.ImageTransferring) {
		text += b.rate(p)
	}
	return text
}

func drawing(p kvm2.ImageProgress) string {
	const width = 12
	full := int(p.DoneBytes * width / p.TotalBytes)
	drawn := strings.Repeat("#", full) + strings.Repeat("-", width-full)
	return fmt.Sprintf("[%s] %3d%%  %s", drawn, p.DoneBytes*100/p.TotalBytes, part(p.DoneBytes, p.TotalBytes))
}

// rate is the mean rate of this attempt, once there is one.
func (b *bar) rate(p kvm2.ImageProgress) string {
	const soonest = 50 * time.Millisecond
	took := time.Since(b.began)
	if took < soonest || p.DoneBytes <= b.from {
		return ""
	}
	return fmt.Sprintf("  %s/s", size(int64(float64(p.DoneBytes-b.from)/took.Seconds())))
}

// A unit is a unit of bytes.
type unit struct {
	name  string
	bytes float64
}

func unitOf(n int64) unit {
	for _, u := range []unit{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if float64(n) >= u.bytes {
			return u
		}
	}
	return unit{"B", 1}
}

// size writes bytes in the unit that suits them.
func size(n int64) string {
	u := unitOf(n)
	return fmt.Sprintf("%.*f %s", u.digits(), float64(n)/u.bytes, u.name)
}

// part writes two numbers of bytes in the unit that suits the whole.
func part(done, total int64) string {
	u := unitOf(total)
	return fmt.Sprintf("%.*f/%.*f %s", u.digits(), float64(done)/u.bytes, u.digits(), float64(total)/u.bytes, u.name)
}

func (u unit) digits() int {
	if u.bytes == 1 {
		return 0
	}
	return 1
}

// screen writes lines for a person: on a terminal, the last one may be drawn anew.
type screen struct {
	w        io.Writer
	terminal bool
	start    time.Time
	open     bool // the last line has no end yet
}

func newScreen(w io.Writer) *screen {
	return &screen{w: w, terminal: isTerminal(w), start: time.Now()}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Write ends an open line and writes p.
func (s *screen) Write(p []byte) (int, error) {
	s.endLine()
	return s.w.Write(p)
}

func (s *screen) endLine() {
	if s.open {
		s.open = false
		say(s.w, "")
	}
}

func (s *screen) text(format string, args ...any) { say(s, format, args...) }

func (s *screen) heading(title string) { s.text("\n%s", title) }

// event writes a line with the time that has passed.
func (s *screen) event(label, format string, args ...any) {
	s.text("%s", s.line(label, fmt.Sprintf(format, args...)))
}

// redraw writes a line over the open one. Only a terminal can do that.
func (s *screen) redraw(label, text string) {
	const lineStart, eraseRest = "\r", "\x1b[K"
	s.open = true
	_, _ = io.WriteString(s.w, lineStart+s.line(label, text)+eraseRest)
}

func (s *screen) line(label, text string) string {
	return fmt.Sprintf("%5.1fs  %-8s %s", time.Since(s.start).Seconds(), label, text)
}

// say writes a line. That nobody can read it any more is no reason to leave a machine behind.
func say(w io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
