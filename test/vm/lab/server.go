package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Gabion is the binary under test.
const Gabion = "/gabion/bin/gabion"

// patience is how long a process may take to become ready under emulation.
const patience = 60 * time.Second

// startPoll is how often one that starts is asked: under emulation asking takes from it what it needs to start.
const startPoll = 100 * time.Millisecond

// Server is a `gabion server` in the storage namespace, or the place where one was. It starts again on the same data.
type Server struct {
	t     *T
	Addr  string   // where it listens: AddrA or AddrB
	Flags []string // added to the command line at the next start
	Disk  string   // directory of its disk
	dir   string
	proc  *Process
}

// Server starts a fresh server at AddrA and waits until it is ready.
func (t *T) Server(flags ...string) *Server {
	s := t.NewServer(flags...)
	s.Start()
	return s
}

// NewServer lays out a server without starting it. Its data lies in the scenario's directory, so that after a power cut
// the same call finds it again.
func (t *T) NewServer(flags ...string) *Server {
	t.Net()
	s := &Server{t: t, Addr: AddrA, Flags: flags, dir: filepath.Join(t.Dir, "server")}
	s.Disk = filepath.Join(s.dir, "disk")
	for _, d := range []string{filepath.Join(s.dir, "data"), s.Disk} {
		t.Check(os.MkdirAll(d, 0o700), "laying out the server")
	}
	t.Cleanup(func() { s.proc.end() })
	return s
}

// Args is the server's command line.
func (s *Server) Args() []string {
	return append([]string{Gabion, "server", "--node", "s1", "--rack", "r1", "--bootstrap", "--insecure",
		"--data", filepath.Join(s.dir, "data"), "--disk", s.Disk, "--listen", s.Addr, "--fault-injection",
		"--log-format", "text"}, s.Flags...)
}

// Start runs the process and waits until it is ready to serve.
func (s *Server) Start() {
	s.Launch()
	s.WaitReady()
}

// Launch runs the process and does not wait.
func (s *Server) Launch() {
	s.proc = s.t.launch(Spec{Name: "server", NS: storageNS, Args: s.Args()})
}

// WaitReady waits until the server says that it is ready.
func (s *Server) WaitReady() {
	began := time.Now()
	for {
		if status, _, err := s.HTTP(http.MethodGet, "/readyz", ""); err == nil && status == http.StatusOK {
			return
		}
		if !s.proc.Running() {
			s.t.Fatalf("the server ended: %v", s.proc.Err())
		}
		if time.Since(began) > patience {
			s.t.Fatalf("the server is not ready within %v", patience)
		}
		s.t.Pause(startPoll)
	}
}

// Process is the present process, for Kill, Freeze, Thaw and Terminate.
func (s *Server) Process() *Process { return s.proc }

// Kill ends the process by SIGKILL.
func (s *Server) Kill() { s.proc.Kill() }

// Restart kills the process if it runs and starts it again at addr.
func (s *Server) Restart(addr string) {
	s.proc.Kill()
	s.Addr = addr
	s.Start()
}

// HTTP asks the server's HTTP port, past whatever is dropped on the wire.
func (s *Server) HTTP(method, path, body string) (int, string, error) {
	ctx, cancel := context.WithTimeout(s.t.ctx, 10*time.Second)
	defer cancel()
	return ask(ctx, method, "http://"+s.Addr+":7480"+path, body)
}

// ask makes an HTTP request from the storage namespace.
func ask(ctx context.Context, method, url, body string) (int, string, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	r.Close = true
	client := http.Client{Transport: &http.Transport{DialContext: dialIn(storageNS), DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = answer.Body.Close() }()
	b, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(b), err
}

// Metadata is the address of the metadata service.
func (s *Server) Metadata() string { return s.Addr + ":7400" }

// CLI runs `gabion args…` beside the server, past whatever is dropped on the wire; a failure ends the scenario.
func (s *Server) CLI(args ...string) string {
	out, err := s.TryCLI(args...)
	s.t.Check(err, "gabion %s", strings.Join(args, " "))
	return out
}

// TryCLI is CLI for commands that may fail.
func (s *Server) TryCLI(args ...string) (string, error) {
	return run(s.t.ctx, "nsenter", append([]string{"--net=/run/netns/" + storageNS, "--", Gabion, "--server", s.Metadata()}, args...)...)
}

// Volume makes a volume of one copy.
func (s *Server) Volume(name, size string, flags ...string) {
	s.CLI(append([]string{"volume", "create", name, "--size", size, "--replicas", "1"}, flags...)...)
}

// Attach gives a node the right to connect and returns the export's URI.
func (s *Server) Attach(name, node string) string {
	for _, word := range strings.Fields(s.CLI("attach", name, "--node", node)) {
		if strings.HasPrefix(word, "nbd://") {
			return word
		}
	}
	s.t.Fatalf("gabion attach %s printed no nbd:// URI", name)
	return ""
}

// Detach takes the right to connect from a node, as an operator does at another machine: its devices stay.
func (s *Server) Detach(name, node string) {
	s.CLI("detach", name, "--node", node, "--state", elsewhere(s.t))
}

// elsewhere is the state directory of a machine that is none of the consumers.
func elsewhere(t *T) string {
	dir := filepath.Join(t.Dir, "elsewhere.state")
	t.Check(os.MkdirAll(dir, 0o700), "the state of another machine")
	t.Check(os.WriteFile(filepath.Join(dir, "node"), []byte("elsewhere\n"), 0o600), "the state of another machine")
	return dir
}

// Used is what the server's disk holds, in bytes.
func (s *Server) Used() int64 {
	var n int64
	err := filepath.WalkDir(s.Disk, func(path string, d os.DirEntry, err error) error {
		var st syscall.Stat_t
		if err == nil && d.Type().IsRegular() {
			if err = syscall.Stat(path, &st); err == nil {
				n += st.Blocks * 512
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // it is being deleted
			return nil
		}
		return err
	})
	s.t.Check(err, "the server's disk")
	return n
}

// dialIn dials from a network namespace.
func dialIn(ns string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		var c net.Conn
		err := inNamespace(ns, func() (err error) {
			var d net.Dialer
			c, err = d.DialContext(ctx, network, addr)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("from %s: %w", ns, err)
		}
		return c, nil
	}
}
