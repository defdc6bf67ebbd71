package nbd_test

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// inline makes a Device that does the write at offset `slow` in line, on the
// reader's goroutine, and waits for gate before it.
type inline struct {
	nbd.Exports
	slow    int64
	gate    chan struct{}
	waiting chan bool // what Blocking said
	inside  atomic.Int32

	handedOff atomic.Int32
}

func (x *inline) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	d, err := x.Exports.Open(ctx, name, s)
	return &inlineDevice{d, x, s}, err
}

type inlineDevice struct {
	block.Device
	x *inline
	s block.Stream
}

func (d *inlineDevice) Submit(batch []*block.Request) {
	var slow []*block.Request
	for _, r := range batch {
		if r.Op == block.OpWrite && r.Offset == d.x.slow {
			slow = append(slow, r)
		} else {
			d.Device.Submit([]*block.Request{r})
		}
	}
	if len(slow) == 0 {
		return
	}
	d.x.inside.Add(1)
	defer d.x.inside.Add(-1)
	may := d.s.Blocking(func() { d.x.handedOff.Add(1) })
	d.x.waiting <- may
	<-d.x.gate
	d.Device.Submit(slow)
}

func serveInline(t *testing.T, slow int64) (*served, *inline) {
	x := &inline{slow: slow, gate: make(chan struct{}), waiting: make(chan bool, 10)}
	s := serve(t, func(c *nbd.Config, _ *served) {
		x.Exports = c.Exports
		c.Exports = x
	})
	return s, x
}

// A write that waits for a disk on the reader's own goroutine holds up neither
// the requests behind it, whole or with their payload still on its way, nor the
// replies of those before it.
func TestReaderIsReplacedWhileItWaits(t *testing.T) {
	s, x := serveInline(t, 1<<20)
	p := s.enter(t, false)
	defer p.close()
	// In one packet: a request before, the slow one, and the beginning of a write behind it.
	var wireBytes bytes.Buffer
	put := func(command uint16, cookie, offset uint64, length uint32, payload []byte) {
		wireBytes.Write(wire.Request{Command: command, Cookie: cookie, Offset: offset, Length: length}.Append(nil))
		wireBytes.Write(payload)
	}
	put(protocol.TRANSMISSION_TYPE_REQUEST_WRITE, 1, 0, 4096, block4k(1))
	put(protocol.TRANSMISSION_TYPE_REQUEST_WRITE, 2, 1<<20, 4096, block4k(2))
	large := bytes.Repeat([]byte{3}, 128<<10)
	put(protocol.TRANSMISSION_TYPE_REQUEST_WRITE, 3, 2<<20, uint32(len(large)), large[:1000])
	if _, err := p.nc.Write(wireBytes.Bytes()); err != nil {
		t.Fatal(err)
	}
	if !<-x.waiting {
		t.Fatal("between requests, and yet it must not wait")
	}
	if r := p.reply(); r.cookie != 1 || r.errno != 0 {
		t.Fatalf("%+v, want the request before", r)
	}
	if _, err := p.nc.Write(large[1000:]); err != nil {
		t.Fatal(err)
	}
	if r := p.reply(); r.cookie != 3 || r.errno != 0 {
		t.Fatalf("%+v, want the request behind", r)
	}
	p.write(4, 3<<20, block4k(4))
	if r := p.reply(); r.cookie != 4 || r.errno != 0 {
		t.Fatalf("%+v", r)
	}
	if n := x.handedOff.Load(); n != 1 {
		t.Errorf("the one that waits was told %d times that it is replaced", n)
	}
	close(x.gate)
	if r := p.reply(); r.cookie != 2 || r.errno != 0 {
		t.Fatalf("%+v, want the slow one", r)
	}
	for at, want := range map[int64]byte{0: 1, 1 << 20: 2, 2<<20 + 1000: 3, 2<<20 + 128<<10 - 1: 3, 3 << 20: 4} {
		if got := content(s.volume, at); got != want {
			t.Errorf("at %d: %d, want %d", at, got, want)
		}
	}
}

// The connection ends while the reader that was replaced still waits: the end
// waits for it, and nothing is left.
func TestEndWhileAReplacedReaderWaits(t *testing.T) {
	s, x := serveInline(t, 0)
	p := s.enter(t, false)
	p.write(1, 0, block4k(1))
	<-x.waiting
	p.write(2, 4096, block4k(2))
	if r := p.reply(); r.cookie != 2 {
		t.Fatalf("%+v", r)
	}
	p.close()
	close(x.gate)
	eventually(t, "the end of the connection", func() bool { return s.Stats().Connections == 0 && x.inside.Load() == 0 })
	if got := content(s.volume, 0); got != 1 {
		t.Errorf("the write that was under way left %d", got)
	}
}

// Again and again, from many connections at once, each reader replaced or not
// as the scheduler likes: every reply comes once and every block is right.
func TestReadersReplacedAtRandom(t *testing.T) {
	s, x := serveInline(t, 0)
	x.waiting = make(chan bool, 10_000)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case x.gate <- struct{}{}:
			case <-stop:
				return
			}
		}
	}()
	p := s.enter(t, false)
	defer p.close()
	const rounds = 200
	go func() {
		for i := range uint64(rounds) {
			p.write(2*i, 0, block4k(byte(i)))
			p.write(2*i+1, 4096*(1+i), block4k(byte(i)))
		}
	}()
	seen := map[uint64]bool{}
	for range 2 * rounds {
		r := p.reply()
		if r.errno != 0 || seen[r.cookie] {
			t.Fatalf("%+v", r)
		}
		seen[r.cookie] = true
	}
	close(stop)
	<-done
	for i := range int64(rounds) {
		if got := content(s.volume, 4096*(1+i)); got != byte(i) {
			t.Errorf("block %d: %d", i, got)
		}
	}
}
