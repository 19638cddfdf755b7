package kvm2

import libvirt "github.com/digitalocean/go-libvirt"

// State is the state of a machine.
type State string

// The states.
const (
	// StateUnknown: libvirt reports a state that this kvm2 does not know.
	StateUnknown State = "Unknown"
	// StateCreating: not started yet; Create moves it forward.
	StateCreating State = "Creating"
	// StateRunning: the guest's CPUs run (or wait for a resource).
	StateRunning State = "Running"
	// StatePaused: the guest's CPUs are stopped, its memory is kept. Reason "IOError": the pool is full.
	StatePaused State = "Paused"
	// StateStopping: the guest is shutting down.
	StateStopping State = "Stopping"
	// StateStopped: the guest is off and can be started again.
	StateStopped State = "Stopped"
	// StateFailed: the guest crashed or could not be started again.
	StateFailed State = "Failed"
	// StateDeleting: Delete has begun and has not come to its end.
	StateDeleting State = "Deleting"
)

// stateRow is one row of the table from libvirt's (state, reason) to State and Reason.
type stateRow struct {
	state  State
	reason string
}

// stateTable maps the reasons of each libvirt state (virDomainState and its reason enumerations,
// https://libvirt.org/html/libvirt-libvirt-domain.html). A reason without a row gives the state's fallback.
var stateTable = map[libvirt.DomainState]struct {
	fallback State
	reasons  map[int]stateRow
}{
	libvirt.DomainNostate: {StateUnknown, map[int]stateRow{
		int(libvirt.DomainNostateUnknown): {StateUnknown, "NoState"},
	}},
	libvirt.DomainRunning: {StateRunning, map[int]stateRow{
		int(libvirt.DomainRunningUnknown):           {StateRunning, ""},
		int(libvirt.DomainRunningBooted):            {StateRunning, "Booted"},
		int(libvirt.DomainRunningMigrated):          {StateRunning, "Migrated"},
		int(libvirt.DomainRunningRestored):          {StateRunning, "Restored"},
		int(libvirt.DomainRunningFromSnapshot):      {StateRunning, "FromSnapshot"},
		int(libvirt.DomainRunningUnpaused):          {StateRunning, "Unpaused"},
		int(libvirt.DomainRunningMigrationCanceled): {StateRunning, "MigrationCanceled"},
		int(libvirt.DomainRunningSaveCanceled):      {StateRunning, "SaveCanceled"},
		int(libvirt.DomainRunningWakeup):            {StateRunning, "Wakeup"},
		int(libvirt.DomainRunningCrashed):           {StateRunning, "Crashed"},
		int(libvirt.DomainRunningPostcopy):          {StateRunning, "Postcopy"},
		int(libvirt.DomainRunningPostcopyFailed):    {StateRunning, "PostcopyFailed"},
	}},
	libvirt.DomainBlocked: {StateRunning, map[int]stateRow{
		int(libvirt.DomainBlockedUnknown): {StateRunning, "Blocked"},
	}},
	libvirt.DomainPaused: {StatePaused, map[int]stateRow{
		int(libvirt.DomainPausedUnknown):        {StatePaused, ""},
		int(libvirt.DomainPausedUser):           {StatePaused, "User"},
		int(libvirt.DomainPausedMigration):      {StatePaused, "Migration"},
		int(libvirt.DomainPausedSave):           {StatePaused, "Save"},
		int(libvirt.DomainPausedDump):           {StatePaused, "Dump"},
		int(libvirt.DomainPausedIoerror):        {StatePaused, "IOError"},
		int(libvirt.DomainPausedWatchdog):       {StatePaused, "Watchdog"},
		int(libvirt.DomainPausedFromSnapshot):   {StatePaused, "FromSnapshot"},
		int(libvirt.DomainPausedShuttingDown):   {StateStopping, "ShuttingDown"},
		int(libvirt.DomainPausedSnapshot):       {StatePaused, "Snapshot"},
		int(libvirt.DomainPausedCrashed):        {StateFailed, "Crashed"},
		int(libvirt.DomainPausedStartingUp):     {StateCreating, "StartingUp"},
		int(libvirt.DomainPausedPostcopy):       {StatePaused, "Postcopy"},
		int(libvirt.DomainPausedPostcopyFailed): {StatePaused, "PostcopyFailed"},
		int(libvirt.DomainPausedAPIError):       {StatePaused, "APIError"},
	}},
	libvirt.DomainShutdown: {StateStopping, map[int]stateRow{
		int(libvirt.DomainShutdownUnknown): {StateStopping, ""},
		int(libvirt.DomainShutdownUser):    {StateStopping, "User"},
	}},
	libvirt.DomainShutoff: {StateStopped, map[int]stateRow{
		int(libvirt.DomainShutoffUnknown):      {StateStopped, ""},
		int(libvirt.DomainShutoffShutdown):     {StateStopped, "Shutdown"},
		int(libvirt.DomainShutoffDestroyed):    {StateStopped, "Destroyed"},
		int(libvirt.DomainShutoffCrashed):      {StateFailed, "Crashed"},
		int(libvirt.DomainShutoffMigrated):     {StateStopped, "Migrated"},
		int(libvirt.DomainShutoffSaved):        {StateStopped, "Saved"},
		int(libvirt.DomainShutoffFailed):       {StateFailed, "StartFailed"},
		int(libvirt.DomainShutoffFromSnapshot): {StateStopped, "FromSnapshot"},
		int(libvirt.DomainShutoffDaemon):       {StateStopped, "Daemon"},
	}},
	libvirt.DomainCrashed: {StateFailed, map[int]stateRow{
		int(libvirt.DomainCrashedUnknown):  {StateFailed, "Crashed"},
		int(libvirt.DomainCrashedPanicked): {StateFailed, "Panicked"},
	}},
	libvirt.DomainPmsuspended: {StatePaused, map[int]stateRow{
		int(libvirt.DomainPmsuspendedUnknown): {StatePaused, "PMSuspended"},
	}},
}

// mapState translates libvirt's pair. What is unknown is Unknown, never Failed: a controller replaces what failed.
func mapState(s LibvirtState) (State, string) {
	row, ok := stateTable[libvirt.DomainState(s.State)]
	if !ok {
		return StateUnknown, ""
	}
	if r, ok := row.reasons[s.Reason]; ok {
		return r.state, r.reason
	}
	return row.fallback, ""
}

// neverStarted reports whether a domain in phase defined has not run yet. A fresh domain is shut off for no reason,
// and one whose start failed says so; any other reason means that it did run and the next phase was never written.
func neverStarted(p phase, s LibvirtState) bool {
	if p != phaseDefined || libvirt.DomainState(s.State) != libvirt.DomainShutoff {
		return false
	}
	return s.Reason == int(libvirt.DomainShutoffUnknown) || s.Reason == int(libvirt.DomainShutoffFailed)
}

// isActive reports whether a domain has a qemu. An unknown state counts as active: asking for the end of what has
// ended is harmless. So does Crashed, in which a domain stays whose on_crash is "preserve".
func (s LibvirtState) isActive() bool {
	switch libvirt.DomainState(s.State) {
	case libvirt.DomainNostate, libvirt.DomainShutoff:
		return false
	default:
		return true
	}
}

// machineState is the state of a machine with a domain.
func machineState(p phase, s LibvirtState) (State, string) {
	state, reason := mapState(s)
	if p == phaseDeleting {
		return StateDeleting, reason
	}
	if neverStarted(p, s) {
		return StateCreating, reason
	}
	return state, reason
}
