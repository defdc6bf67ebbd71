package kerneltest

import (
	"context"
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Start sends a request to a device. Its outcome comes on the channel: nil, or
// block.ErrIO for EIO. No request is ever given up.
func (f *Fake) Start(index int) <-chan error {
	done := make(chan error, 1)
	f.mu.Lock()
	d := f.devices[index]
	f.mu.Unlock()
	f.running.Go(func() {
		if d == nil {
			done <- fmt.Errorf("%w: no nbd%d", block.ErrIO, index)
			return
		}
		done <- f.request(d)
	})
	return done
}

// Poke implements kernel.Kernel. A page that cannot be read is never there, and nobody says so.
func (f *Fake) Poke(ctx context.Context, index int, _ int64) error {
	f.mu.Lock()
	requests := 1
	if d := f.devices[index]; d != nil {
		requests = max(1, len(d.slots)) // their turns go round
	}
	f.mu.Unlock()
	var answers []<-chan error
	for range requests {
		answers = append(answers, f.Start(index))
	}
	for _, answer := range answers {
		select {
		case err := <-answer:
			if err == nil {
				continue
			}
			<-ctx.Done()
		case <-ctx.Done():
		}
		return fmt.Errorf("%w: nbd%d does not answer: %w", block.ErrUnavailable, index, ctx.Err())
	}
	return nil
}

// request is a request's whole life.
func (f *Fake) request(d *device) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for d.frozen && !f.closed {
		f.await(nil)
	}
	d.inflight++
	f.change()
	defer func() {
		d.inflight--
		f.change()
	}()
	for !d.disconnected && !f.closed {
		p := d.live()
		if p == nil {
			if !f.awaitSockets(d) {
				break
			}
			continue
		}
		if answered, err := f.send(d, p); answered {
			return err
		}
	}
	return fmt.Errorf("%w: nbd%d", block.ErrIO, d.Index)
}

// live is the slot that has the next request's turn among those that the driver
// takes for alive; nil: there is none.
func (d *device) live() *slot {
	for range d.slots {
		d.served++
		if p := d.slots[d.served%len(d.slots)]; !p.dead {
			return p
		}
	}
	return nil
}

// awaitSockets waits until a device has a socket again; false: it has waited too long, and is shut down.
func (f *Fake) awaitSockets(d *device) bool {
	t := time.NewTimer(d.DeadTimeout)
	defer t.Stop()
	begin := time.Now()
	for d.live() == nil && !d.disconnected && !f.closed {
		if time.Since(begin) >= d.DeadTimeout {
			return false
		}
		f.await(t.C)
	}
	return true
}

// send sends a request on a socket and waits for its answer. false: it is to be
// sent again: the device has ended, or its timer has run out, which also ends
// the socket. The end of the socket makes it no shorter.
func (f *Fake) send(d *device, p *slot) (answered bool, err error) {
	s := p.socket
	t := time.NewTimer(d.Timeout)
	defer t.Stop()
	begin := time.Now()
	for !d.disconnected && !f.closed {
		answered := s.established && s.server.state == serving && !s.volume.parked
		if answered && s.deaf {
			s.untaken = 16
		} else if answered {
			s.taken += 16
			s.server.requests++
			if s.volume.broken {
				err = fmt.Errorf("%w: nbd%d", block.ErrIO, d.Index)
			}
			return true, err
		}
		if time.Since(begin) >= d.Timeout {
			if p.socket == s && !p.dead {
				f.die(d, p)
			}
			return false, nil
		}
		f.await(t.C)
	}
	return false, nil
}
