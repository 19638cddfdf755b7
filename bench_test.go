package kvm2_test

import (
	"runtime"
	"testing"
	"time"
)

// BenchmarkProvider_TenThousandMachines creates, lists and deletes 10,000 machines on one in-memory host. It reports
// what each machine costs: calls to the host, time, and the memory that provider and host hold for it, the host's log of
// calls included.
func BenchmarkProvider_TenThousandMachines(b *testing.B) {
	const machines = 10_000
	for b.Loop() {
		f := newFleet(b)
		before, start, held := f.calls(), time.Now(), heapBytes()
		f.create(b, machines)
		report(b, "create", f.calls()-before, time.Since(start), machines)
		b.ReportMetric(float64(heapBytes()-held)/machines, "held-B/machine")

		before, start = f.calls(), time.Now()
		f.list(b)
		b.ReportMetric(float64(f.calls()-before), "list-calls")
		b.ReportMetric(float64(time.Since(start).Microseconds())/machines, "list-µs/machine")

		before, start = f.calls(), time.Now()
		for len(f.ids) > 0 {
			f.deleteLast(b)
		}
		report(b, "delete", f.calls()-before, time.Since(start), machines)
		f.close(b)
	}
}

// report reports what a step cost for each machine.
func report(b *testing.B, step string, calls int, took time.Duration, machines float64) {
	b.Helper()
	b.ReportMetric(float64(calls)/machines, step+"-calls/machine")
	b.ReportMetric(float64(took.Microseconds())/machines, step+"-µs/machine")
}

func heapBytes() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
