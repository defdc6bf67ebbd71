package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
)

// child is a server process that the tour starts, kills and starts again.
type child struct {
	dir   string
	ports []int // see portNames
	keep  bool  // outlives its parent
	cmd   *exec.Cmd
	ended chan error
}

func newChild(dir string, keep bool) (*child, error) {
	c := &child{dir: dir, keep: keep}
	var err error
	if c.ports, err = daemon.FreePorts(len(portNames)); err != nil {
		return nil, err
	}
	return c, os.MkdirAll(c.disk(), 0o700)
}

var portNames = [...]string{"metadata", "raft", "replica", "nbd", "http"}

// portFlags are the flags of a server for ports in the order of portNames.
func portFlags(ports []int) (flags []string) {
	for i, name := range portNames {
		flags = append(flags, fmt.Sprintf("--%s-port=%d", name, ports[i]))
	}
	return flags
}

func (c *child) disk() string     { return filepath.Join(c.dir, "disk") }
func (c *child) logFile() string  { return filepath.Join(c.dir, "server.log") }
func (c *child) metadata() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(c.ports[0])) }

func (c *child) args() []string {
	return append([]string{
		"server", "--node", "demo", "--rack", "demo", "--data", filepath.Join(c.dir, "data"), "--disk", c.disk(),
		"--bootstrap", "--default-replicas", "1", "--harden=false", "--nbd-socket", filepath.Join(c.dir, "nbd.sock"),
	}, portFlags(c.ports)...)
}

// start returns when the server is ready.
func (c *child) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(c.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(self, c.args()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the tour, which then ends its server in order
	if !c.keep {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL // nothing stays behind, whatever happens to the tour
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.cmd, c.ended = cmd, make(chan error, 1)
	ended := c.ended
	go func() { ended <- cmd.Wait() }()
	return c.waitReady(ctx)
}

func (c *child) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	url := fmt.Sprintf("http://127.0.0.1:%d/readyz", c.ports[4])
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if answer, err := http.DefaultClient.Do(r); err == nil {
			_ = answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case err := <-c.ended:
			c.ended <- err
			return fmt.Errorf("%w: the server ended (%v); the last of its log:\n%s", block.ErrUnavailable, err, c.logTail())
		case <-ctx.Done():
			return fmt.Errorf("%w: the server is not ready: %w; the last of its log:\n%s", block.ErrUnavailable, ctx.Err(), c.logTail())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (c *child) logTail() string {
	b, err := os.ReadFile(c.logFile())
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-5):], []byte("\n")))
}

// kill is kill -9.
func (c *child) kill() error {
	if c.cmd == nil {
		return nil
	}
	err := c.cmd.Process.Kill()
	<-c.ended
	c.cmd = nil
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// stop ends the server in order.
func (c *child) stop() error {
	if c.cmd == nil {
		return nil
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-c.ended:
		c.cmd = nil
		return err
	case <-time.After(15 * time.Second):
		return errors.Join(fmt.Errorf("%w: the server did not stop within 15s", block.ErrUnavailable), c.kill())
	}
}
