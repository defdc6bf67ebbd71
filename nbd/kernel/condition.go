package kernel

import (
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// conditions is what this process has learned of the devices. It holds nothing
// that cannot be learned again.
type conditions struct {
	mu sync.Mutex
	of map[string]*memory // by backend
}

// memory is of one device.
type memory struct {
	made     time.Time // by this process; zero: it was found
	shown    Condition // the last that was told
	trouble  string    // why it does not work, of the last try
	nextLook time.Time // at metadata
	settled  bool      // nothing is to be done until the next look
	phase    phase     // of its record, at the last scan

	session  block.SessionNumber
	taken    uint64    // from all sockets, when they were last looked at
	progress time.Time // when that last changed, or nothing was in flight
	hearing  hearing
	silent   bool // too long ago, or the driver is deaf
}

// with lets f change what is known of a device. f must not block.
func (c *conditions) with(backend string, f func(*memory)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.of[backend]
	if m == nil {
		m = &memory{}
		c.of[backend] = m
	}
	f(m)
}

// moved: what is in flight may have been sent on the old sockets, and is sent
// again only when its timer has run out.
func (c *conditions) moved(r *record) {
	c.with(r.Backend(), func(m *memory) {
		m.session, m.progress, m.silent, m.hearing = r.Session, time.Now().Add(r.Timeout), false, hearing{}
	})
}

// silent reports whether the watch has found so, and forgets it.
func (c *conditions) silent(r *record) (yes bool) {
	c.with(r.Backend(), func(m *memory) { yes, m.silent = m.silent, false })
	return yes
}

// prune forgets devices that were not there when they were listed.
func (c *conditions) prune(there map[string]bool, listed time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for b, m := range c.of {
		if !there[b] && m.made.Before(listed) {
			delete(c.of, b)
		}
	}
}

// condition is how a device is. It asks neither driver nor servers.
func (m *Manager) condition(n Node, r *record) Condition {
	now := Condition{Health: Waiting, Since: time.Now()}
	m.conditions.with(n.Backend, func(k *memory) {
		switch {
		case r != nil && r.Index == n.Index && r.Phase == phaseEnding && r.Refused != "":
			now.Health, now.Reason = Refused, r.Refused
		case r != nil && (r.Index != n.Index || r.Phase == phaseEnding):
			now.Health, now.Reason = Zombie, "it was detached and is still open somewhere"
		case r == nil:
			now.Reason = "its state is lost: its connections cannot be told"
		case r.Phase != phaseMoving && m.alive(r):
			now.Health = Connected
		default:
			now.Reason = "its connections have ended"
		}
		if now.Health == Waiting && k.trouble != "" {
			now.Reason = k.trouble
		}
		if k.shown.Health == now.Health && !k.shown.Since.IsZero() {
			now.Since = k.shown.Since
		}
		k.shown = now
	})
	return now
}
