package sim

import (
	"errors"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// faults strike a run at random times. A run has some of the kinds only, so
// that rare ones are not always covered by frequent ones.
type faults struct {
	*owner
	kinds []func()
	pause time.Duration // between two faults, on average
	until time.Duration
	full  int // disks that are full now
}

func newFaults(o *owner) *faults {
	f := &faults{owner: o, pause: o.between(300*time.Millisecond, 5*time.Second)}
	for _, k := range []func(){
		f.kill, f.powerCut, f.missing, f.strike, f.hang, f.badSync, f.badWrite, f.badRead, f.fill, f.metadataTrouble, f.metadataDown,
		f.badConn, f.badConn, f.stopServer, f.newSession, f.grow, f.moveAway,
	} {
		if o.chance(45) {
			f.kinds = append(f.kinds, k)
		}
	}
	return f
}

// work strikes until a time.
func (f *faults) work(until time.Duration) {
	f.until = until
	if len(f.kinds) > 0 {
		f.after(f.between(0, 2*f.pause), f.next)
	}
}

func (f *faults) next() {
	if f.now >= f.until {
		return
	}
	f.kinds[f.rand.IntN(len(f.kinds))]()
	f.after(f.between(0, 2*f.pause), f.next)
}

func (f *faults) anyDisk() *disk { return f.host.disks[f.rand.IntN(len(f.host.disks))] }

func (f *faults) startAgain() {
	f.after(f.between(5*time.Millisecond, 3*time.Second), f.server.start)
}

func (f *faults) kill() {
	f.server.kill()
	f.startAgain()
}

// missing is a disk that is not there for a while after a restart.
func (f *faults) missing() {
	d := f.anyDisk()
	f.kill()
	d.missing = true
	f.after(f.between(100*time.Millisecond, 10*time.Second), func() { d.missing = false })
}

func (f *faults) powerCut() {
	f.server.cutPower()
	f.startAgain()
}

// strike kills or cuts power in the middle of whatever is done to the files.
func (f *faults) strike() {
	end := f.server.kill
	if f.chance(60) {
		end = f.server.cutPower
	}
	f.host.strike(1+f.rand.IntN(60), func() {
		end()
		f.startAgain()
	})
}

func (f *faults) hang() {
	d, k := f.anyDisk(), kind(f.rand.IntN(int(kinds)))
	f.tracef("disk %d: hangs, kind %d", d.n, k)
	d.hold(k)
	f.after(f.between(10*time.Millisecond, 8*time.Second), func() { d.release(k) })
}

func (f *faults) badSync() {
	d := f.anyDisk()
	f.tracef("disk %d: a sync will fail", d.n)
	d.failSync()
}

func (f *faults) badWrite() {
	rules := []string{"write head.img #1 eio", "write head.idx #1 eio", "datasync head.idx #1 eio", "punch head.img #1 eio", "zero head.img #1 eio"}
	d := f.anyDisk()
	f.tracef("disk %d: a write will fail", d.n)
	d.arm(rules[f.rand.IntN(len(rules))])
	d.tears = d.tears || f.chance(50)
}

func (f *faults) badRead() {
	f.host.badReads++
	f.anyDisk().arm("read head.img #1 eio")
}

// fill leaves a disk with next to no room for a while.
func (f *faults) fill() {
	if f.full > 0 {
		return
	}
	f.full++
	d := f.anyDisk()
	d.leave(f.rand.Int64N(64) * blockSize)
	f.after(f.between(100*time.Millisecond, 10*time.Second), func() {
		f.full--
		d.roomAgain()
		f.server.allCores((*primary.Core).SpaceChanged)
	})
}

func (f *faults) metadataTrouble() {
	f.cell.trouble = 5 + f.rand.IntN(40)
	f.after(f.between(100*time.Millisecond, 10*time.Second), func() { f.cell.trouble = 0 })
}

func (f *faults) metadataDown() {
	f.cell.down = true
	f.after(f.between(100*time.Millisecond, 15*time.Second), func() { f.cell.down = false })
}

func (f *faults) badConn() {
	if len(f.dev.socks) == 0 {
		return
	}
	c := f.dev.socks[f.rand.IntN(len(f.dev.socks))]
	switch f.rand.IntN(3) {
	case 0:
		c.cut()
	case 1:
		f.dev.giveUp(c)
	default:
		c.holdUp(f.between(0, 3*time.Second))
	}
}

func (f *faults) stopServer() { f.server.stop(f.between(10*time.Millisecond, 4*time.Second)) }

func (f *faults) newSession() { f.dev.connect() }

func (f *faults) grow() {
	size := f.volume().WantedSize
	if size < 6*runSize {
		if err := f.resize(size + (1+f.rand.Int64N(2*runSize/block.SizeQuantum))*block.SizeQuantum); err != nil && !errors.Is(err, block.ErrNoSpace) {
			f.failf("resize: %v", err)
		}
	}
}

func (f *faults) moveAway() { f.move() }

// heal ends every fault that would last.
func (f *faults) heal() {
	f.cell.trouble, f.cell.down = 0, false
	f.host.faultIn = 0
	for _, d := range f.host.disks {
		d.rules.Clear()
		d.tears, d.missing = false, false
		d.roomAgain()
		for k := range kinds {
			d.release(k)
		}
	}
	f.server.allCores((*primary.Core).SpaceChanged)
	f.after(5*time.Second, f.server.start)
}
