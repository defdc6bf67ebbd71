package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// Suite runs scenarios on one machine, several in a boot where they allow it.
type Suite struct {
	Machine *Machine
	Out     io.Writer
	Verbose bool
	Long    bool
	Seed    uint64

	began  time.Duration // of the scenario that runs, in the guest's time
	lines  []string      // its log
	failed []string
	passed int
	used   time.Duration // of the host's processors
}

// bootTime is what a boot may take.
const bootTime = 90 * time.Second

// Run runs the scenarios and returns an error that names those that failed.
func (s *Suite) Run(ctx context.Context, scenarios []lab.Scenario) error {
	began := time.Now()
	for len(scenarios) > 0 {
		group := nextGroup(scenarios)
		done, err := s.boots(ctx, group)
		if err != nil {
			return err
		}
		scenarios = scenarios[done:]
	}
	fmt.Fprintf(s.Out, "%s: %d passed, %d failed, %.0f s, %.0f s of processors\n", s.Machine.Kernel.Release, s.passed, len(s.failed), time.Since(began).Seconds(), s.used.Seconds())
	if len(s.failed) > 0 {
		return fmt.Errorf("on %s failed: %s", s.Machine.Kernel.Release, strings.Join(s.failed, ", "))
	}
	return nil
}

// nextGroup is the scenarios at the front that share a boot.
func nextGroup(all []lab.Scenario) []lab.Scenario {
	n := 1
	for !all[0].Alone && n < len(all) && !all[n].Alone && all[n].Memory == all[0].Memory && all[n].CPUs == all[0].CPUs {
		n++
	}
	return all[:n]
}

// errBoot is the end of a guest that had not come to a scenario.
var errBoot = errors.New("the guest did not boot")

// bootTries bounds the attempts of one boot: the emulator now and then runs an instruction that the kernel is just
// replacing, which ends the kernel.
const bootTries = 3

// boots runs one boot, and the further ones that a power cut asks for, and returns how many scenarios are done.
func (s *Suite) boots(ctx context.Context, group []lab.Scenario) (done int, err error) {
	for boot := 0; ; boot++ {
		n, cut, err := s.boot(ctx, group, boot)
		for try := 1; try < bootTries && errors.Is(err, errBoot); try++ {
			fmt.Fprintln(s.Out, err)
			n, cut, err = s.boot(ctx, group, boot)
		}
		if done += n; err != nil || !cut {
			return done, err
		}
		if n > 0 {
			boot = 0
		}
		group = group[n : n+1] // goes on alone; the others follow in a fresh boot
	}
}

// boot runs the guest once and returns how many scenarios of the group it finished, and whether the next one was cut.
func (s *Suite) boot(ctx context.Context, group []lab.Scenario, boot int) (done int, cut bool, err error) {
	var names []string
	for _, sc := range group {
		names = append(names, sc.Name)
	}
	words := []string{"gabion.run=" + strings.Join(names, ","), fmt.Sprintf("gabion.boot=%d", boot), fmt.Sprintf("gabion.seed=%d", s.Seed)}
	if s.Long {
		words = append(words, "gabion.long=1")
	}
	memory, cpus := cmp.Or(group[0].Memory, lab.DefaultMemory), cmp.Or(group[0].CPUs, lab.DefaultCPUs)
	v, err := s.Machine.Boot(ctx, memory, cpus, words...)
	if err != nil {
		return 0, false, err
	}
	defer func() {
		v.Kill()
		s.used += v.used
	}()
	deadline := time.NewTimer(bootTime)
	defer deadline.Stop()
	running := "" // the scenario that has begun and not ended
	for {
		select {
		case <-ctx.Done():
			return 0, false, context.Cause(ctx)
		case <-deadline.C:
			return s.lost(group, done, running, "the guest hangs")
		case e, ok := <-v.Events:
			if !ok || e.Kind == lab.Ended {
				if done < len(group) && (!ok || running != "") {
					return s.lost(group, done, running, "the guest ended")
				}
				return max(done, 1), false, nil
			}
			if s.event(e); e.Kind == lab.Began {
				running = e.Scenario
				i := slices.IndexFunc(group, func(sc lab.Scenario) bool { return sc.Name == e.Scenario })
				deadline.Reset(group[i].Limit() + time.Minute)
			}
			switch e.Kind {
			case lab.Cut:
				return done, true, nil
			case lab.Passed, lab.Failed:
				done, running = done+1, ""
				deadline.Reset(bootTime)
			}
		}
	}
}

// lost notes the failure of a scenario whose guest is gone.
func (s *Suite) lost(group []lab.Scenario, done int, running, why string) (int, bool, error) {
	if done >= len(group) {
		return done, false, nil
	}
	console, _ := os.ReadFile(s.Machine.Console)
	for _, l := range strings.Split(string(console[max(0, len(console)-4000):]), "\n") {
		s.lines = append(s.lines, "console: "+strings.TrimSpace(l))
	}
	if running == "" && done > 0 {
		s.result("FAIL", group[done-1].Name, "after it "+why, 0)
		return done, false, nil
	}
	if running == "" {
		return 0, false, fmt.Errorf("%w: %s; see %s", errBoot, why, s.Machine.Console)
	}
	s.result("FAIL", running, why, 0)
	return done + 1, false, nil
}

// event prints what is to be seen of an event.
func (s *Suite) event(e lab.Event) {
	switch e.Kind {
	case lab.Booted:
		fmt.Fprintf(s.Out, "=== BOOT  %s (%.1f s)\n", e.Text, e.Uptime.Seconds())
	case lab.Began:
		s.began, s.lines = e.Uptime, nil
		if s.Verbose {
			fmt.Fprintf(s.Out, "=== RUN   %s\n", e.Scenario)
		}
	case lab.Logged:
		line := fmt.Sprintf("[%7.2f] %s", e.Uptime.Seconds(), e.Text)
		if s.Verbose {
			fmt.Fprintf(s.Out, "    %s\n", line)
		} else {
			s.lines = append(s.lines, line)
		}
	case lab.Figure:
		fmt.Fprintf(s.Out, "    %s: %s\n", e.Scenario, e.Text)
	case lab.Passed:
		s.passed++
		s.result("PASS", e.Scenario, e.Text, e.Uptime-s.began)
	case lab.Failed:
		s.result("FAIL", e.Scenario, e.Text, e.Uptime-s.began)
	}
}

func (s *Suite) result(word, name, text string, took time.Duration) {
	fmt.Fprintf(s.Out, "--- %s: %s (%.2fs) %s\n", word, name, took.Seconds(), text)
	if word == "FAIL" {
		s.failed = append(s.failed, name)
		for _, l := range s.lines {
			fmt.Fprintf(s.Out, "    %s\n", l)
		}
	}
	s.lines = nil
}
