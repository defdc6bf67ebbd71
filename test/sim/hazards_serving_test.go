package sim

import (
	"testing"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// The hazards of serving and resending, as scripts. n1 is the device, a and b
// its sockets, x the block at offset X, w1 and w2 writes to it.
const X = 8 * blockSize

func TestH01ParkedWriteAndItsResend(t *testing.T) {
	for _, heard := range []bool{false, true} { // whether the server hears that a was given up
		s := start(t, 1, setup{})
		n1 := s.device("n1")
		s.do(n1, write(0, blockSize)) // the run is born
		s.disk(0).leave(0)
		a, b := n1.socks[0], n1.socks[1]
		w1 := n1.submitOn(write(X, blockSize), a)
		s.until("w1 is parked", func() bool { return s.status().Space == 1 })
		if !heard {
			a.cut()
		}
		s.until("w1 is sent again on a sibling", func() bool { return w1.sent == 2 && w1.conn != a })
		a.drag = time.Second // a's copy is let go, and slow
		s.disk(0).roomAgain()
		s.done(w1)
		w2 := n1.submitOn(write(X, blockSize), b)
		f := n1.submit(flush())
		s.done(w2, f)
		s.run(time.Minute)
		s.shows(n1, w2)
	}
}

func TestH02BytesParsedLate(t *testing.T) {
	t.Run("reader held up, the client resets", func(t *testing.T) { readerHeldUp(t, true) })
	t.Run("reader held up, the client closes", func(t *testing.T) { readerHeldUp(t, false) })
	t.Run("process stopped", func(t *testing.T) {
		s := start(t, 1, setup{})
		n1 := s.device("n1")
		s.server.stop(10 * time.Second)
		w1 := n1.submit(write(X, blockSize))
		s.done(w1)
		if w1.parsed != 1 {
			t.Fatalf("w1 was parsed %d times", w1.parsed)
		}
		w2 := write(X, blockSize)
		s.do(n1, w2)
		s.run(time.Minute)
		s.shows(n1, w2)
	})
}

func readerHeldUp(t *testing.T, reset bool) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	a := n1.socks[0]
	a.holdUp(10 * time.Second)
	w1 := n1.submitOn(write(X, blockSize), a)
	s.run(n1.timeout - time.Millisecond)
	a.close(reset) // just before the client would choose by itself
	s.done(w1)
	if w1.sent != 2 || w1.parsed != 1 {
		t.Fatalf("w1 was sent %d times and parsed %d times", w1.sent, w1.parsed)
	}
	w2 := write(X, blockSize)
	s.do(n1, w2)
	s.run(time.Minute) // a's reader goes on
	if w1.parsed != 1 {
		t.Fatal("the first copy of w1 was executed")
	}
	s.shows(n1, w2)
}

func TestH03ClosingDropsWhatWasNotSent(t *testing.T) {
	for _, end := range []string{"fin", "reset", "server"} {
		t.Run(end, func(t *testing.T) {
			s := start(t, 1, setup{sockets: 1})
			n1 := s.device("n1")
			s.do(n1, write(0, blockSize))
			s.disk(0).hold(writes)
			a := n1.socks[0]
			for i := range 1000 { // ten go out, the others wait behind them
				n1.submitOn(write(int64(i%10)*blockSize, blockSize), a)
			}
			s.until("all are parsed", func() bool { return s.status().Queued == 990 && s.status().InFlight == 10 })
			switch end {
			case "server":
				a.serverClose()
			default:
				a.close(end == "reset")
				s.run(time.Second)
			}
			if st := s.status(); st.Queued != 0 || st.InFlight != 10 {
				t.Fatalf("%d parked writes are left, %d are in flight", st.Queued, st.InFlight)
			}
			n1.closing = true // it does not come back: nothing is sent again
			before := s.effects
			s.disk(0).release(writes)
			s.run(time.Minute)
			if done := s.effects - before; done != 10 || s.status().InFlight != 0 {
				t.Fatalf("%d writes reached the disk, %d are in flight", done, s.status().InFlight)
			}
		})
	}
}

func TestH04NewSessionWaitsForTheOld(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(0, blockSize))
	s.disk(0).hold(writes)
	w1 := n1.submit(write(X, blockSize))
	s.until("w1 is in flight", func() bool { return s.status().InFlight == 1 })
	n1.connect()
	s.waits(1900*time.Millisecond, w1)
	for _, c := range n1.socks {
		if c.ready {
			t.Fatal("the new session was answered while a write of the old one was in flight")
		}
	}
	s.disk(0).release(writes)
	s.done(w1)
	w2 := write(X, blockSize)
	s.do(n1, w2)
	s.run(time.Minute)
	s.shows(n1, w2)
}

func TestH05OneOfFourSockets(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(0, blockSize))
	old := n1.socks[3]
	old.cut()
	n1.slow = time.Second
	n1.connect() // the first attempt's handshakes arrive last
	late := n1.socks
	n1.slow = 0
	n1.connect()
	s.connected(n1)
	s.run(2 * time.Second)
	if st := s.status(); st.Sessions != 4 {
		t.Fatalf("%d sockets are open; the four of one device are one session", st.Sessions)
	}
	for _, c := range append(late, old) {
		if c.served || c != old && c.opened {
			t.Fatalf("conn %d of an older session can write", c.n)
		}
	}
	s.do(n1, write(X, blockSize))
}

// TestH06DeposedWhileServing: a grant that was thought lost makes this server
// its own successor. The older generation lets its clients go at once.
func TestH06DeposedWhileServing(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	w1 := write(X, blockSize)
	s.do(n1, w1)
	s.disk(0).holdNext(writes)
	w2 := n1.submit(write(X, blockSize)) // in the hands of generation 1, and slow
	s.until("w2 is in flight", func() bool { return s.status().InFlight == 1 })
	s.must("grant", &metapb.Command{Kind: &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{
		VolumeId: s.id.String(), Node: s.server.node, Process: s.server.process.String(),
	}}})
	s.within(2*time.Second, "generation 1 has let its clients go, and 3 serves", func() bool {
		return s.status().Generation == 3 && s.status().Sessions > 0
	})
	s.done(w2)
	w3 := write(X, blockSize)
	s.do(n1, w3)
	s.disk(0).release(writes) // the first copy of w2 reaches the disk
	s.run(time.Minute)
	s.shows(n1, w3)
	s.unbroken(n1, 1)
}

func TestH07OverlappingWritesAndTrims(t *testing.T) {
	s := start(t, 7, setup{})
	n1 := s.device("n1")
	for round := range 20 {
		var all []*call
		for i := range 24 {
			off, length := X+int64(i%5)*blockSize/2, int64(1+i%3)*blockSize
			k := []*call{write(off, length), trim(off, length), zero(off, length)}[(round+i)%3]
			all = append(all, n1.submitOn(k, n1.socks[i%4]))
		}
		if round%5 == 4 {
			s.killed()
		}
		s.done(all...)
	}
	s.unbroken(n1, 1)
	s.verify(n1)
	s.verify(n1) // what was read once stays
}

func TestH09NeighbouringSectors(t *testing.T) {
	for _, direct := range []bool{true, false} {
		s := start(t, 9, setup{direct: direct, sockets: 2})
		n1 := s.device("n1")
		for round := range 30 {
			var all []*call
			for i := range int64(8) {
				all = append(all, n1.submit(write(X+i*grain, grain)))
			}
			if round == 15 {
				s.killed()
			}
			s.done(all...)
			s.do(n1, read(X, blockSize))
		}
		s.unbroken(n1, 1)
	}
}

func TestH10RequestAcrossExtents(t *testing.T) {
	// Run 0 is born, run 1 is not, run 2 is born on another disk, which is away.
	s, n1, near, far := onTwoDisks(t)
	far.missing = true
	s.killed()
	w0 := n1.submit(write(2*runSize, blockSize))
	s.until("run 2 is blocked", func() bool { return s.status().Blocked == 1 })
	near.arm("write head.img #1 enospc") // the part on the near disk fails once
	w := n1.submit(write(runSize-blockSize, runSize+2*blockSize).withFUA())
	s.waits(time.Minute, w0, w)
	far.missing = false
	s.done(w0, w)
	s.unbroken(n1, 1)
	s.powerCut()
	n1 = s.afresh(n1)
	s.do(n1, read(runSize-blockSize, runSize+2*blockSize)) // FUA: all of it is there, whatever else was lost
}

// onTwoDisks has a volume whose runs 0 and 2 were born on different disks.
func onTwoDisks(t *testing.T) (s *sim, d *device, first, third *disk) {
	for seed := uint64(1); seed < 50; seed++ {
		s := start(t, seed, setup{disks: 2, size: 4 * runSize})
		d := s.device("n1")
		s.do(d, write(runSize-blockSize, blockSize), write(2*runSize, blockSize))
		on := func(run block.RunIndex) *disk {
			for _, x := range s.host.disks {
				if x.id.String() == s.view().Run(s.id, run).Disks[0] {
					return x
				}
			}
			return nil
		}
		if on(0) != on(2) {
			s.do(d, flush())
			return s, d, on(0), on(2)
		}
	}
	t.Fatal("no placement on two disks in 50 seeds")
	return nil, nil, nil, nil
}

func TestH14ParkedWritesHoldUpNobody(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(0, blockSize))
	s.disk(0).leave(0)
	w1 := n1.submit(write(X, blockSize))
	s.until("w1 waits for space", func() bool { return s.status().Space == 1 })
	before := s.effects
	s.do(n1, flush(), read(0, blockSize), write(0, blockSize))
	s.waits(time.Second, w1)
	a := s.view().Attachment(s.id, "n1")
	s.detach(a.Id)
	s.within(time.Second, "the detach", func() bool { return !s.attached(a.Id) })
	n1.end()
	s.disk(0).roomAgain()
	s.run(time.Minute)
	if s.effects-before != 1 {
		t.Fatal("the parked write was executed after the detach")
	}
}
