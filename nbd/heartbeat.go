package nbd

import (
	"errors"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	beatEvery = 100 * time.Millisecond
	// patience is how long bytes may lie unparsed: less than any client waits before it sends a request again.
	patience = time.Second
)

var (
	errStalled = errors.New("nbd: the process was stopped for more than a second; what was received before is not executed")
	errHeldUp  = errors.New("nbd: reading was held up for more than a second; what was received meanwhile is not executed")
)

// bootTime is CLOCK_BOOTTIME. It is asked after every read, so the system call
// is made without telling the scheduler: it cannot block.
func bootTime() time.Duration {
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&ts)), 0)
	if errno != 0 {
		panic("nbd: no CLOCK_BOOTTIME: " + errno.Error())
	}
	return time.Duration(ts.Nano())
}

// beats notes every beatEvery that the process runs.
func (s *Server) beats() {
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.beatOnce()
		case <-s.stop:
			return
		}
	}
}

// beatOnce renews the heartbeat. After a gap it first raises the stall number,
// which ends every connection that was there: a reader either still sees the
// old beat or already the new number, never neither.
func (s *Server) beatOnce() {
	now := s.cfg.BootTime()
	gap := now - time.Duration(s.beat.Load())
	if gap <= patience {
		s.beat.Store(int64(now))
		return
	}
	number := s.stall.Add(1)
	s.beat.Store(int64(now))
	s.cfg.Log.Warn("the process was stopped; all connections are closed and their clients send again", "length", gap)
	for _, c := range s.snapshot() {
		if c.born < number {
			c.abort(errStalled)
		}
	}
}

// stalled reports whether the process was stopped while a connection that was
// made at stall number born may have had bytes waiting. Called after a read,
// before what it returned is looked at.
func (s *Server) stalled(born uint64) bool {
	beat := time.Duration(s.beat.Load()) // before the stall number, as beatOnce stores it after
	return s.stall.Load() != born || s.cfg.BootTime()-beat > patience
}
