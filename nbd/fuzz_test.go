package nbd_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
)

// play sends p to the server, with nothing after it, and waits until the server closes. No read reply of it is longer
// than the few requests that fit into p ask for.
func play(t *testing.T, s *served, p []byte) {
	t.Helper()
	nc, err := net.Dial("unix", s.unix)
	must(t, err)
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(10 * time.Second))
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = nc.Write(p)
		_ = nc.(*net.UnixConn).CloseWrite()
	}()
	if _, err := io.Copy(io.Discard, nc); err != nil && ending(err) != "closed" {
		t.Fatalf("the server did not close: %v", err)
	}
	<-sent
}

// Whatever a client says in the handshake, the server closes and goes on.
func FuzzHandshake(f *testing.F) {
	s := serve(f, nil)
	s.exports.Volumes[""] = s.volume
	files, err := filepath.Glob("testdata/wire/*.txt")
	must(f, err)
	for _, file := range files {
		script, err := os.ReadFile(file)
		must(f, err)
		f.Add(script)
	}
	f.Add(handshakeBytes("v", false))
	f.Add(handshakeBytes("v", true))
	f.Add([]byte("\x00\x00\x00\x00IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00\x01v\x00\x00"))
	f.Fuzz(func(t *testing.T, p []byte) {
		play(t, s, p)
		p = append([]byte("\x00\x00\x00\x03IHAVEOPT"), p...) // past the greeting
		play(t, s, p)
	})
}

// Whatever a client sends in the transmission phase, the server closes and goes on, and nothing stays in flight.
func FuzzRequests(f *testing.F) {
	s := serve(f, nil)
	for _, command := range []uint16{0, 1, 2, 3, 4, 5, 6, 7, 99} {
		r := wire.Request{Command: command, Cookie: 1, Offset: 4096, Length: 512}
		f.Add(append(r.Append(nil), make([]byte, 512)...), false)
		r.Flags, r.Length = wire.CmdFlagReqOne, 1<<20
		f.Add(r.Append(r.Append(nil)), true)
	}
	f.Fuzz(func(t *testing.T, p []byte, structured bool) {
		play(t, s, append(handshakeBytes("v", structured), p...))
		for i := 0; i+wire.RequestSize <= len(p); i += wire.RequestSize { // aligned requests get a magic
			p[i], p[i+1], p[i+2], p[i+3] = 0x25, 0x60, 0x95, 0x13
			p[i+4], p[i+6] = 0, 0
		}
		play(t, s, append(handshakeBytes("v", structured), p...))
	})
}
