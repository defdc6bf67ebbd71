package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/server/daemon"
)

// patience is how long a server may take for anything a test waits for: far
// longer than it needs, because the machine may be busy.
const patience = 60 * time.Second

// Options say what server to start. Only Binary and Dir are needed.
type Options struct {
	Binary string
	Dir    string   // holds data, disks, the NBD socket and the log
	Node   string   // default: n1
	Rack   string   // default: r1
	Join   string   // servers to join; default: it founds a cluster
	Disks  []string // nil: one, Dir/disk; made if absent
	Flags  []string // added to the command line
	Env    []string // added to the environment
	// Ports of another Server to take over, for a second server on the same node.
	Ports *Ports
}

// Ports are a server's, all on 127.0.0.1.
type Ports struct{ Metadata, Raft, Replica, NBD, HTTP int }

// Server is one `gabion server` process, or the place where one was.
type Server struct {
	Options
	Ports  Ports
	Socket string // of NBD

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	err    error         // of cmd, once exited
}

// Start lays out a fresh server and waits until it is ready. When a port that
// was free is taken meanwhile, it tries others.
func Start(ctx context.Context, o Options) (*Server, error) {
	var err error
	for range 5 {
		var s *Server
		if s, err = New(o); err != nil {
			return nil, err
		}
		if err = s.Start(ctx); err == nil {
			return s, nil
		}
		s.Kill()
		if o.Ports != nil || !strings.Contains(s.Log(), "address already in use") {
			break
		}
	}
	return nil, err
}

// New lays out a server without starting it.
func New(o Options) (*Server, error) {
	o.Node, o.Rack = cmp.Or(o.Node, "n1"), cmp.Or(o.Rack, "r1")
	if o.Disks == nil {
		o.Disks = []string{filepath.Join(o.Dir, "disk")}
	}
	for _, dir := range append([]string{o.Dir, filepath.Join(o.Dir, "data")}, o.Disks...) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	s := &Server{Options: o, Socket: filepath.Join(o.Dir, "nbd.sock")}
	if o.Ports != nil {
		s.Ports = *o.Ports
		return s, nil
	}
	ports, err := daemon.FreePorts(5)
	if err != nil {
		return nil, err
	}
	s.Ports = Ports{Metadata: ports[0], Raft: ports[1], Replica: ports[2], NBD: ports[3], HTTP: ports[4]}
	return s, nil
}

// Args is the server's command line.
func (s *Server) Args() []string {
	args := []string{"server", "--node", s.Node, "--rack", s.Rack, "--data", filepath.Join(s.Dir, "data"),
		"--listen", "127.0.0.1", "--nbd-socket", s.Socket}
	if len(s.Disks) > 0 {
		args = append(args, "--disk", strings.Join(s.Disks, ","))
	}
	if s.Join != "" {
		args = append(args, "--join", s.Join)
	} else {
		args = append(args, "--bootstrap")
	}
	for _, p := range []struct {
		flag string
		port int
	}{{"metadata", s.Ports.Metadata}, {"raft", s.Ports.Raft}, {"replica", s.Ports.Replica}, {"nbd", s.Ports.NBD}, {"http", s.Ports.HTTP}} {
		args = append(args, fmt.Sprintf("--%s-port=%d", p.flag, p.port))
	}
	return append(args, s.Flags...)
}

// Start runs the process and waits until it is ready to serve.
func (s *Server) Start(ctx context.Context) error {
	if err := s.Launch(); err != nil {
		return err
	}
	return s.WaitReady(ctx)
}

// Launch runs the process and does not wait.
func (s *Server) Launch() error {
	log, err := os.OpenFile(s.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(s.Binary, s.Args()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), s.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing is left behind
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cmd, s.exited, s.err = cmd, exited, nil
	go func() {
		err := cmd.Wait()
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
		close(exited)
	}()
	return nil
}

// WaitReady returns when the server says so, or with the end of its log when it
// has exited or takes too long.
func (s *Server) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for {
		if status, _, err := s.Get(ctx, "/readyz"); err == nil && status == http.StatusOK {
			return nil
		}
		select {
		case <-poll.C:
		case <-s.Exited():
			return fmt.Errorf("the server exited (%v): %s", s.exitError(), s.logTail())
		case <-ctx.Done():
			return fmt.Errorf("the server is not ready: %w: %s", ctx.Err(), s.logTail())
		}
	}
}

// Get asks the server's HTTP port and returns status and body.
func (s *Server) Get(ctx context.Context, path string) (int, string, error) {
	return s.HTTP(ctx, http.MethodGet, path, "")
}

// HTTP sends one request to the server's HTTP port.
func (s *Server) HTTP(ctx context.Context, method, path, body string) (int, string, error) {
	url := fmt.Sprintf("http://127.0.0.1:%d%s", s.Ports.HTTP, path)
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	r.Close = true // each process of this server gets connections of its own
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = answer.Body.Close() }()
	b, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(b), err
}

// PID is the process's id, 0 if none was started.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}

// Exited is closed when the process has ended.
func (s *Server) Exited() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exited
}

func (s *Server) exitError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Signal sends sig to the process.
func (s *Server) Signal(sig os.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process.Signal(sig)
}

// Kill ends the process by SIGKILL and waits for its end. Harmless if it has ended.
func (s *Server) Kill() {
	if s.PID() == 0 {
		return
	}
	_ = s.Signal(syscall.SIGKILL)
	<-s.Exited()
}

// Stop ends the process by SIGTERM. An exit code other than 0, or none in time, is an error.
func (s *Server) Stop() error {
	if err := s.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-s.Exited():
	case <-time.After(patience):
		s.Kill()
		return fmt.Errorf("the server did not end on SIGTERM: %s", s.logTail())
	}
	if err := s.exitError(); err != nil {
		return fmt.Errorf("the server ended with %w: %s", err, s.logTail())
	}
	return nil
}

// Wait waits for the process to end by itself and returns its exit code.
func (s *Server) Wait(ctx context.Context) (int, error) {
	select {
	case <-s.Exited():
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("the server did not end: %w: %s", ctx.Err(), s.logTail())
	}
}

// LogPath is where the output of all the server's processes goes.
func (s *Server) LogPath() string { return filepath.Join(s.Dir, "server.log") }

// Log is the output so far.
func (s *Server) Log() string {
	b, err := os.ReadFile(s.LogPath())
	if err != nil && !errors.Is(err, os.ErrNotExist) { // it is made by the first start
		return err.Error()
	}
	return string(b)
}

func (s *Server) logTail() string {
	log := s.Log()
	return "log:\n" + log[max(0, len(log)-4000):]
}
