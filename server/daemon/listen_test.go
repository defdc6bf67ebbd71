package daemon

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

func TestListenTCPTaken(t *testing.T) {
	l, err := ListenTCP("127.0.0.1", 0, "--nbd-port")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = ListenTCP("127.0.0.1", l.Addr().(*net.TCPAddr).Port, "--nbd-port")
	if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), "--nbd-port") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("got %v", err)
	}
	if _, err = ListenTCP("203.0.113.9", 0, "--nbd-port"); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("a foreign address: got %v", err)
	}
}

func TestIsLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"127.0.0.1": true, "127.8.8.8": true, "::1": true, "::ffff:127.0.0.1": true, "localhost": true,
		"0.0.0.0": false, "::": false, "10.0.0.1": false, "": false, "localhost.example.org": false,
	} {
		if got := IsLoopback(host); got != want {
			t.Errorf("IsLoopback(%q) = %v", host, got)
		}
	}
}

// deadSocket leaves behind what a killed server does.
func deadSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestB145StaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nbd.sock")
	must := func(what string) net.Listener {
		t.Helper()
		l, err := ListenUnix(path, "--nbd-socket")
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		return l
	}

	deadSocket(t, path)
	first := must("over a dead socket")
	if _, err := ListenUnix(path, "--nbd-socket"); !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), path) {
		t.Errorf("over a live socket: %v", err)
	}
	if c, err := net.Dial("unix", path); err != nil {
		t.Errorf("the first server's socket after the refusal: %v", err)
	} else {
		c.Close()
	}

	// Somebody takes the path while the first still runs: its end leaves the other's socket alone.
	os.Remove(path)
	second := must("over a path whose socket was removed by hand")
	first.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the first server's end removed the second's socket: %v", err)
	}
	second.Close()
	first.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a server's own socket stays behind: %v", err)
	}

	for name, make := range map[string]func() error{
		"regular file": func() error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"directory":    func() error { return os.Mkdir(path, 0o700) },
		"symlink":      func() error { return os.Symlink("elsewhere", path) },
	} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if _, err := ListenUnix(path, "--nbd-socket"); !errors.Is(err, block.ErrExists) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s is gone: %v", name, err)
		}
		os.Remove(path)
	}
	if _, err := ListenUnix(filepath.Join(t.TempDir(), strings.Repeat("x", 120)), "--nbd-socket"); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("a long path: %v", err)
	}
	if _, err := ListenUnix(filepath.Join(t.TempDir(), "no", "nbd.sock"), "--nbd-socket"); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("no directory: %v", err)
	}
}

// Many servers find the same dead socket at once: one gets it.
func TestB145RaceForDeadSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nbd.sock")
	for range 20 {
		deadSocket(t, path)
		var wg sync.WaitGroup
		won := make(chan net.Listener, 8)
		for range cap(won) {
			wg.Go(func() {
				if l, err := ListenUnix(path, "--nbd-socket"); err == nil {
					won <- l
				} else if !errors.Is(err, block.ErrInUse) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 {
			t.Fatalf("%d servers have the socket", len(won))
		}
		(<-won).Close()
	}
}
