package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gabion-storage/gabion/server/daemon"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gabion": main})
}

// TestScript runs testdata/script/*.txt against real server processes. Beside
// testscript's own, the commands are:
//
//	fails CODE gabion ARG...     the command ends with exactly this exit code
//	server NAME ARG...           start a server on the script's ports and wait until it is ready; its log is NAME.log
//	refused CODE ARG...          a server on the same ports that must not start
//	elsewhere CODE ARG...        a server on other ports that must not start
//	sigterm NAME                 the server ends soon and with exit code 0
//	sigkill, sigstop, sigcont NAME
//	started PATTERN              wait until a file of this name is there
//	nosecret FILE OTHER          no token of the URIs in FILE is in OTHER
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Deadline:            time.Now().Add(2 * time.Minute), // a server that should have been refused would run for ever
		Setup: func(e *testscript.Env) error {
			s := &scripted{servers: map[string]*process{}}
			var err error
			if s.ports, err = daemon.FreePorts(10); err != nil {
				return err
			}
			e.Setenv("GABION_SERVER", fmt.Sprintf("127.0.0.1:%d", s.ports[0]))
			e.Setenv("GORACE", "atexit_sleep_ms=0") // the race detector would keep each process for a second
			e.Values[scriptKey{}] = s
			e.Defer(s.killAll)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"fails": fails, "server": startServer, "refused": refused, "elsewhere": elsewhere,
			"sigterm": sigterm, "sigkill": sigkill, "sigstop": signalled(syscall.SIGSTOP), "sigcont": signalled(syscall.SIGCONT),
			"started": started, "nosecret": noSecret,
		},
	})
}

// scripted is what one script has running.
type scripted struct {
	ports   []int // five for its servers, five for those elsewhere
	servers map[string]*process
}

type process struct {
	*exec.Cmd
	ended chan error // capacity 1
}

type scriptKey struct{}

func of(ts *testscript.TestScript) *scripted { return ts.Value(scriptKey{}).(*scripted) }

func (s *scripted) killAll() {
	for _, p := range s.servers {
		_ = p.Process.Kill()
		<-p.ended
	}
}

// take is a server that the script still has; a taken one is the caller's to wait for.
func (s *scripted) take(ts *testscript.TestScript, name string) *process {
	p := s.servers[name]
	if p == nil {
		ts.Fatalf("no server %s runs", name)
	}
	delete(s.servers, name)
	return p
}

func fails(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: fails CODE COMMAND ARG...")
	}
	err := ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || fmt.Sprint(exit.ExitCode()) != args[0] {
		ts.Fatalf("got %v, want exit code %s", err, args[0])
	}
}

func refused(ts *testscript.TestScript, neg bool, args []string) {
	fails(ts, neg, append([]string{args[0], "gabion", "server"}, append(args[1:], portFlags(of(ts).ports[:5])...)...))
}

func elsewhere(ts *testscript.TestScript, neg bool, args []string) {
	fails(ts, neg, append([]string{args[0], "gabion", "server"}, append(args[1:], portFlags(of(ts).ports[5:])...)...))
}

func startServer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: server NAME ARG...")
	}
	s, name := of(ts), args[0]
	log, err := os.OpenFile(ts.MkAbs(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	ts.Check(err)
	defer log.Close()
	self, err := os.Executable()
	ts.Check(err)
	cmd := exec.Command(self)
	cmd.Args = append([]string{"gabion", "server", "--node", name, "--rack", "r1"}, append(args[1:], portFlags(s.ports[:5])...)...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	cmd.Dir, cmd.Stdout, cmd.Stderr = ts.MkAbs("."), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	ts.Check(cmd.Start())
	p := &process{cmd, make(chan error, 1)}
	go func() { p.ended <- cmd.Wait() }()
	s.servers[name] = p
	url := fmt.Sprintf("http://127.0.0.1:%d/readyz", s.ports[4])
	for begin := time.Now(); time.Since(begin) < 20*time.Second; time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-p.ended:
			p.ended <- err
			ts.Fatalf("server %s ended: %v\n%s", name, err, ts.ReadFile(name+".log"))
		default:
		}
		r, err := http.Get(url)
		if err != nil {
			continue
		}
		r.Body.Close()
		if r.StatusCode == http.StatusOK {
			http.DefaultClient.CloseIdleConnections()
			return
		}
	}
	ts.Fatalf("server %s is not ready:\n%s", name, ts.ReadFile(name+".log"))
}

func sigterm(ts *testscript.TestScript, _ bool, args []string) {
	p := of(ts).take(ts, args[0])
	ts.Check(p.Process.Signal(syscall.SIGTERM))
	begin := time.Now()
	ts.Check(<-p.ended)
	if took := time.Since(begin); took > 5*time.Second {
		ts.Fatalf("an idle server took %v to stop", took)
	}
}

func sigkill(ts *testscript.TestScript, _ bool, args []string) {
	p := of(ts).take(ts, args[0])
	ts.Check(p.Process.Kill())
	<-p.ended
}

func signalled(sig syscall.Signal) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, _ bool, args []string) {
		ts.Check(of(ts).servers[args[0]].Process.Signal(sig))
	}
}

func started(ts *testscript.TestScript, _ bool, args []string) {
	for begin := time.Now(); time.Since(begin) < 20*time.Second; time.Sleep(5 * time.Millisecond) {
		if found, err := filepath.Glob(ts.MkAbs(args[0])); err == nil && len(found) > 0 {
			return
		}
	}
	ts.Fatalf("there is no %s", args[0])
}

var tokenOf = regexp.MustCompile(`/[-0-9a-f]{36}/([-_A-Za-z0-9]{43})`)

// noSecret is B166 for one file.
func noSecret(ts *testscript.TestScript, _ bool, args []string) {
	found := tokenOf.FindAllStringSubmatch(ts.ReadFile(args[0]), -1)
	if len(found) == 0 {
		ts.Fatalf("%s has no token in it", args[0])
	}
	for _, m := range found {
		if strings.Contains(ts.ReadFile(args[1]), m[1]) {
			ts.Fatalf("%s has a token in it", args[1])
		}
	}
}
