package kvm2

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"
)

// decorator wraps a Dialer: the sessions that it opens give every call a deadline, every error its class, operation
// and host, and the log a line. No payload is ever logged.
type decorator struct {
	next    Dialer
	host    string
	timeout time.Duration
	log     *slog.Logger
	watch   Observer // nil when nobody watches
}

// open dials. The deadline covers the whole way to a usable session.
func (d *decorator) open(ctx context.Context) (*session, error) {
	var opened Conn
	conn, err := observe(ctx, d, OpDial, func() traffic { return trafficOf(opened) }, func(ctx context.Context) (Conn, error) {
		c, err := d.next.Dial(ctx)
		if err == nil {
			opened = c
		}
		return c, err
	})
	if err != nil {
		return nil, err
	}
	return &session{conn: conn, d: d}, nil
}

// session is a decorated Conn.
type session struct {
	conn   Conn
	d      *decorator
	broken bool // set by an error after which the Conn must not be used again
}

var _ Conn = (*session)(nil)

// observe runs one call under the decorator's deadline. moved tells what its connection has carried so far.
func observe[T any](
	ctx context.Context, d *decorator, op Op, moved func() traffic, call func(context.Context) (T, error),
) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	return observeUnbounded(ctx, d, op, moved, call)
}

// observeUnbounded runs one call that may take as long as its caller's context: a transfer.
func observeUnbounded[T any](
	ctx context.Context, d *decorator, op Op, moved func() traffic, call func(context.Context) (T, error),
) (T, error) {
	start, before := time.Now(), moved()
	v, err := call(ctx)
	took := time.Since(start)
	err = classify(op, d.host, err)
	if d.watch != nil {
		after := moved()
		d.watch.CallObserved(CallEvent{
			Host: d.host, Op: op, Duration: took, Err: err,
			BytesSent: after.sent - before.sent, BytesReceived: after.received - before.received,
		})
	}
	attrs := []slog.Attr{slog.String("host", d.host), slog.String("op", string(op)), slog.Duration("took", took)}
	if err != nil {
		attrs = append(attrs, slog.String("class", ClassOf(err).String()), slog.String("error", err.Error()))
	}
	d.log.LogAttrs(ctx, slog.LevelDebug, "libvirt call", attrs...)
	return v, err
}

// ask runs a call that returns a value, tell one that does not.
func ask[T any](ctx context.Context, s *session, op Op, call func(context.Context) (T, error)) (T, error) {
	v, err := observe(ctx, s.d, op, s.traffic, call)
	s.note(err)
	return v, err
}

func (s *session) tell(ctx context.Context, op Op, call func(context.Context) error) error {
	_, err := ask(ctx, s, op, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	return err
}

func (s *session) transfer(ctx context.Context, op Op, call func(context.Context) error) error {
	_, err := observeUnbounded(ctx, s.d, op, s.traffic, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	s.note(err)
	return err
}

// note marks the session broken after every error that libvirt did not report itself.
func (s *session) note(err error) {
	if err == nil {
		return
	}
	if _, ok := errors.AsType[*LibvirtError](err); !ok {
		s.broken = true
	}
}

func (s *session) traffic() traffic { return trafficOf(s.conn) }

func (s *session) Close() error { return s.conn.Close() }

func (s *session) HostInfo(ctx context.Context) (HostInfo, error) {
	return ask(ctx, s, OpHostInfo, s.conn.HostInfo)
}

func (s *session) Domains(ctx context.Context) ([]Domain, error) {
	return ask(ctx, s, OpDomainList, s.conn.Domains)
}

func (s *session) DomainByName(ctx context.Context, name string) (Domain, error) {
	return ask(ctx, s, OpDomainLookup, func(ctx context.Context) (Domain, error) { return s.conn.DomainByName(ctx, name) })
}

func (s *session) DomainByUUID(ctx context.Context, uuid UUID) (Domain, error) {
	return ask(ctx, s, OpDomainLookup, func(ctx context.Context) (Domain, error) { return s.conn.DomainByUUID(ctx, uuid) })
}

func (s *session) DefineDomain(ctx context.Context, xml string) error {
	return s.tell(ctx, OpDomainDefine, func(ctx context.Context) error { return s.conn.DefineDomain(ctx, xml) })
}

func (s *session) StartDomain(ctx context.Context, uuid UUID) error {
	return s.tell(ctx, OpDomainStart, func(ctx context.Context) error { return s.conn.StartDomain(ctx, uuid) })
}

func (s *session) SetDomainMetadata(ctx context.Context, uuid UUID, xml string) error {
	return s.tell(ctx, OpDomainSetMetadata, func(ctx context.Context) error { return s.conn.SetDomainMetadata(ctx, uuid, xml) })
}

func (s *session) DestroyDomain(ctx context.Context, uuid UUID, mode DestroyMode) error {
	return s.tell(ctx, OpDomainDestroy, func(ctx context.Context) error { return s.conn.DestroyDomain(ctx, uuid, mode) })
}

func (s *session) UndefineDomain(ctx context.Context, uuid UUID) error {
	return s.tell(ctx, OpDomainUndefine, func(ctx context.Context) error { return s.conn.UndefineDomain(ctx, uuid) })
}

func (s *session) Addresses(ctx context.Context, query AddressQuery) ([]AddressRecord, error) {
	return ask(ctx, s, OpDomainAddresses, func(ctx context.Context) ([]AddressRecord, error) { return s.conn.Addresses(ctx, query) })
}

func (s *session) Pool(ctx context.Context, name string) (Pool, error) {
	return ask(ctx, s, OpPoolLookup, func(ctx context.Context) (Pool, error) { return s.conn.Pool(ctx, name) })
}

func (s *session) RefreshPool(ctx context.Context, name string) error {
	return s.tell(ctx, OpPoolRefresh, func(ctx context.Context) error { return s.conn.RefreshPool(ctx, name) })
}

func (s *session) Network(ctx context.Context, name string) (Network, error) {
	return ask(ctx, s, OpNetworkLookup, func(ctx context.Context) (Network, error) { return s.conn.Network(ctx, name) })
}

func (s *session) VolumeNames(ctx context.Context, pool string) ([]string, error) {
	return ask(ctx, s, OpVolumeList, func(ctx context.Context) ([]string, error) { return s.conn.VolumeNames(ctx, pool) })
}

func (s *session) Volumes(ctx context.Context, pool string) ([]Volume, error) {
	return ask(ctx, s, OpVolumeList, func(ctx context.Context) ([]Volume, error) { return s.conn.Volumes(ctx, pool) })
}

func (s *session) Volume(ctx context.Context, pool, name string) (Volume, error) {
	return ask(ctx, s, OpVolumeLookup, func(ctx context.Context) (Volume, error) { return s.conn.Volume(ctx, pool, name) })
}

func (s *session) CreateVolume(ctx context.Context, pool, xml string) error {
	return s.tell(ctx, OpVolumeCreate, func(ctx context.Context) error { return s.conn.CreateVolume(ctx, pool, xml) })
}

func (s *session) DeleteVolume(ctx context.Context, pool, name string) error {
	return s.tell(ctx, OpVolumeDelete, func(ctx context.Context) error { return s.conn.DeleteVolume(ctx, pool, name) })
}

func (s *session) UploadVolume(ctx context.Context, pool, name string, offset int64, r io.Reader) error {
	return s.transfer(ctx, OpVolumeUpload, func(ctx context.Context) error { return s.conn.UploadVolume(ctx, pool, name, offset, r) })
}

func (s *session) DownloadVolume(ctx context.Context, pool, name string, w io.Writer) error {
	return s.transfer(ctx, OpVolumeDownload, func(ctx context.Context) error { return s.conn.DownloadVolume(ctx, pool, name, w) })
}

// alive reports whether the session can still be used, as far as it is known without asking the host.
func (s *session) alive() bool {
	c, ok := s.conn.(interface{ Alive() bool })
	return !ok || c.Alive()
}

// ping asks the host for an answer, if the Conn knows how.
func (s *session) ping(ctx context.Context) error {
	c, ok := s.conn.(interface {
		Ping(ctx context.Context) error
	})
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return s.tell(ctx, OpPing, c.Ping)
}
