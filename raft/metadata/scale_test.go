package metadata

import (
	"fmt"
	"io"
	"testing"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// TestH82ManyAtOnce: a hundred thousand runs are born in a few hundred
// commands, while a snapshot from half-way is stuck in its writer. It neither
// holds up Apply nor sees anything that came after it.
func TestH82ManyAtOnce(t *testing.T) {
	const runs, volumes = 100_000, 4
	s := prepared(t)
	for i := range volumes {
		s.must(create(fmt.Sprint("v", i+1), fmt.Sprint("pvc", i), 25_000<<30))
		s.open(fmt.Sprint("v", i+1))
	}
	state, index, commands := s.State, s.next, 0
	r, w := io.Pipe()
	var stuck *View
	wrote := make(chan error, 1)
	for from := 0; from < runs/volumes; from += maxRuns {
		if from > runs/volumes/2 && stuck == nil {
			stuck = state.View()
			go func() { wrote <- Encode(w, stuck); w.Close() }()
		}
		for i := range volumes {
			index++
			commands++
			c := birth(state.View(), fmt.Sprint("v", i+1), from, min(maxRuns, runs/volumes-from))
			if res := state.Apply(index, c); res.Err != nil {
				t.Fatal(res.Err)
			}
		}
	}
	if err := Check(state.View()); err != nil {
		t.Fatal(err)
	}
	for i := range volumes {
		if n := state.View().RunCount(volumeID(fmt.Sprint("v", i+1))); n != runs/volumes {
			t.Errorf("%d runs are born", n)
		}
	}
	if commands > runs/maxRuns+volumes {
		t.Errorf("%d commands for %d runs", commands, runs)
	}
	half, err := Decode(r)
	if err != nil || <-wrote != nil {
		t.Fatal(err)
	}
	if Hash(half) != Hash(stuck) || half.RunCount(volumeID("v1")) >= runs/volumes {
		t.Errorf("the snapshot has %d runs", half.RunCount(volumeID("v1")))
	}
	// Deleting takes the runs along without walking them.
	if n := testing.AllocsPerRun(1, func() {
		index++
		state.Apply(index, remove("v1"))
	}); n > 500 {
		t.Errorf("deleting a volume of %d runs takes %.0f allocations", runs/volumes, n)
	}
}

func large(b failer, runs int) *checked {
	s := prepared(b)
	s.must(&metapb.Command{Kind: &metapb.Command_PutDisks{PutDisks: &metapb.PutDisks{Node: "n1", Disks: []*metapb.Disk{
		{Id: id("d1"), Capacity: 1 << 48, State: metapb.Disk_ONLINE}}}}})
	for i := range (runs + 49_999) / 50_000 {
		short := fmt.Sprint("v", i+1)
		state := s.State
		for _, c := range []*metapb.Command{create(short, short, block.MaxVolumeSize),
			{Kind: &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{VolumeId: id(short), Node: "n1", Process: "p1"}}}} {
			s.next++
			if r := state.Apply(s.next, c); r.Err != nil {
				b.Fatalf("%v", r.Err)
			}
		}
		s.next++
		state.Apply(s.next, fenced(state.View(), short, &metapb.FencedCommand{Kind: &metapb.FencedCommand_Takeover{Takeover: &metapb.Takeover{}}}))
		for from := 0; from < 50_000; from += maxRuns {
			s.next++
			if r := state.Apply(s.next, birth(state.View(), short, from, min(maxRuns, 50_000-from))); r.Err != nil {
				b.Fatalf("%v", r.Err)
			}
		}
	}
	return s
}

// BenchmarkBirth is one command of 256 births in a cell of many runs.
func BenchmarkBirth(b *testing.B) {
	s := large(b, 200_000)
	base, from := s.View(), 50_000
	for b.Loop() {
		if from += maxRuns; from+maxRuns > 65_536 {
			s.Restore(base)
			from = 50_000
		}
		s.next++
		if r := s.Apply(s.next, birth(s.View(), "v1", from, maxRuns)); r.Err != nil {
			b.Fatal(r.Err)
		}
	}
}

// BenchmarkCreate is one command in a cell of many volumes, each time with a volume deleted again.
func BenchmarkCreate(b *testing.B) {
	s := prepared(b)
	for i := range 10_000 {
		s.next++
		s.Apply(s.next, create(fmt.Sprint("v", i+1), fmt.Sprint("pvc", i), block.SizeQuantum))
	}
	n := 1_000_000
	for b.Loop() {
		n++
		s.next += 2
		if r := s.Apply(s.next-1, create(fmt.Sprint("v", n), "new", block.SizeQuantum)); r.Err != nil {
			b.Fatal(r.Err)
		}
		s.Apply(s.next, remove(fmt.Sprint("v", n)))
	}
}

// BenchmarkEncode and BenchmarkDecode are of a million runs.
func BenchmarkEncode(b *testing.B) {
	v := large(b, 1_000_000).View()
	for b.Loop() {
		if err := Encode(io.Discard, v); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	raw := encoded(b, large(b, 1_000_000).View())
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		r, w := io.Pipe()
		go func() {
			_, err := w.Write(raw)
			w.CloseWithError(err)
		}()
		if _, err := Decode(r); err != nil {
			b.Fatal(err)
		}
	}
}
