package fake_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvm2/kvm2"
	"github.com/kvm2/kvm2/fake"
)

func TestActions_StatesAndReasons(t *testing.T) {
	for _, c := range []struct {
		name          string
		act           func(*fake.Host)
		state, reason int
	}{
		{"crash", func(h *fake.Host) { h.CrashGuest("d") }, 5, 3},
		{"power off", func(h *fake.Host) { h.PowerOff("d") }, 5, 1},
		{"destroy", func(h *fake.Host) { h.DestroyBehind("d") }, 5, 2},
		{"I/O error", func(h *fake.Host) { h.PauseIOError("d") }, 3, 5},
		{"pause", func(h *fake.Host) { h.Pause("d") }, 3, 1},
		{"resume", func(h *fake.Host) { h.Pause("d"); h.ResumeGuest("d") }, 1, 5},
		{"save", func(h *fake.Host) { h.ManagedSave("d") }, 5, 5},
		{"restore", func(h *fake.Host) { h.ManagedSave("d"); h.StartBehind("d") }, 1, 3},
		{"daemon restart, running", func(h *fake.Host) { h.RestartDaemon() }, 1, 1},
		{"daemon restart, stopped", func(h *fake.Host) { h.CrashGuest("d"); h.RestartDaemon() }, 5, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t)
			h.started("d", "")
			c.act(h.host)
			h.conn = h.dial()
			h.wantState("d", c.state, c.reason)
		})
	}
}

func TestCrashGuest_FollowsOnCrash(t *testing.T) {
	for policy, want := range map[string]kvm2.LibvirtState{
		"preserve": {State: 6, Reason: 1}, "restart": {State: 1, Reason: 9}, "destroy": {State: 5, Reason: 3},
	} {
		t.Run(policy, func(t *testing.T) {
			h := newHarness(t)
			h.must(h.conn.DefineDomain(t.Context(), strings.Replace(domainXML("d", ""), "<devices>", "<on_crash>"+policy+"</on_crash><devices>", 1)))
			h.start("d")
			h.host.CrashGuest("d")
			h.wantState("d", want.State, want.Reason)
		})
	}
}

func TestActions_TransientDomainGoesWithItsGuest(t *testing.T) {
	for name, act := range map[string]func(*fake.Host){
		"crash":     func(h *fake.Host) { h.CrashGuest("d") },
		"power off": func(h *fake.Host) { h.PowerOff("d") },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.started("d", "")
			h.host.UndefineBehind("d")
			h.wantState("d", 1, 1)
			act(h.host)
			_, err := h.conn.DomainByName(t.Context(), "d")
			h.wantAnswer(err, 42, "no domain with matching name 'd'")
		})
	}
}

func TestActions_PanicOnWhatDoesNotExist(t *testing.T) {
	h := newHarness(t)
	h.define("stopped", "")
	for text, act := range map[string]func(){
		`no domain "x"`:                func() { h.host.AddSnapshot("x", "s") },
		`domain "stopped" is not`:      func() { h.host.CrashGuest("stopped") },
		`no pool "x"`:                  func() { h.host.StopPool("x") },
		`no network "x"`:               func() { h.host.StopNetwork("x") },
		`no file "x" in pool`:          func() { h.host.CorruptVolume("default", "x") },
		"no storage vol with matching": func() { h.host.DeleteVolumeBehind("default", "x") },
		"domain is not running":        func() { h.host.DestroyBehind("stopped") },
	} {
		wantPanic(t, text, act)
	}
}

func TestManagedSave_TransientDomainPanics(t *testing.T) {
	h := newHarness(t)
	h.started("d", "")
	h.host.UndefineBehind("d")
	wantPanic(t, "transient", func() { h.host.ManagedSave("d") })
}

func TestDefineBehind_NeedsNoSchema(t *testing.T) {
	h := newHarness(t)
	h.host.DefineBehind(strings.Replace(domainXML("d", ""), "<devices>", "<nonsense/><devices>", 1))
	h.wantState("d", 5, 0)
	for text, xml := range map[string]string{
		"missing name information": "<domain type='qemu'/>",
		"malformed uuid element":   "<domain type='qemu'><name>e</name><uuid>zz</uuid></domain>",
		"unable to parse mac address 'zz'": domainXML("e",
			"<interface type='network'><mac address='zz'/><source network='default'/></interface>"),
		"expected unicast mac address, found multicast '01:00:5e:00:00:01'": domainXML("e",
			"<interface type='network'><mac address='01:00:5e:00:00:01'/><source network='default'/></interface>"),
		"target 'vda' duplicated for disk sources '/x' and '/y'": domainXML("e", diskXML("/x", "raw")+diskXML("/y", "raw")),
	} {
		wantPanic(t, text, func() { h.host.DefineBehind(xml) })
	}
}

func TestAddForeignDomain_HasNoKvm2Metadata(t *testing.T) {
	h := newHarness(t)
	uuid := h.host.AddForeignDomain("web1")
	d, err := h.conn.DomainByUUID(t.Context(), uuid)
	h.must(err)
	if d.Name != "web1" || d.Metadata != "" {
		t.Errorf("got %+v", d)
	}
}

func TestSetMetadataBehind_EmptyTextRemovesThem(t *testing.T) {
	h := newHarness(t)
	h.started("d", "")
	for _, c := range []struct{ set, want string }{{"<m/>", "<m/>"}, {"", ""}} {
		h.host.SetMetadataBehind("d", c.set)
		if got := h.host.Domains()[0].Metadata; got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestRestartDaemon_EndsCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.host.AddFault(fake.Fault{Op: kvm2.OpHostInfo, Effect: fake.Hang()})
		result := make(chan error, 1)
		go func() {
			_, err := h.conn.HostInfo(t.Context())
			result <- err
		}()
		synctest.Wait()
		h.host.RestartDaemon()
		h.wantLost(h.conn, <-result)
		h.conn = h.dial()
		_, err := h.conn.HostInfo(t.Context())
		h.must(err)
	})
}
