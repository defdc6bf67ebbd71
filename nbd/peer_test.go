package nbd_test

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// peer is a client of volume v in the transmission phase that sends and reads what a test says, and nothing by itself.
type peer struct {
	t          testing.TB
	nc         net.Conn
	structured bool
}

type reply struct {
	cookie uint64
	errno  uint32
	data   []byte // of a READ, or the descriptors of a BLOCK_STATUS
}

// handshakeBytes is what a client says to open name, from its flags on.
func handshakeBytes(name string, structured bool) []byte {
	be := binary.BigEndian
	p := be.AppendUint32(nil, 3)
	option := func(id uint32, data []byte) {
		p = append(p, "IHAVEOPT"...)
		p = be.AppendUint32(be.AppendUint32(p, id), uint32(len(data)))
		p = append(p, data...)
	}
	sized := func(s string) []byte { return append(be.AppendUint32(nil, uint32(len(s))), s...) }
	if structured {
		option(wire.OptStructuredReply, nil)
		option(wire.OptSetMetaContext, append(be.AppendUint32(sized(name), 1), sized(wire.Allocation)...))
	}
	option(protocol.NEGOTIATION_ID_OPTION_GO, be.AppendUint16(sized(name), 0))
	return p
}

// enter opens volume v over the UNIX socket.
func (s *served) enter(t testing.TB, structured bool) *peer {
	t.Helper()
	return enter(t, "unix", s.unix, "v", structured)
}

func enter(t testing.TB, network, at, name string, structured bool) *peer {
	t.Helper()
	nc, err := net.Dial(network, at)
	must(t, err)
	_ = nc.SetDeadline(time.Now().Add(30 * time.Second))
	_, err = nc.Write(handshakeBytes(name, structured))
	must(t, err)
	skip := 18 + 32 + 34 + 20
	if structured {
		skip += 20 + 20 + 4 + len(wire.Allocation) + 20
	}
	_, err = io.CopyN(io.Discard, nc, int64(skip))
	must(t, err)
	return &peer{t: t, nc: nc, structured: structured}
}

func (p *peer) close() { _ = p.nc.Close() }

// reset closes so that the server sees RST.
func (p *peer) reset() {
	if tcp, ok := p.nc.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = p.nc.Close()
}

func (p *peer) send(r wire.Request, payload []byte) {
	p.t.Helper()
	_, err := p.nc.Write(append(r.Append(nil), payload...))
	must(p.t, err)
}

func (p *peer) write(cookie, offset uint64, payload []byte) {
	p.t.Helper()
	p.send(wire.Request{Command: 1, Cookie: cookie, Offset: offset, Length: uint32(len(payload))}, payload)
}

// closed waits for the server's end of stream, throwing replies away, and returns how many bytes came before.
func (p *peer) closed() int64 {
	p.t.Helper()
	n, err := io.Copy(io.Discard, p.nc)
	if err != nil && ending(err) != "closed" {
		p.t.Fatalf("waiting for the server to close: %v", err)
	}
	return n
}

// reply reads one reply that carries no data.
func (p *peer) reply() reply { return p.replyTo(0) }

// replyTo reads one reply; length is what a successful READ has to bring.
func (p *peer) replyTo(length int) reply {
	p.t.Helper()
	be := binary.BigEndian
	read := func(n int) []byte {
		b := make([]byte, n)
		if _, err := io.ReadFull(p.nc, b); err != nil {
			p.t.Fatalf("reading a reply: %v", err)
		}
		return b
	}
	if h := read(4); be.Uint32(h) == protocol.TRANSMISSION_MAGIC_REPLY {
		h = read(12)
		r := reply{errno: be.Uint32(h), cookie: be.Uint64(h[4:])}
		if r.errno == 0 && !p.structured {
			r.data = read(length)
		}
		return r
	}
	h := read(16)
	r := reply{cookie: be.Uint64(h[4:])}
	body := read(int(be.Uint32(h[12:])))
	switch be.Uint16(h[2:]) {
	case wire.ChunkError:
		r.errno = be.Uint32(body)
	case wire.ChunkOffsetData:
		r.data = body[8:]
	case wire.ChunkStatus:
		r.data = body[4:]
	}
	return r
}
