package kvm2

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// Procedures of libvirt's RPC protocol (src/remote/remote_protocol.x).
const (
	rpcGetVersion     = 4
	rpcNodeInfo       = 6
	rpcCapabilities   = 7
	rpcLookupByUUID   = 24
	rpcNetworkLookup  = 46
	rpcHostname       = 59
	rpcPoolLookup     = 84
	rpcPoolInfo       = 87
	rpcPoolXML        = 88
	rpcVolumeXML      = 99
	rpcLibVersion     = 157
	rpcVolumeUpload   = 208
	rpcVolumeDownload = 209
	rpcDomainState    = 212
	rpcMetadata       = 265
	rpcVolumeList     = 282
	rpcLeases         = 341
	rpcDomainStats    = 344
	rpcAddresses      = 353
)

// script is what a peer of FuzzSession says: entries of a procedure (two bytes), a kind, a length (two bytes) and so
// many bytes. The next entry of a procedure answers the next call of it; a call without one ends the connection. So the
// peer sends no more than the script, in whatever order the calls arrive.
type script []byte

const (
	sayReply  = iota // an answer with this payload
	sayString        // an answer that is one string
	sayError         // an error with this payload
	sayStream        // a packet of the stream of that call
	sayEnd           // its end, with the payload for status
	sayRaw           // bytes without a header
	sayKinds
	sayMore = 0x80 // the next entry belongs to the same call
)

func (s script) entry(procedure uint16, kind byte, payload string) script {
	s = binary.BigEndian.AppendUint16(s, procedure)
	s = binary.BigEndian.AppendUint16(append(s, kind), uint16(len(payload)))
	return append(s, payload...)
}

type line struct {
	kind    byte
	payload []byte
}

// lines sorts the entries by procedure; the last may be cut off.
func (s script) lines() map[uint32][]line {
	out := map[uint32][]line{}
	for len(s) >= 5 {
		procedure, kind, n := uint32(binary.BigEndian.Uint16(s)), s[2], int(binary.BigEndian.Uint16(s[3:]))
		s = s[5:]
		n = min(n, len(s))
		out[procedure] = append(out[procedure], line{kind, s[:n]})
		s = s[n:]
	}
	return out
}

// perform answers calls until the script has nothing to say.
func (p rpcPeer) perform(lines map[uint32][]line) {
	for {
		procedure, serial, err := p.call()
		if err != nil {
			return
		}
		answered := false
		for more := true; more; {
			left := lines[procedure]
			if len(left) == 0 {
				return
			}
			lines[procedure] = left[1:]
			_, _ = p.Write(left[0].frame(procedure, serial))
			answered = answered || left[0].kind&^sayMore%sayKinds < sayStream
			more = left[0].kind&sayMore != 0
		}
		if !answered || procedure == rpcVolumeDownload {
			return // else the client would rightly wait
		}
	}
}

func (l line) frame(procedure, serial uint32) []byte {
	frame := func(typ, status uint32, payload []byte) []byte {
		return rpcFrame(uint32(28+len(payload)), remoteProgramNumber, procedure, typ, serial, status, payload)
	}
	switch l.kind &^ sayMore % sayKinds {
	case sayString:
		return frame(1, 0, []byte(xdrString(string(l.payload))))
	case sayError:
		return frame(1, 1, l.payload)
	case sayStream:
		return frame(3, 2, l.payload)
	case sayEnd:
		return frame(3, uint32(len(l.payload)), l.payload)
	case sayRaw:
		return l.payload
	}
	return frame(1, 0, l.payload)
}

func xdrInt(words ...uint32) string {
	var b []byte
	for _, w := range words {
		b = binary.BigEndian.AppendUint32(b, w)
	}
	return string(b)
}

func xdrString(s string) string {
	return xdrInt(uint32(len(s))) + s + strings.Repeat("\x00", (4-len(s)%4)%4)
}

// rpcError is an error with that code.
func rpcError(code uint32, message string) string {
	return xdrInt(code, 20, 1) + xdrString(message) + xdrInt(2) + strings.Repeat("\x00", 32)
}

// readingCalls are the calls of a session that decode what a host says. Each reports a value that makes no sense.
var readingCalls = []func(context.Context, *session) (complaint string, err error){
	func(ctx context.Context, s *session) (string, error) {
		i, err := s.HostInfo(ctx)
		return complainIf(i.MemoryBytes < 0 || i.CPUs < 0, "negative size"), err
	},
	func(ctx context.Context, s *session) (string, error) { _, err := s.Domains(ctx); return "", err },
	func(ctx context.Context, s *session) (string, error) {
		d, err := s.DomainByUUID(ctx, UUID{1})
		return complainIf(err == nil && d.UUID != UUID{1}, "another domain"), err
	},
	func(ctx context.Context, s *session) (string, error) {
		records, err := s.Addresses(ctx, AddressQuery{Networks: []string{"n"}, Domains: []UUID{{1}}})
		for _, r := range records {
			if !r.IP.IsValid() {
				return "address that is none", err
			}
		}
		return "", err
	},
	func(ctx context.Context, s *session) (string, error) {
		p, err := s.Pool(ctx, "p")
		return complainIf(min(p.CapacityBytes, p.AllocatedBytes, p.AvailableBytes) < 0, "negative size"), err
	},
	func(ctx context.Context, s *session) (string, error) {
		_, err := s.VolumeNames(ctx, "p")
		return "", err
	},
	func(ctx context.Context, s *session) (string, error) {
		volumes, err := s.Volumes(ctx, "p")
		for _, v := range volumes {
			if min(v.CapacityBytes, v.PhysicalBytes, v.AllocatedBytes) < 0 {
				return "negative size", err
			}
		}
		return "", err
	},
	func(ctx context.Context, s *session) (string, error) {
		v, err := s.Volume(ctx, "p", "v")
		return complainIf(min(v.CapacityBytes, v.PhysicalBytes, v.AllocatedBytes) < 0, "negative size"), err
	},
	func(ctx context.Context, s *session) (string, error) {
		return "", s.DownloadVolume(ctx, "p", "v", io.Discard)
	},
}

func complainIf(wrong bool, complaint string) string {
	if wrong {
		return complaint
	}
	return ""
}

// sessionSeed is what a peer says to one of the readingCalls.
type sessionSeed struct {
	call int
	good bool // the call succeeds
	says script
}

// sessionSeeds are good hosts, and hosts with something out of bounds.
func sessionSeeds() []sessionSeed {
	const huge = 0xffffffff
	str, zeros := xdrString, func(n int) string { return strings.Repeat("\x00", n) }
	domain := str("d") + "\x01" + zeros(15) + xdrInt(1)
	pool := xdrInt(2) + zeros(24)
	host := func(memory, capabilities string) script {
		return script{}.entry(rpcHostname, sayString, "h").entry(rpcLibVersion, sayReply, zeros(8)).
			entry(rpcGetVersion, sayReply, zeros(8)).entry(rpcCapabilities, sayString, capabilities).
			entry(rpcNodeInfo, sayReply, zeros(128)+memory+xdrInt(huge, 1, 1, 1, 1, 1))
	}
	volumes := func(names ...string) script {
		list := xdrInt(uint32(len(names)))
		for _, n := range names {
			list += str("p") + str(n) + str("k")
		}
		return script{}.entry(rpcPoolLookup, sayReply, str("p")+zeros(16)).entry(rpcVolumeList, sayReply, list+xdrInt(uint32(len(names))))
	}
	const volume = `<volume><name>v</name><capacity unit='bytes'>18446744073709551615</capacity><target><format type='raw'/></target></volume>`
	const lease = "192.0.2.1"
	return []sessionSeed{
		{4, false, script{}.entry(rpcPoolLookup, sayReply, str("p")+zeros(16)).entry(rpcPoolInfo, sayReply, pool).
			entry(rpcPoolXML, sayString, `<pool type='dir'><capacity>-1</capacity></pool>`)},
		{0, true, host(zeros(4)+xdrInt(1<<20), `<capabilities><host><cpu><arch>x86_64</arch></cpu></host></capabilities>`)},
		{0, true, host(xdrInt(huge, huge), `<capabilities><guest><arch name=''><domain/></arch></guest></capabilities>`)},
		{0, false, host(xdrInt(0, 1), "\x00")},
		{1, true, script{}.entry(rpcDomainStats, sayReply, xdrInt(1)+domain+xdrInt(1)+str("state.state")+xdrInt(1, huge)).
			entry(rpcMetadata, sayString, `<machine version="1"/>`)},
		{1, false, script{}.entry(rpcDomainStats, sayReply, xdrInt(1)+domain+xdrInt(1)+str("state.state")+xdrInt(9))},
		{1, false, script{}.entry(rpcDomainStats, sayReply, xdrInt(huge))},
		{2, true, script{}.entry(rpcLookupByUUID, sayReply, domain).entry(rpcDomainState, sayReply, xdrInt(1, huge)).
			entry(rpcMetadata, sayError, rpcError(80, "no metadata\x00"))},
		{2, false, script{}.entry(rpcLookupByUUID, sayError, rpcError(0, "success")).entry(rpcDomainState, sayError, rpcError(42, "none"))},
		{3, true, script{}.entry(rpcNetworkLookup, sayReply, str("n")+zeros(16)).
			entry(rpcLeases, sayReply, xdrInt(1)+str("br0")+xdrInt(1<<31, huge, 0)+xdrInt(1)+str("02:00:00:00:00:01")+xdrInt(0)+
				str(lease)+xdrInt(huge, 0, 0, 1)).
			entry(rpcAddresses, sayReply, xdrInt(1)+str("eth0")+xdrInt(0)+xdrInt(1, 0)+str(lease)+xdrInt(24)).
			entry(rpcAddresses, sayError, rpcError(86, "no agent"))},
		{4, true, script{}.entry(rpcPoolLookup, sayReply, str("p")+zeros(16)).entry(rpcPoolInfo, sayReply, pool).
			entry(rpcPoolXML, sayString, `<pool><target><path>/pool</path></target></pool>`)},
		{4, true, script{}.entry(rpcPoolLookup, sayReply, str("p")+zeros(16)).entry(rpcPoolInfo, sayReply, xdrInt(2)+strings.Repeat("\xff", 24)).
			entry(rpcPoolXML, sayString, `<pool type='dir'/>`)},
		{6, false, volumes("v", "", "w\x00").entry(rpcVolumeXML, sayString, volume).entry(rpcVolumeXML, sayError, rpcError(50, "gone")).
			entry(rpcVolumeXML, sayString, "<volume")},
		{5, true, volumes()},
		{7, true, script{}.entry(rpcVolumeXML, sayString, volume)},
		{7, false, script{}.entry(rpcVolumeXML, sayReply, xdrInt(huge)+"<volume/>")},
		{7, false, script{}.entry(rpcVolumeXML, sayRaw, "HTTP/1.1 400 Bad Request\r\n\r\n")},
		{8, true, script{}.entry(rpcVolumeDownload, sayReply|sayMore, "").entry(rpcVolumeDownload, sayStream|sayMore, "content").
			entry(rpcVolumeDownload, sayStream|sayMore, "").entry(rpcVolumeDownload, sayEnd, "")},
		{8, false, script{}.entry(rpcVolumeDownload, sayReply|sayMore, "").entry(rpcVolumeDownload, sayEnd|sayMore, "\x00").
			entry(rpcVolumeDownload, sayEnd, "")},
		{8, false, script{}.entry(rpcVolumeDownload, sayError|sayMore, rpcError(50, "none")).entry(rpcVolumeDownload, sayStream, "x")},
	}
}

// FuzzSession lets a host say anything in answer to the calls that read: nothing panics, hangs or takes memory out of
// proportion, and what libvirt did not answer itself is Transient and ends the session.
func FuzzSession(f *testing.F) {
	for _, seed := range sessionSeeds() {
		f.Add(uint8(seed.call), []byte(seed.says))
	}
	f.Fuzz(func(t *testing.T, which uint8, says []byte) {
		if len(says) > 1<<16 {
			return
		}
		s := performTo(t, script(says))
		checkSession(t, s, readingCalls[int(which)%len(readingCalls)])
	})
}

// performTo returns a session with a peer that follows a script. The test ends when both have.
func performTo(t *testing.T, says script) *session {
	t.Helper()
	near, far := net.Pipe()
	done, connected := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = far.Close() }()
		p := rpcPeer{far}
		p.login()
		<-connected // the client itself has a race between the end of connecting and that of the connection
		p.perform(says.lines())
	}()
	conn, err := openLibvirt(t.Context(), near, "qemu:///system")
	if err != nil {
		t.Fatal(err)
	}
	close(connected)
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
		<-conn.client.Disconnected() // the client's own goroutine has ended
	})
	return &session{conn: conn, d: (&stubDialer{}).decorator(io.Discard)}
}

func checkSession(t *testing.T, s *session, call func(context.Context, *session) (string, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	complaint, err := call(ctx, s)
	runtime.ReadMemStats(&after)
	if alloc := after.TotalAlloc - before.TotalAlloc; alloc > 64<<20 {
		t.Errorf("%d bytes were allocated", alloc)
	}
	if complaint != "" {
		t.Error(complaint)
	}
	if ctx.Err() != nil {
		t.Errorf("the call hangs: %v", err)
	}
	if _, answered := errors.AsType[*LibvirtError](err); err == nil || answered {
		return
	}
	if ClassOf(err) != ClassTransient || !s.broken {
		t.Errorf("error %v (%s), broken %t; want Transient and a session that is given up", err, ClassOf(err), s.broken)
	}
}

// Seeds that are whole must be understood, or FuzzSession would never get beyond the framing.
func TestSession_GoodHostsAreUnderstood(t *testing.T) {
	for i, seed := range sessionSeeds() {
		s := performTo(t, seed.says)
		if _, err := readingCalls[seed.call](t.Context(), s); (err == nil) != seed.good {
			t.Errorf("seed %d, call %d: error %v, want success %t", i, seed.call, err, seed.good)
		}
	}
}

func FuzzReadPoolTarget(f *testing.F) {
	f.Add(`<pool type='dir'><name>p</name><target><path>/pool</path></target></pool>`)
	f.Add(`<pool><capacity unit='bytes'>18446744073709551616</capacity><target/></pool>`)
	f.Add(`<pool><target><path>&#0;</path></target>`)
	f.Fuzz(func(t *testing.T, xml string) {
		if path, err := readPoolTarget(xml); err != nil && path != "" {
			t.Errorf("readPoolTarget(%q) = %q with error %v", xml, path, err)
		}
	})
}

func FuzzReadCapabilities(f *testing.F) {
	f.Add(`<capabilities><host><cpu><arch>x86_64</arch></cpu></host><guest><arch name='x86_64'><domain type='kvm'/><domain type='qemu'/>` +
		`</arch></guest></capabilities>`)
	f.Add(`<capabilities><guest><arch name=''><domain/></arch></guest><guest><arch name=''><domain/></arch></guest></capabilities>`)
	f.Add(`<capabilities><host><cpu><topology sockets='-1'/></cpu></host></capabilities>`)
	f.Fuzz(func(t *testing.T, xml string) {
		var info HostInfo
		if err := readCapabilities(xml, &info); err != nil {
			return
		}
		if !slices.IsSorted(info.DomainTypes) || len(slices.Compact(slices.Clone(info.DomainTypes))) != len(info.DomainTypes) {
			t.Errorf("readCapabilities(%q): domain types %q, want each once and sorted", xml, info.DomainTypes)
		}
	})
}
