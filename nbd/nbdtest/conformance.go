package nbdtest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// Conformance checks what every block.Device promises. open returns an empty,
// writable volume of at least 40 MiB, opened for s; the suite disconnects it.
func Conformance(t *testing.T, open func(t *testing.T, s block.Stream) block.Device) {
	t.Helper()
	cases := []struct {
		name string
		run  func(*testing.T, *suite)
	}{
		{"fresh is zeros", fresh},
		{"write then read", writeRead},
		{"sectors", sectors},
		{"one batch is in order", ordered},
		{"trim and zero", trimZero},
		{"flush and fua", flushFUA},
		{"largest payload", largest},
		{"random against a model", random},
		{"status", status},
		{"stream is closed", streamClosed},
		{"disconnect completes everything", disconnect},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := NewStream()
			u := &suite{s: s, d: open(t, s)}
			u.size = u.d.Info().Size
			if u.size < 40<<20 {
				t.Fatalf("a volume of %d bytes is too small for the suite", u.size)
			}
			c.run(t, u)
			u.d.Disconnect()
			if n := s.Pending(); n > 0 {
				t.Errorf("Disconnect returned with %d requests not completed", n)
			}
			if s.twice > 0 {
				t.Errorf("%d completions too many", s.twice)
			}
		})
	}
}

type suite struct {
	s    *Stream
	d    block.Device
	size int64
}

func (u *suite) must(t *testing.T, batch ...*block.Request) {
	t.Helper()
	if err := u.s.Do(u.d, batch...); err != nil {
		t.Fatalf("request failed: %v", err)
	}
}

func write(off int64, p []byte) *block.Request {
	return &block.Request{Op: block.OpWrite, Offset: off, Length: int64(len(p)), Data: p}
}

func read(off, length int64) *block.Request {
	return &block.Request{Op: block.OpRead, Offset: off, Length: length}
}

func (u *suite) expect(t *testing.T, off int64, want []byte) {
	t.Helper()
	r := read(off, int64(len(want)))
	u.must(t, r)
	if !bytes.Equal(r.Data, want) {
		for i := range want {
			if r.Data[i] != want[i] {
				t.Fatalf("the byte at %d is %#x, want %#x", off+int64(i), r.Data[i], want[i])
			}
		}
	}
}

func fill(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n) }

func fresh(t *testing.T, u *suite) {
	u.expect(t, 0, make([]byte, 1<<20))
	u.expect(t, u.size-4096, make([]byte, 4096))
}

func writeRead(t *testing.T, u *suite) {
	for _, off := range []int64{0, 512, 1<<20 - 512, u.size - 8192} {
		u.must(t, write(off, fill(8192, byte(off>>9)|1)))
		u.expect(t, off, fill(8192, byte(off>>9)|1))
	}
}

func sectors(t *testing.T, u *suite) {
	var batch []*block.Request
	var want []byte
	for i := range 8 {
		p := fill(512, byte('a'+i))
		batch = append(batch, write(int64(i)*512, p))
		want = append(want, p...)
	}
	u.must(t, batch...)
	u.expect(t, 0, want)
}

func ordered(t *testing.T, u *suite) {
	first, second := read(4096, 512), read(4096, 512)
	u.must(t, write(4096, fill(4096, 1)), first, write(4096, fill(512, 2)), second)
	if first.Data[0] != 1 || second.Data[0] != 2 {
		t.Fatalf("reads between two writes saw %d and %d, want 1 and 2", first.Data[0], second.Data[0])
	}
}

func trimZero(t *testing.T, u *suite) {
	for _, r := range []*block.Request{{Op: block.OpTrim}, {Op: block.OpZero}, {Op: block.OpZero, NoHole: true}} {
		u.must(t, write(0, fill(1<<20, 7)))
		r.Offset, r.Length = 512, 1<<20-1024
		u.must(t, r)
		want := make([]byte, 1<<20)
		copy(want, fill(512, 7))
		copy(want[1<<20-512:], fill(512, 7))
		u.expect(t, 0, want)
	}
	u.must(t, &block.Request{Op: block.OpTrim, Length: u.size})
	u.expect(t, 0, make([]byte, 1<<20))
}

func flushFUA(t *testing.T, u *suite) {
	w := write(8192, fill(4096, 3))
	w.FUA = true
	u.must(t, w)
	u.must(t, write(0, fill(4096, 4)), &block.Request{Op: block.OpFlush})
	u.must(t, &block.Request{Op: block.OpTrim, FUA: true, Offset: 0, Length: 4096})
	u.must(t, &block.Request{Op: block.OpCache, Offset: 0, Length: 4096})
}

func largest(t *testing.T, u *suite) {
	p := make([]byte, block.MaxPayload)
	for i := range p {
		p[i] = byte(i >> 9)
	}
	u.must(t, write(512, p))
	u.expect(t, 512, p)
}

func random(t *testing.T, u *suite) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	model := make([]byte, 4<<20)
	for range 200 {
		var batch []*block.Request
		for range 1 + rnd.IntN(16) {
			off := int64(rnd.IntN(len(model)/512)) * 512
			length := min(int64(1+rnd.IntN(64))*512, int64(len(model))-off)
			switch rnd.IntN(4) {
			case 0:
				batch = append(batch, &block.Request{Op: block.OpTrim, Offset: off, Length: length})
				clear(model[off : off+length])
			case 1:
				batch = append(batch, read(off, length))
			default:
				p := fill(int(length), byte(1+rnd.IntN(255)))
				batch = append(batch, write(off, p))
				copy(model[off:], p)
			}
		}
		u.must(t, batch...)
	}
	u.expect(t, 0, model)
}

func status(t *testing.T, u *suite) {
	u.must(t, write(0, fill(64<<10, 1)), write(2<<20, fill(64<<10, 1)), write(u.size-4096, fill(512, 1)))
	for _, limit := range []int{1, 2, 1000} {
		got, err := u.d.Status(nil, 0, u.size, limit)
		if err != nil || len(got) == 0 || len(got) > limit {
			t.Fatalf("Status with limit %d: %d descriptors, %v", limit, len(got), err)
		}
		var sum int64
		for i, s := range got {
			if s.Length <= 0 || s.Length%512 != 0 {
				t.Errorf("descriptor %d has length %d", i, s.Length)
			}
			if i > 0 && s.Hole == got[i-1].Hole && s.Zero == got[i-1].Zero {
				t.Errorf("descriptors %d and %d say the same", i-1, i)
			}
			sum += s.Length
		}
		if got[0].Zero || got[0].Length < 64<<10 {
			t.Errorf("written data is described as %+v", got[0])
		}
		if sum > u.size || limit == 1000 && sum != u.size {
			t.Errorf("descriptors cover %d of %d bytes", sum, u.size)
		}
	}
	prefix := []block.Status{{Length: 1}}
	got, err := u.d.Status(prefix, 512, 512, 1)
	if err != nil || len(got) != 2 || got[0].Length != 1 || got[1].Length != 512 {
		t.Errorf("Status of one sector appended %+v, %v", got, err)
	}
}

func streamClosed(t *testing.T, u *suite) {
	u.s.Close(errors.New("the client left"))
	if err := u.s.Do(u.d, read(0, 4096)); err == nil {
		t.Error("a read for a closed stream succeeded")
	}
}

func disconnect(_ *testing.T, u *suite) {
	var batch []*block.Request
	for i := range 256 {
		batch = append(batch, write(int64(i)*4096, fill(4096, 1)), read(int64(i)*4096, 4096))
	}
	u.s.Submit(u.d, batch...)
}
