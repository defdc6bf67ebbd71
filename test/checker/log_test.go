package checker

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

var volume = block.VolumeID{UUID: block.UUID{1, 2, 3}}

const grain = minGrain

// shown is the content of one block as a write made it.
func shown(w *Write) []byte {
	p := make([]byte, int64(len(w.counts))*w.l.grain)
	w.Fill(p)
	return p
}

func write(l *Log) *Write { return l.Write(0, grain, false) }

func acked(l *Log) *Write {
	w := write(l)
	w.Acked()
	return w
}

func flush(l *Log) { l.Flush().Acked() }

// see judges a read of block 0 that begins and ends now.
func see(l *Log, p []byte) error { return l.Read(0).Returned(p) }

var zeros = make([]byte, grain)

func TestScripts(t *testing.T) {
	for _, c := range []struct {
		name  string
		run   func(l *Log) error
		wrong string // part of the violation; empty: none
	}{
		{"unacknowledged may be seen or not", func(l *Log) error { write(l); return see(l, zeros) }, ""},
		{"acknowledged must be seen", func(l *Log) error { acked(l); return see(l, zeros) },
			"found zeros; allowed: write 1; the newest sent is 1"},
		{"what was read once stays", func(l *Log) error { return errors.Join(see(l, shown(write(l))), see(l, zeros)) },
			"found zeros; allowed: write 1"},
		{"H01: a first copy that lands after its resend", func(l *Log) error {
			first := write(l)
			first.Resend().Acked()
			acked(l)
			return see(l, shown(first))
		}, "found write 1; allowed: write 3"},
		{"a trim has its place", func(l *Log) error {
			w := acked(l)
			l.Zero(0, grain, false).Acked()
			return errors.Join(see(l, zeros), see(l, shown(w)))
		}, "found write 1; allowed: zeros of write 2"},
		{"a trim is overwritten", func(l *Log) error { l.Zero(0, grain, false).Acked(); acked(l); return see(l, zeros) },
			"found zeros"},
		{"a refused write is never seen", func(l *Log) error { w := write(l); w.Refused(); return see(l, shown(w)) },
			"found write 1"},
		{"an overlapping pair is ordered either way", func(l *Log) error {
			a, b := write(l), write(l)
			b.Acked()
			a.Acked()
			return see(l, shown(a))
		}, ""},
		{"but once", func(l *Log) error {
			a, b := write(l), write(l)
			a.Acked()
			b.Acked()
			return errors.Join(see(l, shown(a)), see(l, shown(b)))
		}, "found write 2; allowed: write 1"},
		{"a read that began before may show the older", func(l *Log) error {
			r := l.Read(0)
			acked(l)
			return r.Returned(zeros)
		}, ""},
		{"flushed is not lost", func(l *Log) error { acked(l); flush(l); l.Lost(); return see(l, zeros) }, "found zeros"},
		{"unflushed may be lost", func(l *Log) error { acked(l); l.Lost(); return see(l, zeros) }, ""},
		{"not lost without the refusal", func(l *Log) error {
			acked(l)
			flush(l)
			acked(l)
			return see(l, shown(&Write{l: l, counts: []uint64{1}}))
		},
			"found write 1; allowed: write 2"},
		{"a flush covers what was acknowledged before it began", func(l *Log) error {
			f := l.Flush()
			acked(l)
			f.Acked()
			l.Lost()
			return see(l, zeros)
		}, ""},
		{"a read under way during a loss brings nothing back", func(l *Log) error {
			l.Read(grain)
			acked(l)
			flush(l)
			l.Lost()
			return see(l, zeros)
		}, "found zeros"},
		{"FUA covers its own block", func(l *Log) error { l.Write(0, grain, true).Acked(); l.Lost(); return see(l, zeros) }, "found zeros"},
		{"a read value that was flushed stays", func(l *Log) error {
			err := see(l, shown(write(l)))
			flush(l)
			l.Lost()
			return errors.Join(err, see(l, zeros))
		}, "found zeros"},
		{"an answer from before the loss proves nothing", func(l *Log) error {
			w := write(l)
			l.Lost()
			w.Acked()
			return see(l, zeros)
		}, ""},
		{"another volume's block", func(l *Log) error {
			p := shown(acked(l))
			p[8] ^= 1
			putBlock(p, block.VolumeID{UUID: block.UUID{9}}, 0, 1)
			return see(l, p)
		}, "of volume 09"},
		{"another block's content", func(l *Log) error { return see(l, shown(l.Write(grain, grain, false))) }, "found write 1 of offset 512"},
		{"a torn block", func(l *Log) error { p := shown(acked(l)); p[300] ^= 1; return see(l, p) }, "damaged or torn"},
		{"garbage", func(l *Log) error { return see(l, bytes.Repeat([]byte{7}, grain)) }, "bytes that no write made"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.run(New(volume, grain, false))
			switch {
			case c.wrong == "" && err != nil:
				t.Fatalf("accused: %v", err)
			case c.wrong != "" && err == nil:
				t.Fatalf("not found; want %q", c.wrong)
			case c.wrong != "" && !strings.Contains(err.Error(), c.wrong):
				t.Fatalf("got %q, want %q", err, c.wrong)
			}
		})
	}
}

func TestWriteThroughLosesNothing(t *testing.T) {
	l := New(volume, grain, true)
	acked(l)
	l.Lost()
	if see(l, zeros) == nil {
		t.Fatal("an acknowledged write of a write-through volume was lost unnoticed")
	}
}

func TestVerifyNamesTheBlock(t *testing.T) {
	l := New(volume, 4096, false)
	image := make([]byte, 3<<20)
	w := l.Write(1<<20, 1<<20, false)
	w.Fill(image[1<<20 : 2<<20])
	w.Acked()
	if err := l.Verify(bytes.NewReader(image), int64(len(image))); err != nil {
		t.Fatal(err)
	}
	clear(image[1<<20+8192 : 1<<20+8192+4096])
	var v *Violation
	if err := l.Verify(bytes.NewReader(image), int64(len(image))); !errors.As(err, &v) || v.Offset != 1<<20+8192 {
		t.Fatalf("got %v", err)
	}
	if err := l.Verify(bytes.NewReader(image[:100]), int64(len(image))); err == nil || errors.As(err, &v) {
		t.Fatalf("a short image: %v", err)
	}
}

// TestSettledBlocksStaySmall: what is over is forgotten.
func TestSettledBlocksStaySmall(t *testing.T) {
	l := New(volume, grain, false)
	for range 1000 {
		acked(l)
		flush(l)
	}
	acked(l)
	if n := len(l.blocks[0].entries); n > 3 {
		t.Fatalf("%d entries are kept", n)
	}
}

// TestConcurrentUse has many clients on one locked device, with overlapping ranges; run it with -race.
func TestConcurrentUse(t *testing.T) {
	const blocks = 16
	l := New(volume, grain, false)
	var dev sync.Mutex
	image := make([]byte, blocks*grain)
	var g sync.WaitGroup
	failures := make(chan error, 8)
	for c := range 8 {
		g.Go(func() {
			p := make([]byte, 4*grain)
			for i := range 300 {
				off := int64((c*7 + i*3) % (blocks - 4) * grain)
				if i%3 == 0 {
					r := l.Read(off)
					dev.Lock()
					copy(p, image[off:])
					dev.Unlock()
					if err := r.Returned(p); err != nil {
						failures <- fmt.Errorf("client %d, step %d: %w", c, i, err)
						return
					}
					continue
				}
				w := l.Write(off, int64(len(p)), false)
				w.Fill(p)
				dev.Lock()
				copy(image[off:], p)
				dev.Unlock()
				w.Acked()
				if i%10 == 0 {
					flush(l)
				}
			}
		})
	}
	g.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
	if err := l.Verify(bytes.NewReader(image), int64(len(image))); err != nil {
		t.Error(err)
	}
}

func TestAllowed(t *testing.T) {
	l := New(volume, grain, false)
	acked(l)
	write(l)
	if got := l.Allowed(0); !slices.Equal(got, []uint64{1, 2}) {
		t.Fatal(got)
	}
	if got := l.Allowed(grain); !slices.Equal(got, []uint64{0}) {
		t.Fatal(got)
	}
}
