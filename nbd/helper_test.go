package nbd_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/nbdtest"
)

func init() { helpers["server"] = helperServer }

// helperServer serves volume "v" on the UNIX socket $NBD_TEST_SOCKET until its standard input ends, within
// $NBD_TEST_BYTES.
func helperServer() {
	bytes, _ := strconv.ParseInt(os.Getenv("NBD_TEST_BYTES"), 10, 64)
	s, err := nbd.New(nbd.Config{
		Exports:     &nbdtest.Exports{Volumes: map[string]*nbdtest.Memory{"v": nbdtest.NewMemory(1 << 30)}},
		ServerBytes: bytes, ConnectionBytes: bytes,
	})
	if err != nil {
		panic(err)
	}
	ln, err := net.Listen("unix", os.Getenv("NBD_TEST_SOCKET"))
	if err != nil {
		panic(err)
	}
	done := make(chan error)
	go func() { done <- s.Serve(context.Background(), ln) }()
	_, _ = os.Stdout.WriteString("ready\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		panic(err)
	}
	<-done
}

// startHelper starts this test binary as a helper and waits until it says it is ready. stop ends it.
func startHelper(t *testing.T, name string, wrap []string, env ...string) (cmd *exec.Cmd, stop func()) {
	t.Helper()
	args := append(wrap, os.Args[0])
	cmd = exec.Command(args[0], args[1:]...)
	cmd.Env = append(append(os.Environ(), "NBD_TEST_HELPER="+name), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the helper said %q, %v", line, err)
	}
	return cmd, func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("helper %s: %v", name, err)
		}
	}
}
