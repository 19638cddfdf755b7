package kvm2

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// eventLog keeps the events of one goroutine's calls.
type eventLog struct{ events []CallEvent }

func (l *eventLog) CallObserved(e CallEvent) { l.events = append(l.events, e) }

// take returns the events since the last time.
func (l *eventLog) take() []CallEvent {
	out := l.events
	l.events = nil
	return out
}

// watched returns a session with a peer that follows the script, whose calls l sees.
func watched(t *testing.T, l *eventLog, serve func(rpcPeer)) *session {
	t.Helper()
	near, err := connectPeer(serve)("")
	if err != nil {
		t.Fatal(err)
	}
	d := (&stubDialer{}).decorator(io.Discard)
	d.watch = l
	d.next = dialFunc(func(ctx context.Context) (Conn, error) { return openLibvirt(ctx, near, "qemu:///system") })
	s, err := d.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

type dialFunc func(context.Context) (Conn, error)

func (f dialFunc) Dial(ctx context.Context) (Conn, error) { return f(ctx) }

// takeUploads answers versions, and takes whatever is uploaded.
func (p rpcPeer) takeUploads() {
	p.login()
	for {
		head, err := p.frame()
		if err != nil {
			return
		}
		const typeCall, statusOK = 0, 0
		switch {
		case head.typ == typeCall && head.procedure == rpcVolumeUpload:
			p.reply(head.procedure, head.serial, nil)
		case head.typ == typeCall:
			p.reply(head.procedure, head.serial, make([]byte, 8))
		case head.status == statusOK: // the end of the stream
			_, _ = p.Write(rpcFrame(28, remoteProgramNumber, head.procedure, 3, head.serial, 0, nil))
		}
	}
}

func TestObserver_BytesBelongToTheirCall(t *testing.T) {
	const (
		frameLen = 28
		uploaded = 3<<20 + 1
	)
	l := &eventLog{}
	s := watched(t, l, rpcPeer.takeUploads)
	version := CallEvent{Host: "kvm-1", Op: OpPing, BytesSent: frameLen, BytesReceived: frameLen + 8}
	sum := func(events []CallEvent) (total traffic) {
		for _, e := range events {
			total.sent += e.BytesSent
			total.received += e.BytesReceived
		}
		return total
	}
	dialed := l.take()
	if len(dialed) != 1 || dialed[0].Op != OpDial || dialed[0].BytesSent < 2*frameLen || dialed[0].BytesReceived != 2*frameLen+8 {
		t.Errorf("dial: %+v, want two calls and their answers, the first of 8 bytes", dialed)
	}
	total := sum(dialed)
	for range 2 { // the second is not charged with what went before
		if err := s.ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		pinged := l.take()
		total.add(sum(pinged))
		for i := range pinged {
			pinged[i].Duration = 0
		}
		if diff := cmp.Diff([]CallEvent{version}, pinged); diff != "" {
			t.Errorf("ping differs (-want +got):\n%s", diff)
		}
		if err := s.UploadVolume(t.Context(), "p", "v", 0, bytes.NewReader(make([]byte, uploaded))); err != nil {
			t.Fatal(err)
		}
		events := l.take()
		total.add(sum(events))
		if len(events) != 1 || events[0].BytesSent < uploaded || events[0].BytesSent > uploaded+(64<<10) ||
			events[0].BytesReceived != 2*frameLen {
			t.Errorf("upload of %d bytes: %+v, want so many and the headers, and two answers", uploaded, events)
		}
		if got := s.traffic(); got != total {
			t.Errorf("the connection carried %+v, the calls %+v", got, total)
		}
	}
	t.Logf("dial, 2 pings and 2 uploads of %d bytes: %+v", uploaded, total)
}

func (t *traffic) add(more traffic) {
	t.sent += more.sent
	t.received += more.received
}

func TestObserver_ListReceivesWhatTheHostSends(t *testing.T) {
	says := script{}.entry(rpcPoolLookup, sayReply, xdrString("p")+string(make([]byte, 16))).
		entry(rpcVolumeList, sayReply, manyVolumes(1000))
	l := &eventLog{}
	s := watched(t, l, func(p rpcPeer) {
		p.login()
		p.perform(says.lines())
	})
	l.take()
	names, err := s.VolumeNames(t.Context(), "p")
	if err != nil || len(names) != 1000 {
		t.Fatalf("%d names, error %v", len(names), err)
	}
	events := l.take()
	if want := uint64(len(manyVolumes(1000))); len(events) != 1 || events[0].BytesReceived < want || events[0].BytesReceived > want+1024 {
		t.Errorf("events %+v, want one with %d bytes received and a little more", events, want)
	}
}

func manyVolumes(n int) string {
	list := xdrInt(uint32(n))
	for range n {
		list += xdrString("p") + xdrString("a-volume") + xdrString("k")
	}
	return list + xdrInt(uint32(n))
}

// A login that fails leaves no connection whose bytes could be counted.
func TestObserver_SeesADialWhoseLoginFails(t *testing.T) {
	socket := listenUnix(t, func(net.Conn) {})
	uri, err := parseURI("qemu:///system?socket=" + url.QueryEscape(socket))
	if err != nil {
		t.Fatal(err)
	}
	l := &eventLog{}
	d := (&stubDialer{}).decorator(io.Discard)
	d.next, d.watch = &libvirtDialer{uri: uri}, l
	_, err = d.open(t.Context())
	wantDialError(t, err, ClassTransient, nil)
	if events := l.take(); len(events) != 1 || events[0].Op != OpDial || ClassOf(events[0].Err) != ClassTransient {
		t.Errorf("events %+v, want the dial that failed", events)
	}
}
