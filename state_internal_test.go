package kvm2

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	libvirt "github.com/digitalocean/go-libvirt"
	"github.com/google/go-cmp/cmp"
)

func TestMachineState_EveryPairOfLibvirt(t *testing.T) {
	tests := []struct {
		state  libvirt.DomainState
		reason int
		want   State
		word   string
		why    string
	}{
		{state: 0, reason: 0, want: StateUnknown, word: "NoState"},

		{state: 1, reason: 0, want: StateRunning},
		{state: 1, reason: 1, want: StateRunning, word: "Booted"},
		{state: 1, reason: 2, want: StateRunning, word: "Migrated"},
		{state: 1, reason: 3, want: StateRunning, word: "Restored"},
		{state: 1, reason: 4, want: StateRunning, word: "FromSnapshot"},
		{state: 1, reason: 5, want: StateRunning, word: "Unpaused"},
		{state: 1, reason: 6, want: StateRunning, word: "MigrationCanceled"},
		{state: 1, reason: 7, want: StateRunning, word: "SaveCanceled"},
		{state: 1, reason: 8, want: StateRunning, word: "Wakeup"},
		{state: 1, reason: 9, want: StateRunning, word: "Crashed", why: "it was crashed and was started again"},
		{state: 1, reason: 10, want: StateRunning, word: "Postcopy"},
		{state: 1, reason: 11, want: StateRunning, word: "PostcopyFailed"},

		{state: 2, reason: 0, want: StateRunning, word: "Blocked", why: "waiting for a resource is running"},

		{state: 3, reason: 0, want: StatePaused},
		{state: 3, reason: 1, want: StatePaused, word: "User"},
		{state: 3, reason: 2, want: StatePaused, word: "Migration"},
		{state: 3, reason: 3, want: StatePaused, word: "Save"},
		{state: 3, reason: 4, want: StatePaused, word: "Dump"},
		{state: 3, reason: 5, want: StatePaused, word: "IOError", why: "a full pool: the guest goes on when there is space again"},
		{state: 3, reason: 6, want: StatePaused, word: "Watchdog"},
		{state: 3, reason: 7, want: StatePaused, word: "FromSnapshot"},
		{state: 3, reason: 8, want: StateStopping, word: "ShuttingDown"},
		{state: 3, reason: 9, want: StatePaused, word: "Snapshot"},
		{state: 3, reason: 10, want: StateFailed, word: "Crashed"},
		{state: 3, reason: 11, want: StateCreating, word: "StartingUp"},
		{state: 3, reason: 12, want: StatePaused, word: "Postcopy"},
		{state: 3, reason: 13, want: StatePaused, word: "PostcopyFailed"},
		{state: 3, reason: 14, want: StatePaused, word: "APIError"},

		{state: 4, reason: 0, want: StateStopping},
		{state: 4, reason: 1, want: StateStopping, word: "User"},

		{state: 5, reason: 0, want: StateStopped, why: "a restarted libvirtd has forgotten the reason"},
		{state: 5, reason: 1, want: StateStopped, word: "Shutdown"},
		{state: 5, reason: 2, want: StateStopped, word: "Destroyed"},
		{state: 5, reason: 3, want: StateFailed, word: "Crashed"},
		{state: 5, reason: 4, want: StateStopped, word: "Migrated"},
		{state: 5, reason: 5, want: StateStopped, word: "Saved"},
		{state: 5, reason: 6, want: StateFailed, word: "StartFailed"},
		{state: 5, reason: 7, want: StateStopped, word: "FromSnapshot"},
		{state: 5, reason: 8, want: StateStopped, word: "Daemon"},

		{state: 6, reason: 0, want: StateFailed, word: "Crashed"},
		{state: 6, reason: 1, want: StateFailed, word: "Panicked"},

		{state: 7, reason: 0, want: StatePaused, word: "PMSuspended"},
	}
	covered := map[LibvirtState]bool{}
	for _, tt := range tests {
		s := LibvirtState{State: int(tt.state), Reason: tt.reason}
		covered[s] = true
		if state, word := machineState(phaseStarted, s); state != tt.want || word != tt.word {
			t.Errorf("state of a started machine at %+v = %s %q, want %s %q; %s", s, state, word, tt.want, tt.word, tt.why)
		}
		if state, word := machineState(phaseDeleting, s); state != StateDeleting || word != tt.word {
			t.Errorf("state of a machine being deleted at %+v = %s %q, want %s %q", s, state, word, StateDeleting, tt.word)
		}
	}
	if diff := cmp.Diff(libvirtPairs(t), sortedPairs(maps.Keys(covered))); diff != "" {
		t.Errorf("go-libvirt's states and reasons and this table differ (-go-libvirt +table):\n%s", diff)
	}
	if diff := cmp.Diff(libvirtPairs(t), mappedPairs()); diff != "" {
		t.Errorf("go-libvirt's states and reasons and stateTable differ (-go-libvirt +stateTable):\n%s", diff)
	}
}

func mappedPairs() []LibvirtState {
	pairs := map[LibvirtState]bool{}
	for state, row := range stateTable {
		for reason := range row.reasons {
			pairs[LibvirtState{State: int(state), Reason: reason}] = true
		}
	}
	return sortedPairs(maps.Keys(pairs))
}

func sortedPairs(pairs func(func(LibvirtState) bool)) []LibvirtState {
	return slices.SortedFunc(pairs, func(a, b LibvirtState) int { return a.State*1000 + a.Reason - b.State*1000 - b.Reason })
}

// reasonTypes are go-libvirt's types of reasons, by the state whose reasons they are.
var reasonTypes = map[string]libvirt.DomainState{
	"DomainNostateReason":         libvirt.DomainNostate,
	"DomainRunningReason":         libvirt.DomainRunning,
	"DomainBlockedReason":         libvirt.DomainBlocked,
	"DomainPausedReason":          libvirt.DomainPaused,
	"DomainShutdownReason":        libvirt.DomainShutdown,
	"DomainShutoffReason":         libvirt.DomainShutoff,
	"DomainCrashedReason":         libvirt.DomainCrashed,
	"DomainPMSuspendedReason":     libvirt.DomainPmsuspended,
	"DomainPMSuspendedDiskReason": libvirt.DomainPmsuspended, // never became a state of its own
}

// libvirtPairs are all pairs of state and reason that go-libvirt has constants for.
func libvirtPairs(t *testing.T) []LibvirtState {
	t.Helper()
	pairs := map[LibvirtState]bool{}
	states, withReasons := map[int]bool{}, map[int]bool{}
	for _, c := range libvirtConstants(t) {
		name := c.Type().(interface{ Obj() *types.TypeName }).Obj().Name()
		value, exact := constant.Int64Val(c.Val())
		if !exact {
			t.Fatalf("%s is no number", c.Name())
		}
		state, isReason := reasonTypes[name]
		switch {
		case isReason:
			pairs[LibvirtState{State: int(state), Reason: int(value)}] = true
			withReasons[int(state)] = true
		case name == "DomainState":
			states[int(value)] = true
		case strings.HasPrefix(name, "Domain") && strings.HasSuffix(name, "Reason") && isStateReason(name):
			t.Errorf("%s has the type %s, which is not in reasonTypes", c.Name(), name)
		}
	}
	if diff := cmp.Diff(states, withReasons); diff != "" {
		t.Errorf("states, and states that have reasons, differ (-states +reasons):\n%s", diff)
	}
	return sortedPairs(maps.Keys(pairs))
}

// isStateReason tells the reasons of states from those of events and of errors of the control interface.
func isStateReason(typeName string) bool {
	return !strings.HasPrefix(typeName, "DomainEvent") && typeName != "DomainControlErrorReason"
}

// libvirtConstants are the constants with a type of their own in go-libvirt's generated code.
func libvirtConstants(t *testing.T) []*types.Const {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/digitalocean/go-libvirt").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, filepath.Join(strings.TrimSpace(string(out)), "const.gen.go"), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	config := types.Config{Error: func(error) {}} // types that other files declare are not wanted
	pkg, _ := config.Check("libvirt", fset, []*ast.File{file}, nil)
	var constants []*types.Const
	for _, name := range pkg.Scope().Names() {
		c, ok := pkg.Scope().Lookup(name).(*types.Const)
		if !ok {
			continue
		}
		if _, ok := c.Type().(*types.Named); ok {
			constants = append(constants, c)
		}
	}
	if len(constants) < 100 {
		t.Fatalf("only %d constants found: go-libvirt has moved them", len(constants))
	}
	return constants
}

func TestMapState_UnknownNumbersAreNeverFailed(t *testing.T) {
	for _, state := range []int{8, 9, 100, -1, math.MaxInt32, math.MinInt32} {
		for reason := range 20 {
			if got, word := mapState(LibvirtState{State: state, Reason: reason}); got != StateUnknown || word != "" {
				t.Errorf("state %d, reason %d = %s %q, want Unknown: a controller replaces what failed", state, reason, got, word)
			}
		}
	}
	for state := range stateTable {
		for _, reason := range []int{15, 16, 1000, -1, math.MaxInt32, math.MinInt32} {
			got, _ := mapState(LibvirtState{State: int(state), Reason: reason})
			if want := stateTable[state].fallback; got != want || (got == StateFailed && state != libvirt.DomainCrashed) {
				t.Errorf("state %d, unknown reason %d = %s, want what the state itself says", state, reason, got)
			}
		}
	}
}

func TestMachineState_NeverStartedIsCreating(t *testing.T) {
	shutoff := func(reason libvirt.DomainShutoffReason) LibvirtState {
		return LibvirtState{State: int(libvirt.DomainShutoff), Reason: int(reason)}
	}
	tests := []struct {
		name  string
		phase phase
		state LibvirtState
		want  State
		why   string
	}{
		{name: "just defined", phase: phaseDefined, state: shutoff(libvirt.DomainShutoffUnknown), want: StateCreating},
		{name: "start failed", phase: phaseDefined, state: shutoff(libvirt.DomainShutoffFailed), want: StateCreating, why: "the next poll tries again"},
		{name: "ran, phase not written", phase: phaseDefined, state: shutoff(libvirt.DomainShutoffShutdown), want: StateStopped, why: "the controller crashed after the start"},
		{name: "crashed, phase not written", phase: phaseDefined, state: shutoff(libvirt.DomainShutoffCrashed), want: StateFailed},
		{name: "destroyed, phase not written", phase: phaseDefined, state: shutoff(libvirt.DomainShutoffDestroyed), want: StateStopped},
		{name: "runs, phase not written", phase: phaseDefined, state: LibvirtState{State: int(libvirt.DomainRunning), Reason: 1}, want: StateRunning},
		{name: "stopped, reason forgotten", phase: phaseStarted, state: shutoff(libvirt.DomainShutoffUnknown), want: StateStopped, why: "it has run: starting it again would be a surprise"},
		{name: "restart failed", phase: phaseStarted, state: shutoff(libvirt.DomainShutoffFailed), want: StateFailed},
		{name: "unknown phase", phase: "migrating", state: shutoff(libvirt.DomainShutoffUnknown), want: StateStopped, why: "only defined means that it never ran"},
		{name: "being deleted", phase: phaseDeleting, state: shutoff(libvirt.DomainShutoffUnknown), want: StateDeleting},
	}
	for _, tt := range tests {
		if got, _ := machineState(tt.phase, tt.state); got != tt.want {
			t.Errorf("%s: state = %s, want %s; %s", tt.name, got, tt.want, tt.why)
		}
	}
}

func TestLibvirtState_ActiveMeansThereIsAProcess(t *testing.T) {
	tests := []struct {
		state int
		want  bool
		why   string
	}{
		{state: 0},
		{state: 1, want: true},
		{state: 2, want: true},
		{state: 3, want: true},
		{state: 4, want: true},
		{state: 5},
		{state: 6, want: true, why: "qemu's driver shows it while a crashed guest is preserved"},
		{state: 7, want: true},
		{state: 8, want: true, why: "undefining what still runs leaves it running"},
		{state: -1, want: true},
	}
	for _, tt := range tests {
		if got := (LibvirtState{State: tt.state}).isActive(); got != tt.want {
			t.Errorf("isActive of state %d = %t, want %t; %s", tt.state, got, tt.want, tt.why)
		}
	}
}

func TestEndDomain_WhatHasAProcessIsDestroyedFirst(t *testing.T) {
	id := keyA.String()
	for state := range 8 {
		c := &stubConn{}
		d := Domain{UUID: keyA, State: LibvirtState{State: state}}
		if err := endDomain(t.Context(), c, d); err != nil {
			t.Fatal(err)
		}
		want := []string{"UndefineDomain " + id}
		if d.State.isActive() {
			want = []string{"graceful " + id, "UndefineDomain " + id}
		}
		if diff := cmp.Diff(want, c.calls); diff != "" {
			t.Errorf("calls for a domain in state %d differ (-want +got):\n%s", state, diff)
		}
	}
}
