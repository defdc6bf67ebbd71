package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/test/cluster"
)

// gabionPath is the gabion under test.
var gabionPath string

// soak asks for the versions of the tests that take hours or thousands of rounds.
var soak = os.Getenv("GABION_SOAK") != ""

func TestMain(m *testing.M) { os.Exit(withBinary(m)) }

func withBinary(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gabion-cluster-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if gabionPath, err = cluster.Binary(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// scaled is how many rounds a test does: few in `make test`, many in `make soak`.
func scaled(few, many int) int {
	if soak {
		return many
	}
	return few
}

// seeded returns a random source; GABION_SEED repeats a run.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("GABION_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("GABION_SEED: %v", err)
		}
	}
	t.Logf("to repeat: GABION_SEED=%d go test ./test/cluster -run '^%s$'", seed, t.Name())
	return rand.New(rand.NewPCG(seed, 0))
}

// tempDir is short: the path of a UNIX socket has at most 107 bytes.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gabion-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// layout prepares a server of this test that is not started yet.
func layout(t *testing.T, o cluster.Options) *cluster.Server {
	t.Helper()
	if o.Dir == "" {
		o.Dir = tempDir(t)
	}
	o.Binary = gabionPath
	s, err := cluster.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			log := s.Log()
			t.Logf("log of the server in %s:\n%s", s.Dir, log[max(0, len(log)-8000):])
		}
	})
	return s
}

// start runs a server of this test.
func start(t *testing.T, flags ...string) *cluster.Server {
	t.Helper()
	s := layout(t, cluster.Options{Flags: flags})
	ready(t, s)
	return s
}

// ready starts a laid out or ended server and returns how long it took to be ready.
func ready(t *testing.T, s *cluster.Server) time.Duration {
	t.Helper()
	began := time.Now()
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return time.Since(began)
}

// refused runs a server that must not start, and returns what it said.
func refused(t *testing.T, s *cluster.Server) string {
	t.Helper()
	before := len(s.Log())
	if err := s.Launch(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	code, err := s.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if said := s.Log()[before:]; code == 1 || code == 2 {
		return said
	}
	t.Fatalf("the server ended with %d, want a refusal: %s", code, s.Log()[before:])
	return ""
}

func cli(t *testing.T, s *cluster.Server, args ...string) string {
	t.Helper()
	out, err := s.CLI(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// cliRefuses runs a command that must fail with one of the codes and returns what it said.
func cliRefuses(t *testing.T, s *cluster.Server, code int, args ...string) string {
	t.Helper()
	out, err := s.CLI(t.Context(), args...)
	if got := cluster.ExitCode(err); got != code {
		t.Fatalf("gabion %s: exit code %d, want %d: %v %s", strings.Join(args, " "), got, code, err, out)
	}
	return err.Error()
}

// mentions checks that a refusal names the thing and the remedy.
func mentions(t *testing.T, said string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Errorf("it does not mention %q: %s", w, said)
		}
	}
}

func volume(t *testing.T, s *cluster.Server, name, size string, flags ...string) cluster.URIs {
	t.Helper()
	u, err := s.Volume(t.Context(), name, size, flags...)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// shown is what `volume show -o json` says, as far as tests ask.
type shown struct {
	Size       int64  `json:"size"`
	CacheEpoch uint64 `json:"cache_epoch"`
	Primary    struct {
		Generation uint64 `json:"generation"`
	} `json:"primary"`
	Attachments []struct {
		Node string `json:"node"`
	} `json:"attachments"`
}

func show(t *testing.T, s *cluster.Server, name string) (v shown) {
	t.Helper()
	if err := json.Unmarshal([]byte(cli(t, s, "volume", "show", name, "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// metric is the sum of a metric's series.
func metric(t *testing.T, s *cluster.Server, name string) (sum float64) {
	t.Helper()
	status, text, err := s.Get(t.Context(), "/metrics")
	if err != nil || status != 200 {
		t.Fatalf("/metrics: %d %v", status, err)
	}
	for line := range strings.Lines(text) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if family, _, _ := strings.Cut(series, "{"); ok && family == name {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatalf("/metrics: %s: %v", line, err)
			}
			sum += v
		}
	}
	return sum
}

// api is the metadata service of a server, for what would be too many processes through the CLI.
func api(t *testing.T, s *cluster.Server) metapb.MetadataClient {
	t.Helper()
	c, err := grpc.NewClient(s.MetadataAddress(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return metapb.NewMetadataClient(c)
}

// eventually polls until ok is true: for what another process does in its own time.
func eventually(t *testing.T, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for !ok() {
		if time.Since(began) > within {
			t.Fatalf("not within %v: %s", within, what)
		}
		<-poll.C
	}
	return time.Since(began)
}

// used is how many bytes the files below dir occupy.
func used(t *testing.T, dir string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // deleted meanwhile
			}
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err == nil {
			n += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// mount makes a file system of its own for a disk, on a loop device.
func mount(t *testing.T, fstype string, size int64) string {
	t.Helper()
	needRoot(t)
	need(t, "mkfs."+fstype, "mount", "umount")
	dir := tempDir(t)
	image, point := filepath.Join(dir, "image"), filepath.Join(dir, "disk")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close(), os.Mkdir(point, 0o700)); err != nil {
		t.Fatal(err)
	}
	system(t, "mkfs."+fstype, "-q", image)
	system(t, "mount", "-o", "loop", image, point)
	t.Cleanup(func() { unmount(point) })
	return point
}

// remount is what an operator does after a controller's hiccup.
func remount(t *testing.T, point string) {
	t.Helper()
	system(t, "umount", point)
	system(t, "mount", "-o", "loop", filepath.Join(filepath.Dir(point), "image"), point)
}

func unmount(point string) {
	// By name, to the end of the stack of mounts; an error means that none is left.
	for exec.Command("umount", point).Run() == nil {
	}
}

func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			skip(t, p+" is not installed: run make setup")
		}
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "only root can mount")
	}
}

// skip skips a test, and fails it where CI=true: nothing is silently not tested there.
func skip(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

func system(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}
