package main

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/server/block"
)

// stuck is a machine on which some program's nbd call hangs: a check ends when answer says how.
type stuck struct {
	kernel.Kernel
	checks atomic.Int32
	answer chan error
}

func (s *stuck) Check() ([]string, error) {
	s.checks.Add(1)
	return []string{"load it otherwise"}, <-s.answer
}

// A plugin starts on a machine whose nbd driver does not answer, takes care of the
// devices there, and is not found dead: its end would help nobody. No more than
// one question waits, however often it is probed.
func TestPluginOfAStuckMachine(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	v := b.volume("v", "here")
	if code, _, errs := b.run("attach", "v", "--device", "--node", "here", "--state", b.state); code != 0 {
		t.Fatal(errs)
	}
	s := &stuck{Kernel: b.fake, answer: make(chan error)}
	c := pluginFlags(t, "--node=here", "--state="+b.state)
	c.machine = machine{s, b.fake}
	p := runPlugin(t, c, fmt.Sprintf("127.0.0.1:%d", b.server.ports.metadata))
	b.nbd.Kill()
	b.nbd.Serve()
	for begin := time.Now(); b.fake.Established() == 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > 20*time.Second {
			t.Fatalf("%v is not connected again\n%s", v.Volume, p.log.String())
		}
	}
	for range 3 {
		begin := time.Now()
		if err := p.well(t.Context()); err != nil || time.Since(begin) > time.Second {
			t.Errorf("a probe after %v: %v", time.Since(begin), err)
		}
	}
	if n := s.checks.Load(); n != 1 || !strings.Contains(p.log.String(), "the nbd driver does not answer") {
		t.Errorf("%d checks\n%s", n, p.log.String())
	}
	s.answer <- fmt.Errorf("%w: no driver", block.ErrPrecondition)
	for range 2 { // the next question waits again: this is the last one's answer
		if err := p.well(t.Context()); !errors.Is(err, block.ErrPrecondition) {
			t.Errorf("a probe: %v", err)
		}
	}
	close(s.answer)
	if err := p.well(t.Context()); err != nil {
		t.Errorf("a probe: %v", err)
	}
	if n := strings.Count(p.log.String(), "load it otherwise"); n != 1 {
		t.Errorf("the advice is given %d times", n)
	}
	p.end()
	if err := <-p.done; err != nil {
		t.Error(err)
	}
	if code, _, errs := b.run("detach", "v", "--state", b.state); code != 0 {
		t.Error(errs)
	}
}
