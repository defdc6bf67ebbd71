package primary

import "github.com/gabion-storage/gabion/server/block"

// Op is one request in a core's hands. While it runs (from Take to the last
// Finished) Req and IOs may be read without the driver's lock, IO.Err, Data and
// Err written by whoever executes it; all the rest is the core's.
type Op struct {
	Req *block.Request
	// IOs are to be done all at once, in any order, each reported by Finished.
	// They cover a read's range; a stretch without a Copy reads as zeros.
	IOs []IO
	// Err is set before the first Finished if nothing of the request was done.
	Err error

	conn    *Conn
	lock    lockEntry
	state   opState
	pending int // running: IOs not answered; syncing: syncs not answered
	durable bool
	one     [1]IO // room for IOs, as nearly all requests need it

	next, prev         *Op // of the list its state keeps it in; free list
	nextConn, prevConn *Op // of its connection's
}

// IO is one stretch of a request on one copy.
type IO struct {
	block.IO // a read has Offset and Length; Data is set by the driver
	Copy     *Copy
	Member   Member
	Err      error // the outcome

	op   *Op
	life uint64 // of the copy when it was sent
}

// Request is the request the IO is part of.
func (io *IO) Request() *Op { return io.op }

type opState uint8

const (
	opFree    opState = iota
	opQueued          // in the range lock, behind another
	opReady           // to be examined by this event
	opBlocked         // a copy it needs is not live
	opBirth           // a run it writes is unborn
	opSpace           // a copy had no room
	opRunning         // in flight
	opSyncing         // done on the copies, waits for syncs
	opStates
)

// opList is a FIFO of ops through next and prev.
type opList struct{ head, tail *Op }

func (l *opList) push(op *Op) {
	op.prev, op.next = l.tail, nil
	if l.tail == nil {
		l.head = op
	} else {
		l.tail.next = op
	}
	l.tail = op
}

func (l *opList) remove(op *Op) {
	if op.prev == nil {
		l.head = op.next
	} else {
		op.prev.next = op.next
	}
	if op.next == nil {
		l.tail = op.prev
	} else {
		op.next.prev = op.prev
	}
	op.next, op.prev = nil, nil
}

// maxKeptIOs bounds what a free Op keeps of a request over many stretches.
const maxKeptIOs = 16

func (c *Core) newOp(cn *Conn, r *block.Request) *Op {
	op := c.free
	if op == nil {
		op = new(Op)
		op.IOs = op.one[:0]
	} else {
		c.free = op.next
		op.next = nil
	}
	op.Req, op.conn = r, cn
	op.durable = r.Op.Mutates() && (r.FUA || c.info.WriteThrough)
	op.prevConn, op.nextConn = cn.lastOp, nil
	if cn.lastOp == nil {
		cn.firstOp = op
	} else {
		cn.lastOp.nextConn = op
	}
	cn.lastOp = op
	c.count[opFree]++ // so that move can take it from there
	return op
}

// move changes an op's state and the list that goes with it.
func (c *Core) move(op *Op, to opState) {
	if l := c.list(op.state); l != nil {
		l.remove(op)
	}
	c.count[op.state]--
	c.count[to]++
	op.state = to
	if l := c.list(to); l != nil {
		l.push(op)
	}
}

func (c *Core) list(s opState) *opList {
	switch s {
	case opReady, opBlocked, opBirth, opSpace:
		return &c.lists[s]
	}
	return nil
}

// Submit takes a request of an open connection; the Answer came first.
func (c *Core) Submit(cn *Conn, r *block.Request) {
	op := c.newOp(cn, r)
	switch {
	case cn.state != connOpen:
		c.finish(op, errConnClosed)
	case r.Offset < 0 || r.Length < 0 || r.Offset > c.info.Size-r.Length: // the stream should have refused it
		c.finish(op, block.ErrInvalid)
	case cn.readOnly && r.Op.Mutates():
		c.finish(op, block.ErrReadOnly)
	case r.Op == block.OpFlush:
		c.move(op, opReady)
	case r.Op == block.OpCache || r.Length == 0:
		c.finish(op, nil)
	case c.locks.acquire(op, r.Offset, r.Length, r.Op.Mutates()):
		c.move(op, opReady)
	default:
		c.move(op, opQueued)
	}
}

// examine decides what an op that holds its range waits for, or starts it.
func (c *Core) examine(op *Op) {
	if op.Req.Op == block.OpFlush {
		c.flush(op)
		return
	}
	r := op.Req
	op.IOs = op.IOs[:0]
	births := r.Op == block.OpWrite || r.Op == block.OpZero && r.NoHole
	needBirth, blocked := false, false
	for off, end := r.Offset, r.Offset+r.Length; off < end; {
		set, stop := c.stretch(off, end)
		switch {
		case set >= firstSet:
			if !c.plan(op, c.runs.set(set), off, stop) {
				blocked = true
			}
		case r.Op == block.OpRead:
			op.IOs = append(op.IOs, IO{IO: block.IO{Op: block.OpRead, Offset: off, Length: stop - off}, op: op})
		case births:
			c.wantBirths(off, stop)
			needBirth = true
		}
		off = stop
	}
	switch {
	case needBirth:
		c.move(op, opBirth)
	case blocked:
		c.move(op, opBlocked)
	case len(op.IOs) == 0: // a trim of what was never written
		c.finish(op, nil)
	default:
		c.start(op)
	}
}

// stretch is the set of the run at off and how far, up to end, the runs have the same.
func (c *Core) stretch(off, end int64) (setIndex, int64) {
	run := block.RunIndex(off >> c.runShift)
	set := c.runs.at(run)
	stop := int64(run+1) << c.runShift
	for stop < end && c.runs.at(run+1) == set {
		run++
		stop += 1 << c.runShift
	}
	return set, min(stop, end)
}

// plan adds an op's stretch to its IOs, or reports that it is blocked: a
// mutation needs all copies, a read one of them.
func (c *Core) plan(op *Op, set *copySet, off, end int64) bool {
	r := op.Req
	found := false
	for _, cp := range set.copies {
		if !cp.membership.In {
			continue
		}
		if !cp.serves(c.geometry, off, end) {
			if r.Op.Mutates() {
				return false
			}
			continue
		}
		io := IO{IO: block.IO{Op: r.Op, NoHole: r.NoHole, Offset: off, Length: end - off}, Copy: cp, op: op}
		if r.Op == block.OpWrite {
			io.Data = r.Data[off-r.Offset : end-r.Offset]
		}
		op.IOs = append(op.IOs, io)
		if found = true; !r.Op.Mutates() {
			break
		}
	}
	return found
}

// start numbers an op's IOs, one sequence number per stretch, and hands it out.
func (c *Core) start(op *Op) {
	mutates := op.Req.Op.Mutates()
	for i := range op.IOs {
		io := &op.IOs[i]
		io.Generation, io.Err = c.generation, nil
		if mutates {
			if i == 0 || io.Offset != op.IOs[i-1].Offset {
				c.sequence++
			}
			io.Sequence = c.sequence
		}
		if cp := io.Copy; cp != nil {
			io.Member, io.life = cp.Member, cp.life
			cp.busy++
		}
	}
	op.pending, op.Err = len(op.IOs), nil
	op.conn.running++
	if mutates {
		c.mutating++
	}
	c.move(op, opRunning)
	c.out.Start = append(c.out.Start, op)
}

// Finished reports one IO, with its Err set.
func (c *Core) Finished(io *IO) {
	op := io.op
	if cp := io.Copy; cp != nil {
		cp.busy--
	}
	if op.pending--; op.pending == 0 {
		c.returned(op)
	}
}

// returned decides what becomes of an op when all its IOs are answered.
func (c *Core) returned(op *Op) {
	cn := op.conn
	cn.running--
	if op.Req.Op.Mutates() {
		c.mutating--
	}
	o := c.judge(op)
	switch {
	case c.over != nil || cn.state == connClosed && o.outcome != outcomeOK:
		c.finish(op, errConnClosed)
	case o.outcome == outcomeAgain:
		c.move(op, opReady) // it will find itself blocked
	case o.outcome == outcomeNoSpace && c.info.WaitWhenFull:
		c.spaceShort(o.disk)
		c.move(op, opSpace)
	case o.outcome != outcomeOK:
		c.finish(op, o.err)
	case op.durable && cn.state == connClosed:
		c.finish(op, errConnClosed)
	case op.durable:
		c.awaitSyncs(op)
	default:
		c.finish(op, nil)
	}
	c.drained(cn)
}

// flush starts a FLUSH, or finds it blocked. It covers what was acknowledged
// before it came, on every connection: that is on the copies, and the syncs
// it waits for start only now.
func (c *Core) flush(op *Op) {
	for _, cp := range c.copies {
		if cp.counts() && cp.state != copyLive {
			c.move(op, opBlocked)
			return
		}
	}
	c.move(op, opSyncing)
	op.pending = 0
	for _, cp := range c.copies {
		if cp.counts() {
			cp.nextSync = append(cp.nextSync, op)
			op.pending++
		}
	}
	if op.pending == 0 {
		c.finish(op, nil)
	}
}

// awaitSyncs lets a durable mutation wait for the next sync of each copy it went to.
func (c *Core) awaitSyncs(op *Op) {
	c.move(op, opSyncing)
	op.pending = 0
	for i := range op.IOs {
		cp := op.IOs[i].Copy
		if n := len(cp.nextSync); n > 0 && cp.nextSync[n-1] == op {
			continue // an earlier stretch on the same copy
		}
		cp.nextSync = append(cp.nextSync, op)
		op.pending++
	}
}

// finish answers an op, whatever state it is in but running.
func (c *Core) finish(op *Op, err error) {
	r, cn := op.Req, op.conn
	if op.state == opSyncing && op.pending > 0 {
		c.unsync(op)
	}
	c.move(op, opFree)
	c.count[opFree]--
	if op.lock.held {
		c.release(op)
	}
	if op.prevConn == nil {
		cn.firstOp = op.nextConn
	} else {
		op.prevConn.nextConn = op.nextConn
	}
	if op.nextConn == nil {
		cn.lastOp = op.prevConn
	} else {
		op.nextConn.prevConn = op.prevConn
	}
	op.nextConn, op.prevConn = nil, nil

	r.Err = err
	c.stats.add(r)
	c.out.Done = append(c.out.Done, r)

	op.Req, op.conn = nil, nil
	clear(op.IOs[:cap(op.IOs)]) // let go of members and payloads
	if cap(op.IOs) > maxKeptIOs {
		op.IOs = op.one[:0]
	}
	op.next, c.free = c.free, op
}

func (c *Core) release(op *Op) {
	c.granted = c.locks.release(op, c.granted[:0])
	for _, g := range c.granted {
		if g.state == opQueued {
			c.move(g, opReady)
		}
	}
}
