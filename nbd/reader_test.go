package nbd_test

import (
	"bytes"
	"net"
	"testing"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

// submits is a Device that lets a test look on before each Submit.
type submits struct {
	block.Device
	before func(batch []*block.Request)
}

func (d *submits) Submit(batch []*block.Request) {
	d.before(batch)
	d.Device.Submit(batch)
}

// untaken is how many bytes that nc has sent its peer has not read yet.
func untaken(t *testing.T, nc net.Conn) (n int) {
	t.Helper()
	raw, err := nc.(*net.UnixConn).SyscallConn()
	must(t, err)
	cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	must(t, cerr)
	must(t, err)
	return n
}

// While a large write is done its client can send the next: what came behind its payload has been taken with it.
func TestTakesWhatIsBehindAPayload(t *testing.T) {
	const large, second = 256 << 10, 64 << 10 // the first does not fit into the read buffer with its header
	var p *peer
	sent, left := make(chan bool), make(chan int, 1)
	s := serve(t, func(cfg *nbd.Config, s *served) {
		cfg.Exports = wrapped{s.exports, func(d block.Device, _ block.Stream) block.Device {
			return &submits{d, func(batch []*block.Request) {
				switch r := batch[0]; {
				case r.Op == block.OpFlush:
					<-sent
				case r.Length == large:
					left <- untaken(t, p.nc)
				}
			}}
		}}
	})
	p = s.enter(t, false)
	defer p.close()
	must(t, p.nc.(*net.UnixConn).SetWriteBuffer(1<<20))

	p.send(wire.Request{Command: wire.CmdFlush, Cookie: 1}, nil)
	p.write(2, 0, bytes.Repeat([]byte{2}, large))
	p.write(3, large, bytes.Repeat([]byte{3}, second))
	close(sent)
	if n := <-left; n != 0 {
		t.Errorf("%d bytes wait in the socket for the end of the large write", n)
	}
	for range 3 {
		if r := p.reply(); r.errno != 0 {
			t.Errorf("%+v", r)
		}
	}
	p.send(wire.Request{Cookie: 4, Offset: large - 4096, Length: 8192}, nil)
	want := append(bytes.Repeat([]byte{2}, 4096), bytes.Repeat([]byte{3}, 4096)...)
	if r := p.replyTo(8192); !bytes.Equal(r.data, want) {
		t.Errorf("read %d bytes that are not what was written", len(r.data))
	}
}
