package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// Scenario is one thing that must hold on a real kernel.
type Scenario struct {
	Name    string        // as in `make vm SCENARIO=name`; hazards and field cases begin with their number
	Run     func(*T)      // fails by T's methods; a panic is a failure too
	Memory  int           // of the guest, in MiB; 0: DefaultMemory
	CPUs    int           // of the guest; 0: DefaultCPUs
	Waits   bool          // mostly for time to pass, so that it leaves half a processor to another guest
	Timeout time.Duration // of the guest's time; 0: DefaultTimeout
	Long    bool          // only with LONG=1
	Alone   bool          // in a boot of its own
	Once    bool          // on the first kernel of a run alone, unless LONG=1: it is about our code more than about the kernel
}

// What a scenario that says nothing gets.
const (
	DefaultMemory  = 1024
	DefaultCPUs    = 1
	DefaultTimeout = 2 * time.Minute
)

// Limit is the scenario's timeout.
func (s Scenario) Limit() time.Duration {
	if s.Timeout == 0 {
		return DefaultTimeout
	}
	return s.Timeout
}

// T is what a scenario works with. Its methods that can fail end the scenario, so they are called from the scenario's
// own goroutine; Errorf, Logf and Figure may be called from any.
type T struct {
	// Scenario is the one that runs.
	Scenario Scenario
	// Boot counts the boots of this scenario, from 0: a power cut starts it again with the next number.
	Boot int
	// Long asks for the longer rounds.
	Long bool
	// Seed decides what Random returns; it is printed if the scenario fails.
	Seed uint64
	// Dir is the scenario's directory on the persistent disk: what was synced there outlives a power cut.
	Dir string

	ctx      context.Context
	events   *Events
	mu       sync.Mutex
	failed   bool
	cut      bool
	cleanups []func()
	sources  uint64 // handed out
	kernel   *KernelLog

	tolerated, toleratedEnd string // of dumps in the kernel's log
	network                 *Network
}

// Context ends with the scenario's timeout.
func (t *T) Context() context.Context { return t.ctx }

// Logf says what happens.
func (t *T) Logf(format string, args ...any) { t.send(Logged, fmt.Sprintf(format, args...)) }

// Figure prints a result: it is shown also when all is well.
func (t *T) Figure(format string, args ...any) { t.send(Figure, fmt.Sprintf(format, args...)) }

// Failed tells whether a failure was noted.
func (t *T) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

// Errorf notes a failure and goes on.
func (t *T) Errorf(format string, args ...any) {
	t.mu.Lock()
	t.failed = true
	t.mu.Unlock()
	t.Logf("FAIL: "+format, args...)
}

// Fatalf notes a failure and ends the scenario.
func (t *T) Fatalf(format string, args ...any) {
	t.Errorf(format, args...)
	runtime.Goexit()
}

// Check ends the scenario if err is not nil; what names the thing that failed.
func (t *T) Check(err error, what string, args ...any) {
	if err != nil {
		t.Fatalf("%s: %v", fmt.Sprintf(what, args...), err)
	}
}

// Refused ends the scenario unless err is there and its text has each of the words.
func (t *T) Refused(err error, what string, words ...string) {
	if err == nil {
		t.Fatalf("%s: no error", what)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("%s: %q does not say %q", what, err, w)
		}
	}
	t.Logf("%s: refused: %v", what, err)
}

// Random returns a source of its own for each call.
func (t *T) Random() *rand.Rand {
	t.sources++
	return rand.New(rand.NewPCG(t.Seed, t.sources))
}

// Cleanup has f called when the scenario is over, last first.
func (t *T) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

// Eventually waits until ok says so, and fails the scenario when it takes longer than limit.
func (t *T) Eventually(limit time.Duration, what string, ok func() bool) time.Duration {
	began := time.Now()
	for !ok() {
		if time.Since(began) > limit {
			t.Fatalf("%s: not within %v", what, limit)
		}
		t.Pause(20 * time.Millisecond)
	}
	return time.Since(began)
}

// Pause lets time pass; the scenario ends if its own is over.
func (t *T) Pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.ctx.Done():
		t.Fatalf("the scenario's time is over: %v", context.Cause(t.ctx))
	}
}

// Sh runs a program and returns what it printed; a failure ends the scenario.
func (t *T) Sh(name string, args ...string) string {
	out, err := t.Try(name, args...)
	t.Check(err, "%s", strings.Join(append([]string{name}, args...), " "))
	return out
}

// Try runs a program and returns what it printed.
func (t *T) Try(name string, args ...string) (string, error) {
	return run(t.ctx, name, args...)
}

func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var out, said strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()+out.String()))
	}
	return out.String(), nil
}

// PowerCut ends the boot as a power failure does: nothing is synced, stopped or unmounted. The scenario starts again
// with the next Boot.
func (t *T) PowerCut() {
	t.mu.Lock()
	t.cut = true
	t.mu.Unlock()
	runtime.Goexit()
}

// Save keeps a value for the next boot, synced.
func (t *T) Save(name string, v any) {
	b, err := json.Marshal(v)
	t.Check(err, "saving %s", name)
	f, err := os.Create(filepath.Join(t.Dir, name+".json"))
	t.Check(err, "saving %s", name)
	_, err = f.Write(b)
	t.Check(errors.Join(err, f.Sync(), f.Close()), "saving %s", name)
	d, err := os.Open(t.Dir)
	t.Check(err, "saving %s", name)
	t.Check(errors.Join(d.Sync(), d.Close()), "saving %s", name)
}

// Restore reads a value that an earlier boot saved.
func (t *T) Restore(name string, v any) {
	b, err := os.ReadFile(filepath.Join(t.Dir, name+".json"))
	t.Check(err, "restoring %s", name)
	t.Check(json.Unmarshal(b, v), "restoring %s", name)
}

func (t *T) send(kind EventKind, text string) {
	t.events.Send(Event{Kind: kind, Scenario: t.Scenario.Name, Text: text})
}

// Plan is what the host asks a guest to do.
type Plan struct {
	Boot int // of the first scenario
	Long bool
	Seed uint64
	Data string // directory on the persistent disk
}

// RunScenario runs one scenario and says how it ended.
func RunScenario(s Scenario, p Plan, events *Events) EventKind {
	ctx, cancel := context.WithTimeoutCause(context.Background(), s.Limit(), fmt.Errorf("it took longer than %v", s.Limit()))
	defer cancel()
	t := &T{Scenario: s, Boot: p.Boot, Long: p.Long, Seed: p.Seed, Dir: filepath.Join(p.Data, strings.ReplaceAll(s.Name, "/", "_")), ctx: ctx, events: events}
	t.send(Began, "")
	done := make(chan struct{})
	go func() { // Goexit ends a scenario early
		defer close(done)
		t.body()
	}()
	select {
	case <-done:
	case <-time.After(s.Limit() + 2*cleanupTime):
		t.Errorf("the scenario does not end:\n%s", stacks())
		t.blocked()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.failed:
		return Failed
	case t.cut:
		return Cut
	default:
		return Passed
	}
}

// cleanupTime is what a scenario may take to end once its time is over.
const cleanupTime = time.Minute

func (t *T) body() {
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	if err := os.MkdirAll(t.Dir, 0o700); err != nil {
		t.Errorf("%v", err)
		return
	}
	t.kernel = OpenKernelLog()
	before := TakeResidue()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("panic: %v\n%s", r, debug.Stack())
			}
		}()
		t.Scenario.Run(t)
	}()
	<-ended
	if t.cut && !t.Failed() {
		return
	}
	if t.Failed() {
		t.blocked()
	}
	t.cleanup()
	t.checkKernel()
	if !t.Failed() {
		t.checkResidue(before)
	}
	if t.Failed() {
		t.Logf("the seed was %d", t.Seed)
		t.tellKernel()
	} else if err := os.RemoveAll(t.Dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// cleanup runs each function in a goroutine of its own, so that one that fails keeps none from running.
func (t *T) cleanup() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	t.ctx = ctx
	for i := len(t.cleanups) - 1; i >= 0; i-- {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			t.cleanups[i]()
		}()
		<-ended
	}
	t.cleanups = nil
}

func stacks() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}

// Rounds is how often a scenario repeats something: n times, or long with LONG=1.
func (t *T) Rounds(n, long int) int {
	if t.Long {
		return long
	}
	return n
}

// blocked tells where the kernel holds the tasks that cannot be killed.
func (t *T) blocked() {
	for _, task := range blockedTasks() {
		t.Logf("blocked: %s", task)
	}
	t.unanswered()
}

func blockedTasks() []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, dir := range dirs {
		status, err := os.ReadFile(dir + "/status")
		if err != nil || !strings.Contains(string(status), "State:\tD") {
			continue
		}
		name, _ := os.ReadFile(dir + "/comm")
		stack, _ := os.ReadFile(dir + "/stack")
		var calls []string
		for s := bufio.NewScanner(strings.NewReader(string(stack))); s.Scan() && len(calls) < 12; {
			call := strings.TrimPrefix(s.Text(), "[<0>] ")
			call, _, _ = strings.Cut(call, "+")
			calls = append(calls, call)
		}
		found = append(found, fmt.Sprintf("%s %s: %s", filepath.Base(dir), strings.TrimSpace(string(name)), strings.Join(calls, " < ")))
	}
	return found
}

// Uptime is the guest's time since its boot.
func Uptime() time.Duration {
	b, _ := os.ReadFile("/proc/uptime")
	var seconds float64
	_, _ = fmt.Sscan(string(b), &seconds)
	return time.Duration(seconds * float64(time.Second))
}
