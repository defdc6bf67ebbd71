package daemon

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ballast is what a hardened process takes and gives back again and again, in bytes.
const ballast = 64 << 20

func init() {
	if os.Getenv("GABION_TEST_HARDEN") != "" {
		runtime.LockOSThread() // as in package main
	}
}

// TestMain lets the test binary be the process that is hardened.
func TestMain(m *testing.M) {
	if os.Getenv("GABION_TEST_HARDEN") == "" {
		os.Exit(m.Run())
	}
	fmt.Println("pid", os.Getpid())
	for _, err := range Harden() {
		fmt.Println("missing", err)
	}
	var death int32
	_ = unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&death)), 0, 0, 0)
	fmt.Println("marked", os.Getenv(hardened) != "", "death", death, "arguments", os.Args[1:])
	for range 20 { // threads
		go func() { _, _ = syscall.Select(0, nil, nil, nil, &syscall.Timeval{Sec: 10}) }()
	}
	address := comeAndGo()
	debug.FreeOSMemory()
	fmt.Println("kept", residentPages(address))
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is looked at
}

// comeAndGo returns where ballast bytes were written that nobody uses any more.
func comeAndGo() uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(bytes.Repeat([]byte{1}, ballast))))
}

// residentPages counts the ballast's pages that are in memory. The size of the
// whole process would not tell: the race detector keeps a shadow of what is gone.
func residentPages(address uintptr) (n int) {
	pages := make([]byte, ballast/os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, address, ballast, uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		return len(pages)
	}
	for _, page := range pages {
		n += int(page & 1)
	}
	return n
}

// harden starts a process that hardens itself, and returns what it said and a look at it.
func harden(t *testing.T) (said string, proc string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-an-argument", "another one")
	cmd.Env = append(os.Environ(), "GABION_TEST_HARDEN=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // Pdeathsig is about the thread
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	for lines := bufio.NewScanner(stdout); lines.Scan() && lines.Text() != "ready"; {
		said += lines.Text() + "\n"
	}
	return said, fmt.Sprintf("/proc/%d", cmd.Process.Pid)
}

// The parts of Harden, each as far as this host lets it: what is not said to be missing is there.
func TestHarden(t *testing.T) {
	said, proc := harden(t)
	has := func(part string) bool { return !strings.Contains(said, part) }
	if !strings.Contains(said, "marked false death "+strconv.Itoa(int(syscall.SIGKILL))+" arguments [-an-argument another one]") {
		t.Errorf("it went on as another: %s", said)
	}
	for _, line := range strings.Split(said, "\n") {
		if strings.HasPrefix(line, "missing") && !strings.Contains(line, "run it with CAP_") {
			t.Errorf("%q names no remedy", line)
		}
	}
	flusher := has("write-back")
	if starts := strings.Count(said, "pid "); flusher != (starts == 2) || starts > 2 {
		t.Errorf("%d starts, all threads flush: %t", starts, flusher)
	}
	stats, err := filepath.Glob(proc + "/task/*/stat")
	if err != nil || len(stats) < 20 {
		t.Fatalf("%d threads, %v", len(stats), err)
	}
	for _, path := range stats {
		const memallocNoIO, localThrottle = 0x80000, 0x100000
		fields := strings.Fields(read(t, path)[strings.LastIndex(read(t, path), ")")+1:])
		flags, err := strconv.ParseUint(fields[6], 10, 64)
		if err != nil || flusher != (flags&memallocNoIO != 0 && flags&localThrottle != 0) {
			t.Errorf("%s: flags %#x, %v", path, flags, err)
		}
	}
	if got := strings.TrimSpace(read(t, proc+"/oom_score_adj")); has("kill it before") != (got == "-1000") {
		t.Errorf("oom_score_adj %s", got)
	}
	if locked := kib(t, proc, "VmLck:"); has("read from disk") != (locked > 0) {
		t.Errorf("%d KiB are locked", locked)
	}
	_, kept, _ := strings.Cut(said, "kept ")
	// What is locked can still be given back. A few new things may lie there since.
	if n, err := strconv.Atoi(strings.TrimSpace(kept)); err != nil || n > ballast/os.Getpagesize()/4 {
		t.Errorf("pages kept of memory that is no longer used: %q, %v", kept, err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func kib(t *testing.T, proc, field string) int64 {
	t.Helper()
	_, rest, _ := strings.Cut(read(t, proc+"/status"), field)
	n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
