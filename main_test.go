package kvm2_test

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/kvm2/kvm2/internal/golden"
)

func TestMain(m *testing.M) {
	code := golden.Main(m)
	if code == 0 {
		code = reportLeaks()
	}
	os.Exit(code)
}

// leakLimit is how long goroutines that are on their way out may take after the last test.
const leakLimit = 10 * time.Second

// reportLeaks waits until no goroutine but this one is left. Those that remain are printed, and the run fails.
func reportLeaks() int {
	deadline := time.Now().Add(leakLimit)
	for {
		left := leftGoroutines()
		if len(left) == 0 {
			return 0
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "goroutines left after all tests: %d\n\n%s\n", len(left), bytes.Join(left, []byte("\n\n")))
			return 1
		}
		runtime.Gosched()
	}
}

// leftGoroutines returns the stacks of all goroutines but the calling one and those that package os/signal keeps.
func leftGoroutines() [][]byte {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var left [][]byte
	for i, stack := range bytes.Split(bytes.TrimSpace(stacks), []byte("\n\n")) {
		if i > 0 && !bytes.Contains(stack, []byte("os/signal.loop")) { // the first is the calling one
			left = append(left, stack)
		}
	}
	return left
}
