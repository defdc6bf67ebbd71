package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a program that the scenario started. Its output is kept for the report of a failure.
type Process struct {
	t    *T
	name string
	cmd  *exec.Cmd
	log  string

	mu     sync.Mutex
	exited chan struct{}
	err    error
}

// Spec says what to start.
type Spec struct {
	Name string   // in messages and of the log
	NS   string   // network namespace; "": the guest's own
	Args []string // the program first
	Env  []string // added to the environment
}

// Start runs a program; the scenario's end kills it.
func (t *T) Start(s Spec) *Process {
	p := t.launch(s)
	t.Cleanup(p.end)
	return p
}

// launch is Start for those who end the process themselves.
func (t *T) launch(s Spec) *Process {
	args := s.Args
	if s.NS != "" {
		args = append([]string{"nsenter", "--net=/run/netns/" + s.NS, "--"}, args...)
	}
	p := &Process{t: t, name: s.Name, log: filepath.Join("/tmp", strings.ReplaceAll(t.Scenario.Name, "/", "_")+"."+s.Name+".log")}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	t.Check(err, "the log of %s", s.Name)
	defer func() { _ = log.Close() }()
	p.cmd = exec.Command(args[0], args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), s.Env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	t.Check(p.cmd.Start(), "starting %s", s.Name)
	p.exited = make(chan struct{})
	go func() {
		err := p.cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(p.exited)
	}()
	return p
}

// end kills the process if it is there, and tells its log if the scenario failed.
func (p *Process) end() {
	if p == nil {
		return
	}
	p.Kill()
	if p.t.Failed() {
		for _, l := range tail(p.Log(), 40) {
			p.t.Logf("%s: %s", p.name, l)
		}
	}
	_ = os.Remove(p.log)
}

// PID is the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Running tells whether it has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// Signal sends a signal; one that has ended gets none.
func (p *Process) Signal(s syscall.Signal) {
	if p.Running() {
		_ = p.cmd.Process.Signal(s)
	}
}

// Kill ends the process by SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	select {
	case <-p.exited:
	case <-time.After(20 * time.Second):
		p.t.Errorf("%s does not end on SIGKILL: %v", p.name, blockedTasks())
	}
}

// Freeze stops the process as SIGSTOP does; Thaw lets it go on.
func (p *Process) Freeze() { p.Signal(syscall.SIGSTOP) }

// Thaw undoes Freeze.
func (p *Process) Thaw() { p.Signal(syscall.SIGCONT) }

// Terminate asks the process to end and waits; an exit code other than 0, or none within the limit, fails the scenario.
func (p *Process) Terminate(limit time.Duration) time.Duration {
	began := time.Now()
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(limit):
		p.t.Fatalf("%s did not end within %v of SIGTERM", p.name, limit)
	}
	if err := p.Err(); err != nil {
		p.t.Fatalf("%s ended with %v on SIGTERM", p.name, err)
	}
	return time.Since(began)
}

// Err is how the process ended.
func (p *Process) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Log is its output so far, that of earlier processes of the name included.
func (p *Process) Log() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func tail(text string, n int) []string {
	l := lines(text)
	return l[max(0, len(l)-n):]
}

// RSS is a process's resident memory in bytes.
func RSS(pid int) int64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	var kib int64
	for _, l := range lines(string(b)) {
		if _, err := fmt.Sscanf(l, "VmRSS: %d kB", &kib); err == nil {
			break
		}
	}
	return kib << 10
}
