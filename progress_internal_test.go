package kvm2

import (
	"testing"
	"time"
)

func TestRate_CountsTheLastSeconds(t *testing.T) {
	start := time.Unix(1000, 0)
	moves := []struct {
		at time.Duration
		n  int64
	}{{0, 100}, {500 * time.Millisecond, 100}, {1500 * time.Millisecond, 400}, {6 * time.Second, 50}}
	for _, tt := range []struct {
		at   time.Duration
		want int64
		why  string
	}{
		{999 * time.Millisecond, 0, "nothing is known in the first second"},
		{time.Second, 200, "what moved in it"},
		{2 * time.Second, 300, ""},
		{5 * time.Second, 100, "the first second has left the window"},
		{6 * time.Second, 12, "the second as well; 50 in 4 s"},
		{time.Hour, 0, "nothing moves any more"},
	} {
		r := rate{start: start}
		for _, m := range moves {
			if m.at <= tt.at {
				r.add(start.Add(m.at), m.n)
			}
		}
		if got := r.perSecond(start.Add(tt.at)); got != tt.want {
			t.Errorf("after %v: %d bytes a second, want %d; %s", tt.at, got, tt.want, tt.why)
		}
	}
	var never rate
	if got := never.perSecond(start); got != 0 {
		t.Errorf("before anything moves: %d, want 0", got)
	}
}
