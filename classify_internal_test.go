package kvm2

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	libvirt "github.com/digitalocean/go-libvirt"
	"golang.org/x/crypto/ssh"

	"github.com/kvm2/kvm2/internal/sshdial"
)

// sentinels are all sentinels by their names.
var sentinels = map[string]error{
	"ErrNotFound": ErrNotFound, "ErrQuotaExceeded": ErrQuotaExceeded, "ErrForeignOwner": ErrForeignOwner, "ErrInvalidSpec": ErrInvalidSpec,
	"ErrInvalidConfig": ErrInvalidConfig, "ErrUnauthorized": ErrUnauthorized, "ErrHostKey": ErrHostKey, "ErrUnsupported": ErrUnsupported,
	"ErrConflict": ErrConflict, "ErrImage": ErrImage, "ErrClosed": ErrClosed,
}

// wantIs fails unless err is that sentinel and no other; nil stands for none.
func wantIs(t testing.TB, err, want error) {
	t.Helper()
	for name, sentinel := range sentinels {
		if got := errors.Is(err, sentinel); got != errors.Is(sentinel, want) {
			t.Errorf("errors.Is(%v, %s) = %t", err, name, got)
		}
	}
}

// wantClassified classifies what came out of an operation and checks all that is said of it.
func wantClassified(t testing.TB, op Op, cause error, class Class, sentinel error) {
	t.Helper()
	err := classify(op, "kvm-1", cause)
	if got := ClassOf(err); got != class {
		t.Errorf("%s: class of %q is %s, want %s", op, cause, got, class)
	}
	wantIs(t, err, sentinel)
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Op != op || e.Host != "kvm-1" || !errors.Is(err, cause) {
		t.Errorf("%s: %+v does not say what failed where, or lost its cause", op, err)
	}
}

// readTable reads tab-separated rows of so many columns.
func readTable(t testing.TB, path string, columns int) [][]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var rows [][]string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		row := strings.Split(lines.Text(), "\t")
		if len(row) != columns {
			t.Fatalf("%s: %q has %d columns, want %d", path, lines.Text(), len(row), columns)
		}
		rows = append(rows, row)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

func classNamed(t testing.TB, name string) Class {
	t.Helper()
	for c := ClassTransient; c <= ClassNotFound; c++ {
		if c.String() == name {
			return c
		}
	}
	t.Fatalf("%q is no class", name)
	return ClassNone
}

func TestClassify_EveryObservedMessage(t *testing.T) {
	type expectation struct{ op, class, sentinel string }
	expected := map[string]expectation{}
	for _, row := range readTable(t, "testdata/classes.tsv", 5) {
		expected[row[0]+" "+row[1]] = expectation{row[2], row[3], row[4]}
	}
	for _, row := range readTable(t, "testdata/libvirt-observed.tsv", 3) {
		key := row[0] + " " + row[1]
		want, ok := expected[key]
		if !ok {
			t.Errorf("testdata/classes.tsv does not say what %q is taken for", key)
			continue
		}
		delete(expected, key)
		t.Run(key, func(t *testing.T) {
			code, err := strconv.Atoi(row[0])
			if err != nil {
				t.Fatal(err)
			}
			op := Op(strings.TrimPrefix(want.op, "-"))
			cause := &LibvirtError{Code: code, Message: strings.ReplaceAll(row[2], " | ", "\n")}
			wantClassified(t, op, cause, classNamed(t, want.class), sentinels[want.sentinel])
		})
	}
	for key := range expected {
		t.Errorf("testdata/classes.tsv has %q, which was never observed", key)
	}
}

func TestClassify_CodesAndTexts(t *testing.T) {
	tests := []struct {
		code     int
		text     string
		class    Class
		sentinel error
		why      string
	}{
		{code: 1, text: "internal error: No space left on device", class: ClassQuota, sentinel: ErrQuotaExceeded},
		{code: 1, text: "internal error: Device or resource busy", class: ClassTransient},
		{code: 1, text: "internal error: received hangup / error event on socket: keepalive", class: ClassTransient},
		{code: 1, text: `qemu: -blockdev {"driver":"qcow2"}: Failed to get "write" lock`, class: ClassTransient, why: "a qemu that is ending still holds it"},
		{code: 1, text: `qemu: -blockdev {"driver":"file"}: Could not open '/srv/d': Permission denied`, class: ClassPermanent, why: "every option is called -blockdev: that is no lock"},
		{code: 1, text: `qemu: -blockdev {"driver":"qcow2"}: Image is not in qcow2 format`, class: ClassPermanent},
		{code: 1, text: "internal error: Unknown CPU model x", class: ClassPermanent},
		{code: 1, text: "qemu: unable to find CPU model 'x'", class: ClassPermanent},
		{code: 1, text: "qemu: unsupported machine type", class: ClassPermanent},
		{code: 1, text: "internal error: unexpected QEMU URI path '/x'", class: ClassPermanent},
		{code: 1, text: "internal error: Unable to parse URI x", class: ClassPermanent},
		{code: 1, text: "internal error: something new", class: ClassTransient},

		{code: 2, text: "out of memory", class: ClassQuota, sentinel: ErrQuotaExceeded},

		{code: 3, class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 5, class: ClassPermanent},
		{code: 8, class: ClassPermanent},
		{code: 21, class: ClassPermanent},
		{code: 27, class: ClassPermanent},
		{code: 35, class: ClassPermanent},
		{code: 67, class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 74, class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 82, class: ClassPermanent},
		{code: 84, class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 91, class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 92, class: ClassPermanent},
		{code: 94, class: ClassPermanent},

		{code: 9, text: "operation failed: domain 'a' already exists with uuid x", class: ClassTransient, sentinel: ErrConflict},
		{code: 9, text: "operation failed: domain is already defined with uuid x", class: ClassTransient, sentinel: ErrConflict},
		{code: 9, text: "operation failed: Unable to find any firmware to satisfy 'efi'", class: ClassPermanent, sentinel: ErrUnsupported},
		{code: 9, text: "operation failed: Cannot allocate memory", class: ClassQuota, sentinel: ErrQuotaExceeded},
		{code: 9, text: "operation failed: something new", class: ClassTransient},

		{code: 28, class: ClassTransient, sentinel: ErrConflict},
		{code: 37, class: ClassTransient, sentinel: ErrConflict},
		{code: 90, class: ClassTransient, sentinel: ErrConflict},

		{code: 29, class: ClassPermanent, sentinel: ErrUnauthorized},
		{code: 45, class: ClassPermanent, sentinel: ErrUnauthorized},
		{code: 79, class: ClassPermanent, sentinel: ErrUnauthorized},
		{code: 88, class: ClassPermanent, sentinel: ErrUnauthorized},

		{code: 38, text: "cannot write '/x': No space left on device", class: ClassQuota, sentinel: ErrQuotaExceeded},
		{code: 38, text: "cannot fork: Cannot allocate memory", class: ClassQuota, sentinel: ErrQuotaExceeded},
		{code: 38, text: "cannot write '/x': Disk quota exceeded", class: ClassQuota, sentinel: ErrQuotaExceeded},
		{code: 38, text: "Failed to terminate process 7 with SIGTERM: Device or resource busy", class: ClassTransient},
		{code: 38, text: "cannot fork: Resource temporarily unavailable", class: ClassTransient},
		{code: 38, text: "Cannot recv data: Connection reset by peer", class: ClassTransient},
		{code: 38, text: "Cannot write data: Broken pipe", class: ClassTransient},
		{code: 38, text: "cannot open '/x': Permission denied", class: ClassPermanent},
		{code: 38, text: "cannot chown '/x': Operation not permitted", class: ClassPermanent},
		{code: 38, text: "cannot extend '/x': File too large", class: ClassPermanent},
		{code: 38, text: "Cannot access storage file '/x': No such file or directory", class: ClassPermanent},
		{code: 38, text: "Input/output error", class: ClassTransient},

		{code: 39, text: "authentication required", class: ClassPermanent, sentinel: ErrUnauthorized},
		{code: 39, text: "Unable to decode message payload", class: ClassPermanent},
		{code: 39, text: "internal error", class: ClassTransient},

		{code: 42, class: ClassPermanent, why: "a domain that somebody else needs"},
		{code: 43, class: ClassPermanent},
		{code: 49, class: ClassPermanent},
		{code: 50, class: ClassPermanent},

		{code: 55, text: "Requested operation is not valid: domain is already running", class: ClassTransient, sentinel: ErrConflict},
		{code: 55, text: "Requested operation is not valid: storage pool 'p' is already active", class: ClassTransient, sentinel: ErrConflict},
		{code: 55, text: "Requested operation is not valid: domain is not running", class: ClassTransient},
		{code: 55, text: "Requested operation is not valid: storage pool 'p' is not active", class: ClassPermanent},
		{code: 55, text: "Requested operation is not valid: network 'n' is not active", class: ClassPermanent},
		{code: 55, text: "Requested operation is not valid: storage pool 'p' is starting up", class: ClassTransient, why: "it is ready in a moment"},
		{code: 55, text: "Requested operation is not valid: pool 'p' has asynchronous jobs running.", class: ClassTransient},
		{code: 55, text: "Requested operation is not valid: volume 'v' is still in use.", class: ClassTransient},
		{code: 55, text: "Requested operation is not valid: volume 'v' is still being allocated.", class: ClassTransient},
		{code: 55, text: "Requested operation is not valid: volume target path '/x' already exists", class: ClassTransient, sentinel: ErrConflict},
		{code: 55, text: "Requested operation is not valid: something new", class: ClassTransient},

		{code: 68, class: ClassTransient},
		{code: 78, class: ClassTransient},
		{code: 80, class: ClassTransient, why: "no metadata: not ours, but never gone"},
		{code: 86, class: ClassTransient},
		{code: 87, class: ClassTransient},
		{code: 97, class: ClassTransient},
		{code: 112, class: ClassTransient},

		{code: 0, class: ClassTransient},
		{code: -1, class: ClassTransient},
		{code: 9999, class: ClassTransient},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%d %s", tt.code, tt.text), func(t *testing.T) {
			// An operation that no code belongs to: what the code means by itself.
			wantClassified(t, OpHostInfo, &LibvirtError{Code: tt.code, Message: tt.text}, tt.class, tt.sentinel)
			if t.Failed() {
				t.Log(tt.why)
			}
		})
	}
}

// allOps are all operations.
var allOps = []Op{
	OpDial, OpHostInfo, OpDomainList, OpDomainLookup, OpDomainDefine, OpDomainStart, OpDomainSetMetadata, OpDomainDestroy, OpDomainUndefine,
	OpDomainAddresses, OpPoolLookup, OpPoolRefresh, OpNetworkLookup, OpVolumeList, OpVolumeLookup, OpVolumeCreate, OpVolumeDelete,
	OpVolumeUpload, OpVolumeDownload,
}

func TestClassify_NotFoundOnlyForTheObjectAskedAbout(t *testing.T) {
	absent := map[Op]int{
		OpDomainLookup: 42, OpDomainStart: 42, OpDomainSetMetadata: 42, OpDomainDestroy: 42, OpDomainUndefine: 42,
		OpPoolLookup: 49, OpNetworkLookup: 43,
		OpVolumeLookup: 50, OpVolumeDelete: 50, OpVolumeUpload: 50, OpVolumeDownload: 50,
	}
	for _, op := range allOps {
		for _, code := range []int{42, 43, 49, 50} {
			cause := &LibvirtError{Code: code, Message: "not found"}
			if absent[op] == code {
				wantClassified(t, op, cause, ClassNotFound, ErrNotFound)
			} else {
				wantClassified(t, op, cause, ClassPermanent, nil)
			}
		}
	}
}

func TestClassify_HostsInOtherLanguagesFallToTheCode(t *testing.T) {
	tests := []struct {
		code  int
		text  string
		op    Op
		class Class
		is    error
		why   string
	}{
		{1, "Interner Fehler: QEMU hat den Monitor unerwartet geschlossen: Kann Speicher nicht zuweisen", OpDomainStart, ClassTransient, nil, ""},
		{9, "Vorgang gescheitert: Domain 'vm1' existiert bereits mit UUID 11111111-1111-1111-1111-111111111111", OpDomainDefine, ClassTransient, nil, "the next poll finds it"},
		{38, "Kann Datei '/x' nicht erweitern: Auf dem Gerät ist kein Speicherplatz mehr verfügbar", OpVolumeCreate, ClassTransient, nil, "never Permanent by guess"},
		{38, "ファイル '/x' を拡張できません: デバイスに空き領域がありません", OpVolumeCreate, ClassTransient, nil, ""},
		{39, "Authentification requise", OpDial, ClassTransient, nil, ""},
		{42, "ドメインが見つかりません: 名前 'x' に一致するドメインがありません", OpDomainLookup, ClassNotFound, ErrNotFound, "the code says it in every language"},
		{42, "Domaine non trouvé : aucun domaine correspondant au nom « x »", OpDomainUndefine, ClassNotFound, ErrNotFound, ""},
		{50, "Speicherdatenträger nicht gefunden", OpVolumeDelete, ClassNotFound, ErrNotFound, ""},
		{55, "L'opération demandée n'est pas valide : le domaine est déjà en cours de fonctionnement", OpDomainStart, ClassTransient, nil, "start looks whether it runs"},
		{55, "要求された操作は無効です: ドメインは実行されていません", OpDomainDestroy, ClassTransient, nil, ""},
		{67, "Nicht unterstützte Konfiguration", OpDomainDefine, ClassPermanent, ErrUnsupported, ""},
		{88, "アクセスが拒否されました", OpDomainDefine, ClassPermanent, ErrUnauthorized, ""},
		{90, "Le volume de stockage existe déjà", OpVolumeCreate, ClassTransient, ErrConflict, ""},
	}
	for _, tt := range tests {
		wantClassified(t, tt.op, &LibvirtError{Code: tt.code, Message: tt.text}, tt.class, tt.is)
		if t.Failed() {
			t.Fatalf("at code %d: %s", tt.code, tt.why)
		}
	}
}

func TestClassify_BelowLibvirt(t *testing.T) {
	dial := func(err error) error {
		return fmt.Errorf("no libvirt daemon answers: %w", errors.Join(
			&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.ENOENT)},
			&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", err)}))
	}
	tests := []struct {
		name  string
		err   error
		class Class
		is    error
		why   string
	}{
		{name: "cancelled", err: context.Canceled, class: ClassTransient},
		{name: "deadline", err: fmt.Errorf("x: %w", context.DeadlineExceeded), class: ClassTransient},
		{name: "EOF", err: io.EOF, class: ClassTransient},
		{name: "cut off", err: io.ErrUnexpectedEOF, class: ClassTransient},
		{name: "go-libvirt's interruption", err: fmt.Errorf("libvirt connection: %w", libvirt.ErrInterrupted), class: ClassTransient, why: "the outcome is unknown: look again"},
		{name: "not sent", err: fmt.Errorf("libvirt connection: %w", syscall.EINVAL), class: ClassTransient},
		{name: "broken pipe", err: fmt.Errorf("libvirt connection: %w", syscall.EPIPE), class: ClassTransient},
		{name: "no socket", err: dial(syscall.ENOENT), class: ClassTransient, why: "the daemon may be starting"},
		{name: "nobody listens", err: dial(syscall.ECONNREFUSED), class: ClassTransient},
		{name: "socket not permitted", err: dial(syscall.EACCES), class: ClassPermanent, is: ErrUnauthorized, why: "the user is not in the group"},
		{name: "unknown host key", err: &sshdial.HostKeyError{Kind: sshdial.Unknown}, class: ClassPermanent, is: ErrHostKey},
		{name: "revoked host key", err: &sshdial.HostKeyError{Kind: sshdial.Revoked}, class: ClassPermanent, is: ErrHostKey},
		{name: "not let in", err: &sshdial.AuthError{Err: errors.New("x")}, class: ClassPermanent, is: ErrUnauthorized},
		{name: "unreadable key", err: &sshdial.MaterialError{Path: "/k", What: "private key", Err: os.ErrPermission}, class: ClassPermanent, why: "the host refused nothing"},
		{name: "no common algorithm", err: &sshdial.DialError{Err: &ssh.AlgorithmNegotiationError{}}, class: ClassPermanent},
		{name: "forwarding prohibited", err: &sshdial.ForwardError{Reason: ssh.Prohibited}, class: ClassPermanent},
		{name: "forwarding failed", err: &sshdial.ForwardError{Reason: ssh.ConnectionFailed}, class: ClassTransient},
		{name: "forwarding unknown", err: &sshdial.ForwardError{Reason: ssh.UnknownChannelType}, class: ClassPermanent},
		{name: "forwarding short of resources", err: &sshdial.ForwardError{Reason: ssh.ResourceShortage}, class: ClassTransient},
		{name: "frozen peer", err: fmt.Errorf("libvirt connection: %w", &sshdial.KeepaliveError{}), class: ClassTransient},
		{name: "cancelled during the handshake", err: &sshdial.DialError{Err: context.Canceled}, class: ClassTransient},
		{name: "anything else", err: errors.New("something new"), class: ClassTransient},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wantClassified(t, OpDial, tt.err, tt.class, tt.is)
			if t.Failed() {
				t.Log(tt.why)
			}
		})
	}
}

func TestClassify_WhatIsClassifiedKeepsItsClass(t *testing.T) {
	if classify(OpDial, "kvm-1", nil) != nil {
		t.Error("classify(nil) is an error")
	}
	inner := classify(OpVolumeLookup, "kvm-1", &LibvirtError{Code: 50, Message: "x"})
	outer := classify(OpVolumeUpload, "kvm-2", fmt.Errorf("reading: %w", inner))
	if ClassOf(outer) != ClassNotFound {
		t.Errorf("class of %v is %s", outer, ClassOf(outer))
	}
	wantIs(t, outer, ErrNotFound)
	e, _ := errors.AsType[*Error](outer)
	if e.Op != OpVolumeUpload || e.Host != "kvm-2" {
		t.Errorf("the outer error says %s at %s", e.Op, e.Host)
	}
}

func TestLibvirtError_TextIsBoundedAndWhole(t *testing.T) {
	e := &LibvirtError{Code: 38, Message: strings.Repeat("ドメイン", 100_000)}
	if text := e.Error(); len(text) > 10_000 || strings.ToValidUTF8(text, "") != text {
		t.Errorf("the text has %d bytes, or a character was cut in two", len(text))
	}
	// What qemu says stands at the end, behind the options it was given.
	for _, row := range readTable(t, "testdata/libvirt-observed.tsv", 3) {
		if text := (&LibvirtError{Code: 1, Message: row[2]}).Error(); !strings.HasSuffix(text, row[2]) {
			t.Errorf("the text %q lacks the end of %q", text, row[2])
		}
	}
}

func FuzzClassify(f *testing.F) {
	for _, code := range []int32{0, -1, 1, 9, 38, 39, 42, 55} {
		f.Add(code, "Requested operation is not valid: storage pool 'p' is not active", uint8(3))
	}
	f.Fuzz(func(t *testing.T, code int32, message string, which uint8) {
		op := allOps[int(which)%len(allOps)]
		err := fmt.Errorf("creating: %w", classify(op, "kvm-1", fmt.Errorf("call: %w", &LibvirtError{Code: int(code), Message: message})))
		class := ClassOf(err)
		if class < ClassTransient || class > ClassNotFound {
			t.Fatalf("class %v", class)
		}
		absent, has := absentCode[op]
		if (class == ClassNotFound) != (has && absent == libvirt.ErrorNumber(code)) {
			t.Errorf("%s, code %d, %q: class %s", op, code, message, class)
		}
		for sentinel, of := range map[error]Class{
			ErrNotFound: ClassNotFound, ErrQuotaExceeded: ClassQuota, ErrConflict: ClassTransient,
			ErrUnauthorized: ClassPermanent, ErrUnsupported: ClassPermanent, ErrHostKey: ClassPermanent,
		} {
			if errors.Is(err, sentinel) && class != of {
				t.Errorf("%s, code %d, %q: %v with class %s", op, code, message, sentinel, class)
			}
		}
	})
}

func TestClassify_TextsAreLowerCase(t *testing.T) {
	for _, code := range slices.Sorted(maps.Keys(textVerdicts)) {
		for _, row := range textVerdicts[code] {
			if row.text != strings.ToLower(row.text) {
				t.Errorf("the text %q of code %d can never be found", row.text, code)
			}
		}
	}
}
