package nbd

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// linked is one end of a connection as a link; the other end is the peer's.
func linked(t *testing.T) (*link, net.Conn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	peer, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := ours.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	lk, err := newLink(raw)
	if err != nil {
		t.Fatal(err)
	}
	_ = ours.Close()
	t.Cleanup(func() { _, _ = lk.Close(), peer.Close() })
	return lk, peer
}

// TestGateLosesNoWake: bytes that come before, while and after the gate opens are found, in any order. Sleeping is the
// only way on here, so that one event that is not passed on ends the test by its deadline.
func TestGateLosesNoWake(t *testing.T) {
	lk, peer := linked(t)
	_ = lk.SetReadDeadline(time.Now().Add(time.Minute))
	const rounds = 20_000
	go func() {
		for range rounds {
			if _, err := peer.Write([]byte{1, 2, 3}); err != nil {
				return
			}
			var ack [1]byte
			if _, err := peer.Read(ack[:]); err != nil {
				return
			}
		}
	}()
	for round := range rounds {
		got, p := 0, make([]byte, 1)
		err := lk.in.pass(func(fd uintptr) bool {
			for got < 3 {
				n, errno := read(fd, p)
				if errno == unix.EAGAIN {
					return false
				}
				got += n
			}
			return true
		})
		if err != nil {
			t.Fatalf("round %d: %v with %d bytes", round, err, got)
		}
		if _, err := unix.Write(lk.fd, p); err != nil {
			t.Fatal(err)
		}
	}
}

// TestGateDeadline: a deadline ends a wait at once, and a later one lets the gate be passed again.
func TestGateDeadline(t *testing.T) {
	lk, peer := linked(t)
	var p [1]byte
	take := func(fd uintptr) bool { n, _ := read(fd, p[:]); return n == 1 }
	waiting := make(chan error)
	go func() { waiting <- lk.in.pass(take) }()
	_ = lk.SetReadDeadline(past())
	if err := <-waiting; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a wait whose time is over: %v", err)
	}
	_ = lk.SetReadDeadline(time.Time{})
	go func() { waiting <- lk.in.pass(take) }()
	if _, err := peer.Write(p[:]); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
}

// TestGateOut: a full socket lets a sender wait until the peer takes something.
func TestGateOut(t *testing.T) {
	lk, peer := linked(t)
	p := make([]byte, 64<<10)
	full := 0
	for {
		n, err := unix.Write(lk.fd, p)
		if err != nil {
			break
		}
		full += n
	}
	sent := make(chan error)
	go func() {
		sent <- lk.out.pass(func(fd uintptr) bool { _, err := unix.Write(int(fd), []byte{1}); return err == nil })
	}()
	for taken := 0; taken < full; {
		n, err := peer.Read(p)
		if err != nil {
			t.Fatal(err)
		}
		taken += n
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}
