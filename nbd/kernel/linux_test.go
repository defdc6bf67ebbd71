package kernel

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// Sockets of this process are found by address and cookie, and ended from outside.
func TestSocketIsFoundAndEnded(t *testing.T) {
	l := NewLinux()
	defer l.Close()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("no %s here: %v", address, err)
			continue
		}
		defer ln.Close()
		conn, err := new(net.Dialer).DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		s := &tcpSocket{TCPConn: conn.(*net.TCPConn)}
		defer s.Close()
		peer, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		if err := s.settle(); err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Write(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 100)
		if _, err := conn.Read(got); err != nil {
			t.Fatal(err)
		}
		info, err := l.Socket(s.ID())
		if err != nil || !info.Established || info.Received != 100 || info.Unsent != 0 {
			t.Fatalf("Socket(%v): %+v, %v", s.ID(), info, err)
		}
		other := s.ID()
		other.Cookie++
		if _, err := l.Socket(other); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("a socket of another cookie: %v", err)
		}
		if err := l.Destroy(other); err != nil {
			t.Errorf("ending a socket that is no more: %v", err)
		}
		if err := l.Destroy(s.ID()); errors.Is(err, block.ErrPrecondition) {
			t.Skip(err)
		} else if err != nil {
			t.Fatal(err)
		}
		if info, err := l.Socket(s.ID()); err == nil && info.Established {
			t.Errorf("an ended socket: %+v", info)
		}
		if _, err := conn.Read(got); err == nil {
			t.Error("an ended socket is read from")
		}
	}
}
