package cluster_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// Connections that end in every way leave nothing behind, and the next one gets in.
func TestB024EveryWayToLeave(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "64MiB")
	random := seeded(t)
	page := make([]byte, 4096)
	leave := map[string]func(r *raw) error{
		"DISC": (*raw).disconnect,
		"FIN":  (*raw).Close,
		"RST": func(r *raw) error {
			if tcp, ok := r.Conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			return r.Close()
		},
		"amid a request": func(r *raw) error {
			if _, err := r.send(cmdWrite, 0, 0, 1<<20, page); err != nil { // a part of the payload
				return err
			}
			if tcp, ok := r.Conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			return r.Close()
		},
	}
	ways := []string{"DISC", "FIN", "RST", "amid a request"}
	files := func() int {
		n, err := cluster.Files(s.PID())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := connect(t, s, u).read(0, page); err != nil {
		t.Fatal(err)
	}
	before := files()
	slowest := time.Duration(0)
	for i := range scaled(400, 10_000) {
		began := time.Now()
		r, err := openTCP(s, u)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		slowest = max(slowest, time.Since(began))
		r.again = func() (*raw, error) { return openTCP(s, u) }
		if err := r.read(0, page); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		way := ways[random.IntN(len(ways))]
		if err := leave[way](r); err != nil {
			t.Fatalf("connection %d, %s: %v", i, way, err)
		}
	}
	t.Logf("the slowest connection took %v", slowest)
	if slowest > 5*time.Second {
		t.Errorf("a connection took %v", slowest)
	}
	eventually(t, 30*time.Second, "the descriptors are back to what they were", func() bool { return files() <= before })
}

// SIGTERM while fifty clients sit in the middle of something and sixteen requests are on their way.
func TestB026StopWhileClientsSitInHandshake(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "64MiB")
	address := fmt.Sprintf("127.0.0.1:%d", s.Ports.NBD)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range 50 {
		c, err := net.Dial("tcp", address)
		must(err)
		defer c.Close()
		if i%4 == 0 {
			continue // before the magic was read
		}
		r := &raw{Conn: c}
		must(r.hello())
		switch i % 4 {
		case 1: // amid an option's header
			_, err = c.Write(binary.BigEndian.AppendUint64(nil, magicOption)[:5])
		case 2: // amid an option's data
			_, err = c.Write(append(binary.BigEndian.AppendUint64(nil, magicOption), 0, 0, 0, optGo, 0, 0, 1, 0, 'x'))
		case 3: // amid a payload
			must(r.goTo(u.Export()))
			_, err = r.send(cmdWrite, 0, 0, 1<<20, make([]byte, 4096))
		}
		must(err)
	}
	busy := connect(t, s, u)
	page := bytes.Repeat([]byte{1}, 4096)
	for i := range 16 {
		_, err := busy.send(cmdWrite, 0, int64(i)*4096, 4096, page)
		must(err)
	}
	answers := make(chan error, 1)
	go func() {
		for range 16 {
			if _, err := busy.receive(nil); err != nil && !errors.Is(err, eShutdown) && !errors.Is(err, io.EOF) {
				answers <- err
				return
			}
		}
		answers <- nil
	}()
	began := time.Now()
	must(s.Stop())
	t.Logf("ended in %v", time.Since(began))
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("the end took %v", took)
	}
	if err := <-answers; err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a request on its way: %v", err)
	}
	if strings.Contains(s.Log(), "panic") {
		t.Error("the log has a panic")
	}
}

// Random bytes, HTTP and an old protocol on every port: closed, and nobody else notices.
func TestB147ForeignBytesOnEveryPort(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "64MiB")
	running := connect(t, s, u)
	page := bytes.Repeat([]byte{8}, 4096)
	if err := running.write(0, page); err != nil {
		t.Fatal(err)
	}
	random := seeded(t)
	noise := make([]byte, 4096)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	greetings := map[string][]byte{
		"random bytes":  noise,
		"HTTP":          []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"zeros":         make([]byte, 4096),
		"huge lengths":  bytes.Repeat([]byte{0xff}, 4096),
		"an NBD client": append([]byte{0, 0, 0, 3}, binary.BigEndian.AppendUint64(nil, magicOption)...),
	}
	logged := len(s.Log())
	memory, err := cluster.RSS(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	rounds := scaled(5, 200)
	for name, port := range map[string]int{"metadata": s.Ports.Metadata, "raft": s.Ports.Raft, "replica": s.Ports.Replica, "nbd": s.Ports.NBD, "http": s.Ports.HTTP} {
		for what, bytes := range greetings {
			for range rounds {
				c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
				if errors.Is(err, syscall.ECONNREFUSED) && name == "replica" {
					continue // nobody listens there as long as a volume has one copy
				}
				if err != nil {
					t.Fatalf("%s port: %v", name, err)
				}
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				if _, err := c.Write(bytes); err == nil {
					_ = c.(*net.TCPConn).CloseWrite()
					if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("%s port: %s: the connection was not closed", name, what)
					}
				}
				_ = c.Close()
			}
		}
	}
	p := make([]byte, 4096)
	if err := running.read(0, p); err != nil || !bytes.Equal(p, page) {
		t.Errorf("the session that was running: %v", err)
	}
	cli(t, s, "status")
	if grown := len(s.Log()) - logged; grown > rounds*len(greetings)*5*400 {
		t.Errorf("the log grew by %d bytes", grown)
	}
	after, err := cluster.RSS(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	if after > memory+32<<20 {
		t.Errorf("the server grew by %d bytes", after-memory)
	}
}

// Connections that never finish a handshake cost nothing, end by themselves, and keep nobody out.
func TestB169WorkDoneForStrangers(t *testing.T) {
	t.Parallel() // it mostly waits
	s := start(t)
	cli(t, s, "volume", "create", "v", "--size", "64MiB", "--replicas", "1")
	address := fmt.Sprintf("127.0.0.1:%d", s.Ports.NBD)
	before := tree(t, s.Disks[0])
	var strangers []net.Conn
	defer func() {
		for _, c := range strangers {
			_ = c.Close()
		}
	}()
	for i := range scaled(400, 2000) {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatalf("stranger %d: %v", i, err)
		}
		strangers = append(strangers, c)
		if i%2 == 1 {
			_, _ = c.Write([]byte{0, 0})
		}
	}
	if after := tree(t, s.Disks[0]); after != before {
		t.Errorf("strangers changed the disk:\n%s\n%s", before, after)
	}
	began := time.Now()
	u, err := s.Attach(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	r, err := openTCP(s, u)
	if err != nil {
		t.Fatalf("a legitimate client: %v", err)
	}
	defer r.Close()
	if err := r.write(0, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	t.Logf("attach and first write among %d strangers: %v", len(strangers), took)
	if took > 5*time.Second {
		t.Errorf("attaching took %v", took)
	}
	last := strangers[len(strangers)-1]
	_ = last.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.Copy(io.Discard, last); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a stranger may stay for ever")
	}
	if err := r.read(0, make([]byte, 4096)); err != nil {
		t.Errorf("the legitimate client afterwards: %v", err)
	}
}

// A dead socket is replaced, a live one and foreign files are respected, and nobody removes another's.
func TestB145StaleSocketFile(t *testing.T) {
	for name, lay := range map[string]func(path string) error{
		"regular file": func(path string) error { return os.WriteFile(path, []byte("mine"), 0o600) },
		"directory":    func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			s := layout(t, cluster.Options{})
			if err := lay(s.Socket); err != nil {
				t.Fatal(err)
			}
			before := tree(t, s.Socket)
			mentions(t, refused(t, s), s.Socket)
			if after := tree(t, s.Socket); after != before {
				t.Errorf("it was touched: %s %s", before, after)
			}
		})
	}
	t.Run("dead socket", func(t *testing.T) {
		s := start(t)
		s.Kill()
		if _, err := os.Lstat(s.Socket); err != nil {
			t.Fatalf("a killed server leaves its socket: %v", err)
		}
		ready(t, s)
		connect(t, s, volume(t, s, "v", "1MiB"))
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(s.Socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a stopped server left its socket: %v", err)
		}
	})
	t.Run("live socket", func(t *testing.T) {
		s := start(t)
		u := volume(t, s, "v", "1MiB")
		second := layout(t, cluster.Options{Flags: []string{"--nbd-socket", s.Socket}})
		mentions(t, refused(t, second), s.Socket)
		connect(t, s, u)
	})
	t.Run("another's socket survives a stop", func(t *testing.T) {
		s := start(t)
		if err := os.Remove(s.Socket); err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("unix", s.Socket)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(s.Socket); err != nil {
			t.Errorf("the socket of somebody else is gone: %v", err)
		}
	})
}

// stopped reports whether no thread of a process runs any more: a signal stops
// the first at once and the others when that one comes to it.
func stopped(t *testing.T, pid int) bool {
	t.Helper()
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) == 0 {
		t.Fatalf("threads of %d: %d, %v", pid, len(stats), err)
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if _, after, _ := bytes.Cut(b, []byte(") ")); err == nil && !bytes.HasPrefix(after, []byte("T")) {
			return false
		}
	}
	return true
}

// What lay unread while the process was stopped is never executed: its sender has long sent it again elsewhere.
func TestH02StoppedServer(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "64MiB", "--durability", "flush")
	held := connect(t, s, u)
	idle := connect(t, s, u)
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }
	if err := held.write(0, page(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "every thread is stopped", func() bool { return stopped(t, s.PID()) })
	if _, err := held.send(cmdWrite, 0, 0, 4096, page(2)); err != nil {
		t.Fatal(err)
	}
	<-time.After(2 * time.Second) // longer than the client's patience of one second
	if err := s.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]*raw{"with a request": held, "without": idle} {
		_ = r.SetReadDeadline(time.Now().Add(20 * time.Second))
		if cookie, err := r.receive(nil); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the connection %s was not closed: cookie %d, %v", name, cookie, err)
		}
	}
	again := connect(t, s, u)
	p := make([]byte, 4096)
	if err := again.read(0, p); err != nil || !bytes.Equal(p, page(1)) {
		t.Errorf("after the stall the block has %d…: %v", p[0], err)
	}
	if err := again.write(0, page(3)); err != nil {
		t.Fatal(err)
	}
	if err := again.read(0, p); err != nil || !bytes.Equal(p, page(3)) {
		t.Errorf("the newer write did not stay: %d… %v", p[0], err)
	}
}

// Tokens show in no log, metric, status or process list.
func TestB166NoTokenIsTold(t *testing.T) {
	s := start(t, "--log-level", "debug")
	u := volume(t, s, "v", "64MiB")
	token := strings.TrimPrefix(u.Export(), u.VolumeID()+"/")
	if len(token) < 16 {
		t.Fatalf("a token of %d characters", len(token))
	}
	connect(t, s, u)
	for _, name := range []string{u.VolumeID() + "/" + token + "x", u.Export() + "/0/0/0", token, "/" + token} {
		r, err := dial(context.Background(), "unix", s.Socket)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.goTo(name); err == nil {
			t.Errorf("a wrong name was served")
		} else if strings.Contains(err.Error(), token) {
			t.Errorf("a refusal tells the token")
		}
		_ = r.Close()
	}
	_, metrics, err := s.Get(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", s.PID()))
	if err != nil {
		t.Fatal(err)
	}
	cli(t, s, "detach", "v")
	for what, text := range map[string]string{
		"log": s.Log(), "metrics": metrics, "command line": string(command), "status": cli(t, s, "status"),
		"events": cli(t, s, "events"), "volume": cli(t, s, "volume", "show", "v", "-o", "json"),
	} {
		if strings.Contains(text, token) {
			t.Errorf("the %s tells the token", what)
		}
	}
}

// A second consumer is served only after the first can do nothing any more.
func TestDetachClosesAndDrains(t *testing.T) {
	s := start(t)
	cli(t, s, "volume", "create", "v", "--size", "64MiB", "--replicas", "1", "--durability", "flush")
	a, err := s.Attach(t.Context(), "v", "--node", "a")
	if err != nil {
		t.Fatal(err)
	}
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }
	var writers sync.WaitGroup
	for i := range 4 {
		r := connect(t, s, a)
		writers.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for r.write(random.Int64N(1024)*4096, page(1)) == nil {
			}
		})
	}
	cli(t, s, "detach", "v", "--node", "a")
	writers.Wait()
	b, err := s.Attach(t.Context(), "v", "--node", "b")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(s, a); err == nil {
		t.Error("the old URI still opens the volume")
	}
	r := connect(t, s, b)
	for off := int64(0); off < 4<<20; off += 4096 {
		if err := r.write(off, page(2)); err != nil {
			t.Fatal(err)
		}
	}
	p := make([]byte, 4<<20)
	if err := r.read(0, p); err != nil || !bytes.Equal(p, bytes.Repeat([]byte{2}, 4<<20)) {
		t.Errorf("something of the first consumer came through: %v", err)
	}
	if _, err := os.Stat(filepath.Join(s.Disks[0], "volumes", b.VolumeID())); err != nil {
		t.Error(err)
	}
}
