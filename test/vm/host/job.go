package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// job is a group of scenarios on one kernel. They share a boot unless one fails or cuts the power.
type job struct {
	suite   *Suite
	machine *Machine
	tally   *tally // under suite.mu
	group   []lab.Scenario

	vm     *VM           // of the boot
	began  time.Duration // of the scenario that runs, in the guest's time
	before time.Duration // used by the emulator when it began
	lines  []string      // its log
	failed bool
}

// bootTime is what a boot may take.
const bootTime = 90 * time.Second

func (j *job) processors() int { return cmp.Or(j.group[0].CPUs, lab.DefaultCPUs) }

// load is what the guest takes of the host, in halves of a processor. One of several processors leaves all but one of them idle for the most part.
func (j *job) load() int {
	if j.group[0].Waits {
		return 1
	}
	return 2
}

// run runs the group on a disk of its own, whose console is kept if a scenario failed.
func (j *job) run(ctx context.Context) error {
	if err := WriteDataDisk(ctx, j.machine.Data); err != nil {
		return err
	}
	defer func() { _ = os.Remove(j.machine.Data) }()
	for left := j.group; len(left) > 0; {
		done, err := j.boots(ctx, left)
		if err != nil {
			return err
		}
		left = left[done:]
	}
	if j.failed || j.suite.Verbose {
		return j.keepConsole()
	}
	return nil
}

func (j *job) keepConsole() error {
	name, err := j.machine.KeepConsole()
	if err == nil {
		j.print("the console's output is in " + name)
	}
	return err
}

func (j *job) print(lines ...string) { j.suite.print(j.machine, lines...) }

// errBoot is the end of a guest that had not come to a scenario.
var errBoot = errors.New("the guest did not boot")

// bootTries bounds the attempts of one boot: the emulator now and then runs an instruction that the kernel is just
// replacing, which ends the kernel.
const bootTries = 3

// boots runs one boot, and the further ones that a power cut asks for, and returns how many scenarios are done.
func (j *job) boots(ctx context.Context, group []lab.Scenario) (done int, err error) {
	for boot := 0; ; boot++ {
		n, cut, err := j.boot(ctx, group, boot)
		for try := 1; try < bootTries && errors.Is(err, errBoot); try++ {
			j.print(err.Error())
			n, cut, err = j.boot(ctx, group, boot)
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
func (j *job) boot(ctx context.Context, group []lab.Scenario, boot int) (done int, cut bool, err error) {
	var names []string
	for _, sc := range group {
		names = append(names, sc.Name)
	}
	words := []string{"gabion.run=" + strings.Join(names, ","), fmt.Sprintf("gabion.boot=%d", boot), fmt.Sprintf("gabion.seed=%d", j.suite.Seed)}
	if j.suite.Long {
		words = append(words, "gabion.long=1")
	}
	v, err := j.machine.Boot(ctx, cmp.Or(group[0].Memory, lab.DefaultMemory), j.processors(), words...)
	if err != nil {
		return 0, false, err
	}
	j.vm = v
	defer func() {
		v.Kill()
		j.suite.mu.Lock()
		j.tally.used += v.Used()
		j.suite.mu.Unlock()
	}()
	deadline := time.NewTimer(bootTime)
	defer deadline.Stop()
	running := "" // the scenario that has begun and not ended
	for {
		select {
		case <-ctx.Done():
			return 0, false, context.Cause(ctx)
		case <-deadline.C:
			return j.lost(group, done, running, "the guest hangs")
		case e, ok := <-v.Events:
			if !ok || e.Kind == lab.Ended {
				if done < len(group) && (!ok || running != "") {
					return j.lost(group, done, running, "the guest ended")
				}
				return max(done, 1), false, nil
			}
			if j.event(e); e.Kind == lab.Began {
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
func (j *job) lost(group []lab.Scenario, done int, running, why string) (int, bool, error) {
	if done >= len(group) {
		return done, false, nil
	}
	console, _ := os.ReadFile(j.machine.Console)
	for _, l := range strings.Split(string(console[max(0, len(console)-4000):]), "\n") {
		j.lines = append(j.lines, "console: "+strings.TrimSpace(l))
	}
	if running == "" && done > 0 {
		j.result(lab.Failed, group[done-1].Name, "after it "+why, 0)
		return done, false, nil
	}
	if running == "" {
		return 0, false, fmt.Errorf("%w: %s; see %s", errBoot, why, j.machine.Console)
	}
	j.result(lab.Failed, running, why, 0)
	return done + 1, false, nil
}

// event prints what is to be seen of an event.
func (j *job) event(e lab.Event) {
	switch e.Kind {
	case lab.Booted:
		if j.suite.Verbose {
			j.print(fmt.Sprintf("=== BOOT  %s (%.1f s)", e.Text, e.Uptime.Seconds()))
		}
	case lab.Began:
		j.began, j.before, j.lines = e.Uptime, j.vm.Used(), nil
		if j.suite.Verbose {
			j.print("=== RUN   " + e.Scenario)
		}
	case lab.Logged:
		line := fmt.Sprintf("[%7.2f] %s", e.Uptime.Seconds(), e.Text)
		if j.suite.Verbose {
			j.print("    " + line)
		} else {
			j.lines = append(j.lines, line)
		}
	case lab.Figure:
		j.print(fmt.Sprintf("    %s: %s", e.Scenario, e.Text))
	case lab.Passed, lab.Failed:
		j.result(e.Kind, e.Scenario, e.Text, e.Uptime-j.began)
	}
}

// result counts and prints how a scenario ended, with its log if it failed.
func (j *job) result(kind lab.EventKind, name, text string, took time.Duration) {
	word := map[lab.EventKind]string{lab.Passed: "PASS", lab.Failed: "FAIL"}[kind]
	used := j.vm.Used() - j.before
	said := []string{fmt.Sprintf("--- %s: %s (%.2f s, %.2f s of processors) %s", word, name, took.Seconds(), used.Seconds(), text)}
	j.suite.mu.Lock()
	if kind == lab.Failed {
		j.failed = true
		j.tally.failed = append(j.tally.failed, name)
		for _, l := range j.lines {
			said = append(said, "    "+l)
		}
	} else {
		j.tally.passed++
	}
	j.suite.mu.Unlock()
	j.lines = nil
	j.print(said...)
}
