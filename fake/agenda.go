package fake

import (
	"container/heap"
	"time"
)

// An event is what is to happen to one guest or one lease at a later time: the guest asks for its leases, or the lease
// ends if it was not renewed. Each has one event of its own, which is in the agenda or is not.
type event struct {
	at    time.Time
	place int // in the agenda, counted from 1; zero: it is not there

	domain *domain // whose guest it is
	lease  *lease
}

// An agenda holds the events to come, the next one first, so that a call looks at what is due and at nothing else.
type agenda []*event

// put enters an event in the agenda, or moves it there.
func (a *agenda) put(e *event, at time.Time) {
	e.at = at
	if e.place == 0 {
		heap.Push(a, e)
		return
	}
	heap.Fix(a, e.place-1)
}

// cancel takes an event out.
func (a *agenda) cancel(e *event) {
	if e.place != 0 {
		heap.Remove(a, e.place-1)
	}
}

// next takes out the first event that is due; nil: none is.
func (a *agenda) next(now time.Time) *event {
	if len(*a) == 0 || (*a)[0].at.After(now) {
		return nil
	}
	e := (*a)[0]
	a.cancel(e)
	return e
}

// Len, Less, Swap, Push and Pop are for container/heap.
func (a *agenda) Len() int { return len(*a) }

func (a *agenda) Less(i, j int) bool { return (*a)[i].at.Before((*a)[j].at) }

func (a *agenda) Swap(i, j int) {
	events := *a
	events[i], events[j] = events[j], events[i]
	events[i].place, events[j].place = i+1, j+1
}

func (a *agenda) Push(x any) {
	e := x.(*event) //nolint:forcetypeassert // heap hands over what put gave it
	*a = append(*a, e)
	e.place = len(*a)
}

func (a *agenda) Pop() any {
	events := *a
	e := events[len(events)-1]
	events[len(events)-1] = nil
	*a = events[:len(events)-1]
	e.place = 0
	return e
}
