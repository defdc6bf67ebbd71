package sim

import (
	"errors"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// What scripts say, beside the requests of device.go and the faults of host.go and server.go.

// restart starts a process after the last one ended.
func (s *sim) restart() { s.server.start() }

// killed and powerCut end the process, or the host, and start it again.
func (s *sim) killed() {
	s.server.kill()
	s.restart()
}

func (s *sim) powerCut() {
	s.server.cutPower()
	s.restart()
}

// do submits requests and waits until all are answered without an error.
func (s *sim) do(d *device, calls ...*call) {
	s.t.Helper()
	for _, k := range calls {
		d.submit(k)
	}
	s.done(calls...)
}

// done waits for answers without an error.
func (s *sim) done(calls ...*call) {
	s.t.Helper()
	for _, k := range calls {
		s.until(k.String()+" is answered", func() bool { return k.done })
		if k.err != nil {
			s.failf("%s: %v", k, k.err)
		}
	}
}

// waits lets d pass and makes sure that none of the requests is answered.
func (s *sim) waits(d time.Duration, calls ...*call) {
	s.t.Helper()
	s.run(d)
	for _, k := range calls {
		if k.done {
			s.failf("%s was answered (%v); it has to wait", k, k.err)
		}
	}
}

// shows reads the block that a write begins with and fails unless it is the one found there, now and for good.
func (s *sim) shows(d *device, k *call) {
	s.t.Helper()
	s.do(d, read(k.off, grain))
	if got := s.log.Allowed(k.off); len(got) != 1 || got[0] != k.write.Count() {
		s.failf("the block at %d shows write %v, not %d", k.off, got, k.write.Count())
	}
}

// broken waits until a device was refused for good, for this reason.
func (s *sim) broken(d *device, reason error) {
	s.t.Helper()
	s.until("the device is refused for good", func() bool { return d.broken != nil })
	if !errors.Is(d.broken, reason) {
		s.failf("the device was refused with %v, not %v", d.broken, reason)
	}
}

// afresh waits until a device is refused for what was lost, and stages its
// attachment anew until that is served.
func (s *sim) afresh(d *device) *device {
	s.t.Helper()
	if d.broken == nil {
		d.connect()
	}
	s.broken(d, block.ErrCacheLost)
	for tries := 0; d.broken != nil; tries++ {
		if tries == 10 {
			s.failf("every new device is refused: %v", d.broken)
		}
		s.learn()
		d.end()
		d = s.stage(s.view().Attachment(s.id, d.node))
		s.back(d)
	}
	return d
}

// back waits until a device is served, or refused.
func (s *sim) back(d *device) {
	s.t.Helper()
	s.until("the device is served or refused", func() bool { return d.broken != nil || d.pick(nil) != nil })
}

// unbroken fails if a device was refused or the cache epoch is not e.
func (s *sim) unbroken(d *device, e block.CacheEpoch) {
	s.t.Helper()
	if d.broken != nil || s.epoch() != e || d.errors > 0 {
		s.failf("cache epoch %d instead of %d, %d errors, device: %v", s.epoch(), e, d.errors, d.broken)
	}
}

// verify reads everything through a device.
func (s *sim) verify(d *device) {
	s.t.Helper()
	const chunk = 256 << 10
	size := s.volume().Size
	for off := int64(0); off < size; off += chunk {
		s.do(d, read(off, min(chunk, size-off)))
	}
}

// status is what the open volume's core says of itself.
func (s *sim) status() primary.VolumeStatus {
	if v := s.server.find(s.id); v != nil && v.core != nil {
		return v.core.Status()
	}
	return primary.VolumeStatus{}
}
