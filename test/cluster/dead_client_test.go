package cluster_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// ownNetwork runs this test again in a network namespace of its own, where it
// may break the network, and reports whether this is that second run.
func ownNetwork(t *testing.T) bool {
	t.Helper()
	const inside = "GABION_OWN_NETWORK"
	if os.Getenv(inside) != "" {
		system(t, "ip", "link", "set", "lo", "up")
		return true
	}
	needRoot(t)
	need(t, "ip")
	path, err := filepath.Abs(gabionPath)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1", "GABION_BINARY="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("in a network of its own:\n%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}

// dropAll makes the network lose every packet from and to an address.
func dropAll(t *testing.T, address string) {
	t.Helper()
	for _, rule := range [][]string{
		{"add", "pref", "5", "from", address, "blackhole"},
		{"add", "pref", "5", "to", address, "blackhole"},
		{"add", "pref", "10", "lookup", "local"}, // behind the two
		{"del", "pref", "0"},
	} {
		system(t, "ip", append([]string{"rule"}, rule...)...)
	}
}

// A client vanishes without a FIN: the volume moves to another at once, nothing
// of the first is applied any more, and its socket does not stay open for hours.
func TestB025DeadClient(t *testing.T) {
	t.Parallel() // it mostly waits
	if !ownNetwork(t) {
		return
	}
	s := start(t)
	cli(t, s, "volume", "create", "v", "--size", "64MiB", "--replicas", "1", "--durability", "flush")
	cli(t, s, "volume", "create", "w", "--size", "64MiB", "--replicas", "1")
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

	a, err := s.Attach(t.Context(), "v", "--node", "a")
	if err != nil {
		t.Fatal(err)
	}
	dead := connectFrom(t, s, a, "127.0.0.2")
	w, err := s.Attach(t.Context(), "w", "--node", "a")
	if err != nil {
		t.Fatal(err)
	}
	forgotten := connectFrom(t, s, w, "127.0.0.2") // nobody detaches it
	if err := dead.write(0, page(1)); err != nil {
		t.Fatal(err)
	}
	if err := forgotten.write(0, page(1)); err != nil {
		t.Fatal(err)
	}
	if n := established(t, s.Ports.NBD, "127.0.0.2"); n != 2 {
		t.Fatalf("%d connections of the client, want 2", n)
	}
	dropAll(t, "127.0.0.2")
	for i := range int64(16) { // they stay in the dead client's send buffer
		if _, err := dead.send(cmdWrite, 0, i*4096, 4096, page(2)); err != nil {
			t.Fatal(err)
		}
	}

	began := time.Now()
	cli(t, s, "detach", "v", "--node", "a")
	b, err := s.Attach(t.Context(), "v", "--node", "b")
	if err != nil {
		t.Fatal(err)
	}
	r := connect(t, s, b)
	p := make([]byte, 4096)
	if err := r.read(0, p); err != nil || !bytes.Equal(p, page(1)) {
		t.Fatalf("the next client reads %d…: %v", p[0], err)
	}
	took := time.Since(began)
	t.Logf("the next client was served after %v", took)
	if took > 10*time.Second {
		t.Errorf("moving the volume took %v", took)
	}
	// The first socket is closed by the detach, the forgotten one by TCP's own patience.
	closed := eventually(t, 60*time.Second, "the server has closed the dead client's sockets", func() bool {
		return established(t, s.Ports.NBD, "127.0.0.2") == 0
	})
	t.Logf("the last socket was closed after %v", closed)
	for i := range int64(16) {
		if err := r.read(i*4096, p); err != nil || bytes.Equal(p, page(2)) {
			t.Errorf("a write of the dead client was applied to block %d (%v)", i, err)
		}
	}
}

// established counts this network's connections of a local port with an address.
func established(t *testing.T, port int, address string) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	local, remote := fmt.Sprintf(":%04X", port), fmt.Sprintf("%08X", binary.NativeEndian.Uint32(net.ParseIP(address).To4()))
	for line := range strings.Lines(string(b)) {
		const state = 3 // 01 is ESTABLISHED
		if f := strings.Fields(line); strings.HasSuffix(f[1], local) && strings.HasPrefix(f[2], remote) && f[state] == "01" {
			n++
		}
	}
	return n
}

func connectFrom(t *testing.T, s *cluster.Server, u cluster.URIs, address string) *raw {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.Ports.NBD))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &raw{Conn: c}
	if err := r.hello(); err != nil {
		t.Fatal(err)
	}
	if err := r.goTo(u.Export()); err != nil {
		t.Fatal(err)
	}
	return r
}
