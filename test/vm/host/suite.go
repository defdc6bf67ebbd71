package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// Suite runs scenarios on kernels, as many at a time as keep the host's processors busy and no guest waiting for one.
type Suite struct {
	Machines   []*Machine
	Processors int // of the host, that guests may use at a time
	Out        io.Writer
	Verbose    bool
	Long       bool
	Seed       uint64

	mu      sync.Mutex
	tallies map[*Machine]*tally
}

// tally is what came of the scenarios on one kernel.
type tally struct {
	passed int
	failed []string
	left   int           // to the first machine
	used   time.Duration // of the host's processors
}

// groupSize bounds the scenarios that share a boot. The first ones of a boot cost several times what later ones do, as
// the emulator translates what it has not yet run; small groups end at the same time.
const groupSize = 14

// Run runs the scenarios on every machine and returns an error that names those that failed.
func (s *Suite) Run(ctx context.Context, scenarios []lab.Scenario) error {
	began := time.Now()
	s.tallies = map[*Machine]*tally{}
	var all []*job
	for n, m := range s.Machines {
		s.tallies[m] = new(tally)
		chosen := slices.Clone(scenarios)
		if n > 0 && !s.Long {
			chosen = slices.DeleteFunc(chosen, func(sc lab.Scenario) bool { return sc.Once })
			s.tallies[m].left = len(scenarios) - len(chosen)
		}
		for i, group := range groups(chosen) {
			all = append(all, &job{suite: s, machine: m.fork(i), tally: s.tallies[m], group: group})
		}
	}
	// What takes most comes first, so that no processor is idle at the end.
	slices.SortStableFunc(all, func(a, b *job) int { return cmp.Compare(len(b.group), len(a.group)) })
	err := s.runAll(ctx, all)
	for _, m := range s.Machines {
		t := s.tallies[m]
		fmt.Fprintf(s.Out, "%s: %d passed, %d failed, %d left to the first kernel, %.0f s of processors\n",
			m.Kernel.Release, t.passed, len(t.failed), t.left, t.used.Seconds())
		if len(t.failed) > 0 {
			err = errors.Join(err, fmt.Errorf("on %s failed: %s", m.Kernel.Release, strings.Join(t.failed, ", ")))
		}
	}
	fmt.Fprintf(s.Out, "all of it took %.0f s\n", time.Since(began).Seconds())
	return err
}

// groups are the scenarios by the boots that they share.
func groups(scenarios []lab.Scenario) [][]lab.Scenario {
	var all [][]lab.Scenario
	for _, sc := range scenarios {
		i := slices.IndexFunc(all, func(g []lab.Scenario) bool {
			return !sc.Alone && !g[0].Alone && len(g) < groupSize && g[0].Memory == sc.Memory && g[0].CPUs == sc.CPUs && g[0].Waits == sc.Waits
		})
		if i < 0 {
			all = append(all, []lab.Scenario{sc})
		} else {
			all[i] = append(all[i], sc)
		}
	}
	return all
}

// runAll runs the jobs side by side: whenever processors are free, the first that is content with them.
func (s *Suite) runAll(ctx context.Context, all []*job) error {
	free, running := 2*max(1, s.Processors), 0 // halves
	most := free
	type end struct {
		err  error
		load int
	}
	ends := make(chan end)
	var failures []error
	for len(all) > 0 || running > 0 {
		fits := func(j *job) bool { return min(most, j.load()) <= free }
		for i := slices.IndexFunc(all, fits); i >= 0 && ctx.Err() == nil; i = slices.IndexFunc(all, fits) {
			j, load := all[i], min(most, all[i].load())
			all = slices.Delete(all, i, i+1)
			free -= load
			running++
			go func() { ends <- end{j.run(ctx), load} }()
		}
		if running == 0 {
			return errors.Join(append(failures, context.Cause(ctx))...)
		}
		e := <-ends
		free += e.load
		running--
		failures = append(failures, e.err)
	}
	return errors.Join(failures...)
}

// print writes lines of one kernel, together.
func (s *Suite) print(m *Machine, lines ...string) {
	prefix := ""
	if len(s.Machines) > 1 {
		prefix = fmt.Sprintf("%-12s| ", m.Kernel.Version())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lines {
		fmt.Fprintf(s.Out, "%s%s\n", prefix, l)
	}
}
