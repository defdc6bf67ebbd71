// Package interop has foreign NBD clients use a real server: they are the
// judges of what Gabion advertises. A client that is not installed skips its
// tests, and fails them where CI=true.
package interop

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// server is the one that all tests share, each with volumes of its own.
var server *cluster.Server

func TestMain(m *testing.M) { os.Exit(withServer(m)) }

func withServer(m *testing.M) (code int) {
	dir, err := os.MkdirTemp("", "gabion-interop-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary, err := cluster.Binary(dir)
	if err == nil {
		server, err = cluster.Start(context.Background(), cluster.Options{Binary: binary, Dir: dir})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	return m.Run()
}

func tcpAddress() string { return fmt.Sprintf("127.0.0.1:%d", server.Ports.NBD) }

// need names the foreign programs that a test runs.
func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("%s is not installed: run make setup", p)
			}
			t.Skipf("%s is not installed: run make setup", p)
		}
	}
}

// volume is one test's volume, attached, gone when the test ends.
type volume struct {
	cluster.URIs
	name string
}

func newVolume(t *testing.T, size string, flags ...string) volume {
	t.Helper()
	v := volume{name: strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-")) + "-" + size}
	gabion(t, append([]string{"volume", "create", v.name, "--size", size, "--replicas", "1"}, flags...)...)
	t.Cleanup(func() { gabion(t, "volume", "delete", v.name) })
	v.attach(t)
	t.Cleanup(func() { gabion(t, "detach", v.name) })
	return v
}

func (v *volume) attach(t *testing.T, flags ...string) {
	t.Helper()
	var err error
	if v.URIs, err = server.Attach(t.Context(), v.name, flags...); err != nil {
		t.Fatal(err)
	}
}

// image is the volume's file on the server's disk.
func (v volume) image() string {
	return filepath.Join(server.Disks[0], "volumes", v.VolumeID(), "head.img")
}

func gabion(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // t.Context has ended when cleanups run
	defer cancel()
	out, err := server.CLI(ctx, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// run runs a foreign program, which must succeed within a minute, and returns
// its standard output. A machine so busy that the server was not run for a
// second makes it close its connections, which these clients do not forgive:
// then, and only then, the program gets another try.
func run(t *testing.T, program string, args ...string) string {
	t.Helper()
	for {
		before := stalls(t)
		out, diagnostics, err := try(t, program, args...)
		if err == nil {
			return out
		}
		if stalls(t) == before {
			t.Fatalf("%s %s: %v\n%s%s", program, strings.Join(args, " "), err, out, diagnostics)
		}
	}
}

// stalls is how often the server was held up for so long.
func stalls(t *testing.T) string {
	t.Helper()
	_, metrics, err := server.Get(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(metrics, "\ngabion_nbd_stalls_total ")
	n, _, _ := strings.Cut(rest, "\n")
	return n
}

func try(t *testing.T, program string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = t.TempDir()
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out, diagnostics bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnostics
	err = cmd.Run()
	return out.String(), diagnostics.String(), err
}

// sparseFile makes a file with data in a few places and holes between them: at
// the start, across odd boundaries, and in the last block.
func sparseFile(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sparse.raw")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for i, piece := range []struct{ off, length int64 }{
		{0, 4096}, {1<<20 - 512, 1024}, {size / 2, 3 << 20}, {size/2 + 8<<20, 512}, {size - 4096, 4096},
	} {
		if _, err := f.WriteAt(pattern(byte(i), piece.length), piece.off); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// pattern is n bytes without a run of zeros, different for each seed.
func pattern(seed byte, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>8) ^ seed | 1
	}
	return b
}

// allocated is how many bytes of a file are real.
func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func sameFile(t *testing.T, a, b string) {
	t.Helper()
	run(t, "cmp", a, b)
}
