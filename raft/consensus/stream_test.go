package consensus

import (
	"errors"
	"log/slog"
	"net"
	"syscall"
	"testing"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// A server that starts is reached as soon as it listens, and nobody is waited for at the end.
func TestDialWaitsForServer(t *testing.T) {
	own, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(own, own.Addr(), block.ClusterID{UUID: block.UUID{1}}, slog.New(slog.DiscardHandler))
	defer s.Close()
	address := freePort(t)
	type dialled struct {
		net.Conn
		error
	}
	dial := func() <-chan dialled {
		done := make(chan dialled, 1)
		go func() {
			conn, err := s.Dial(hraft.ServerAddress(address), time.Minute)
			done <- dialled{conn, err}
		}()
		return done
	}
	done := dial()
	select { // what was refused at once would be here
	case d := <-done:
		t.Fatalf("nobody listens: %v", d.error)
	case <-time.After(2 * redialEvery):
	}
	other, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	d := <-done
	if d.error != nil {
		t.Fatal(d.error)
	}
	if err := errors.Join(d.Close(), other.Close()); err != nil {
		t.Fatal(err)
	}
	done = dial()
	s.leave()
	if d := <-done; !errors.Is(d.error, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v", d.error)
	}
}
