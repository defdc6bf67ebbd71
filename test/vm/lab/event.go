package lab

import (
	"encoding/json"
	"io"
	"sync"
	"time"
)

// EventKind says what an Event tells.
type EventKind string

// The kinds of events, in the order in which a scenario may have them.
const (
	Booted EventKind = "booted" // the guest is up; Text: the kernel's release
	Began  EventKind = "began"  // a scenario begins
	Logged EventKind = "logged" // a line that is shown if the scenario fails, or with -v
	Figure EventKind = "figure" // a line that is always shown
	Cut    EventKind = "cut"    // the scenario asks for a power cut and goes on in the next boot
	Passed EventKind = "passed"
	Failed EventKind = "failed"
	Ended  EventKind = "ended" // the guest powers off
)

// Event is one line from the guest to the host.
type Event struct {
	Kind     EventKind     `json:"kind"`
	Scenario string        `json:"scenario,omitempty"`
	Text     string        `json:"text,omitempty"`
	Uptime   time.Duration `json:"uptime"` // of the guest
}

// Events writes events. Safe for concurrent use.
type Events struct {
	mu sync.Mutex
	w  io.Writer
}

// NewEvents writes to w.
func NewEvents(w io.Writer) *Events { return &Events{w: w} }

// Send writes one event; a host that is gone is nobody's concern.
func (e *Events) Send(ev Event) {
	ev.Uptime = Uptime()
	b, err := json.Marshal(ev)
	if err != nil {
		panic(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	_, _ = e.w.Write(append(b, '\n'))
}
