package image

import (
	"errors"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

func FuzzDecodeHeader(f *testing.F) {
	h := header{extentSize: extent, volume: volA, generation: 3, size: 1 << 40, counter: 9}
	f.Add(h.encode(), []byte{})
	f.Add([]byte("GABIONIX"), h.encode())
	f.Fuzz(func(t *testing.T, a, b []byte) {
		pages := make([]byte, headerSize)
		copy(pages[:pageSize], a)
		copy(pages[pageSize:], b)
		h, err := newestHeader(pages)
		if err != nil {
			if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, block.ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		again, err := decodeHeader(h.encode())
		if err != nil || again != h {
			t.Fatalf("%+v became %+v, %v", h, again, err)
		}
	})
}

func FuzzDecodeRecord(f *testing.F) {
	var p, q [slotSize]byte
	s := slot{counter: 7, extent: 5, flags: present | written, born: 2, behind: 1, unflushed: 3}
	s.encode(p[:])
	s.counter++
	s.encode(q[:])
	f.Add(p[:], q[:], uint32(5))
	f.Add(p[:], []byte{1}, uint32(5))
	f.Add([]byte{}, q[:], uint32(4))
	f.Fuzz(func(t *testing.T, a, b []byte, e uint32) {
		var pa, pb [slotSize]byte
		copy(pa[:], a)
		copy(pb[:], b)
		s, state := decodeRecord(pa[:], pb[:], block.ExtentIndex(e))
		if s.extent != block.ExtentIndex(e) {
			t.Fatalf("record of %d answers for %d", s.extent, e)
		}
		if state != good {
			if s != (slot{extent: s.extent}) {
				t.Fatalf("no good slot, but %+v", s)
			}
			return
		}
		sa, stateA := decodeSlot(pa[:], s.extent, 0)
		sb, stateB := decodeSlot(pb[:], s.extent, 1)
		for n, other := range []slot{sa, sb} {
			if []slotState{stateA, stateB}[n] == good && other.counter > s.counter {
				t.Fatalf("slot %+v is newer than %+v", other, s)
			}
		}
		if stateA == damaged || stateB == damaged {
			if s.flags&present != 0 && (s.behind&s.unflushed != ^uint64(0) || s.flags&written == 0) {
				t.Fatalf("beside a damaged slot: %+v", s)
			}
		}
	})
}

func FuzzDecodeJSON(f *testing.F) {
	id := Identity{Disk: block.DiskID{UUID: block.NewUUID()}, Cluster: labCluster, Format: 1, Geometry: block.Geometry{ExtentSize: extent}}
	f.Add(id.encode())
	d, _ := Description{ID: volA, Name: "n\n\"", Size: 4096, Policy: map[string]string{"a": "b"}}.encode()
	f.Add(d)
	f.Add([]byte(`{"type":"gabion-disk","format":9}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		if id, err := decodeIdentity(p); err == nil {
			if again, err := decodeIdentity(id.encode()); err != nil || again != id {
				t.Fatalf("%+v became %+v, %v", id, again, err)
			}
		} else if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, block.ErrFormat) {
			t.Fatal(err)
		}
		if d, err := decodeDescription(p); err == nil {
			text, err := d.encode()
			if err != nil && !errors.Is(err, block.ErrTooLarge) {
				t.Fatal(err)
			}
			if again, err2 := decodeDescription(text); err == nil && (err2 != nil || again.Name != d.Name || again.ID != d.ID) {
				t.Fatalf("%+v became %+v, %v", d, again, err2)
			}
		}
	})
}
