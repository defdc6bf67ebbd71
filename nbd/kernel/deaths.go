package kernel

import (
	"context"
	"sync"
	"time"
)

const (
	// noticeTime is how long the driver is given to notice that sockets have ended, where its word is missing. It takes a
	// millisecond.
	noticeTime = 100 * time.Millisecond
	watchAgain = time.Second // after the driver's words could not be had
)

// deaths counts the sockets of each device that the driver has called dead since
// the last were handed over. It replaces those and no others; a socket that is
// handed over too early is lost, and what was sent on its siblings waits for
// another T. It also keeps which devices the watch has to look at.
type deaths struct {
	mu        sync.Mutex
	count     map[int]int   // by index
	touched   map[int]bool  // devices that something was said of since the watch last asked, or -1: perhaps of all
	changed   chan struct{} // closed and replaced with every word
	listeners int
	ready     chan struct{} // closed when words are sure to come
	stop      context.CancelFunc
}

func newDeaths() *deaths {
	return &deaths{count: make(map[int]int), touched: make(map[int]bool), changed: make(chan struct{})}
}

// listen makes sure that words are counted from now on, until stop. It waits for that, but not long.
func (d *deaths) listen(m *Manager) (stop func()) {
	d.mu.Lock()
	if d.listeners++; d.listeners == 1 {
		var ctx context.Context
		ctx, d.stop = context.WithCancel(m.life)
		d.ready = make(chan struct{})
		ready := sync.OnceFunc(func() { close(d.ready) })
		m.running.Go(func() { d.feed(ctx, m, ready) })
	}
	ready := d.ready
	d.mu.Unlock()
	t := time.NewTimer(noticeTime)
	defer t.Stop()
	select {
	case <-ready:
	case <-t.C:
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.listeners--; d.listeners == 0 {
			d.stop()
		}
	})
}

// feed takes the driver's words until ctx ends.
func (d *deaths) feed(ctx context.Context, m *Manager, ready func()) {
	for told := false; ctx.Err() == nil; {
		err := m.cfg.Kernel.Watch(ctx, func(index int) {
			ready()
			d.note(index)
		})
		if err != nil && ctx.Err() == nil && !told {
			told = true
			m.cfg.Log.Warn("no events from the nbd driver; devices are looked at each two seconds", "err", err)
		}
		_ = pause(ctx, watchAgain)
	}
}

// note takes a word of the driver: a device's index, or -1.
func (d *deaths) note(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if index >= 0 {
		d.count[index]++
	}
	d.touchLocked(index)
}

// touch has the watch look at a device, which was made or moved.
func (d *deaths) touch(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.touchLocked(index)
}

func (d *deaths) touchLocked(index int) {
	d.touched[index] = true
	close(d.changed)
	d.changed = make(chan struct{})
}

// next is the devices that the watch has to look at, and a channel that is closed when there are more.
func (d *deaths) next() (touched map[int]bool, more <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	touched, d.touched = d.touched, make(map[int]bool)
	return touched, d.changed
}

// wait returns when n sockets of a device are dead, or the driver must have noticed it.
func (d *deaths) wait(ctx context.Context, index, n int) {
	t := time.NewTimer(noticeTime)
	defer t.Stop()
	for {
		d.mu.Lock()
		enough, changed := d.count[index] >= n, d.changed
		d.mu.Unlock()
		if enough {
			return
		}
		select {
		case <-changed:
		case <-t.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// reset begins to count anew, for a device that is given new sockets.
func (d *deaths) reset(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.count, index)
}
