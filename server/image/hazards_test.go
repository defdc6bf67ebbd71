package image

import (
	"errors"
	"runtime"
	"sync"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

func TestH09NeighbouringSectors(t *testing.T) {
	for _, mode := range []Mode{Buffered, Direct} {
		t.Run(mode.String(), func(t *testing.T) {
			fs := vfs.Inject(labFS(t), func(op vfs.Op) error {
				if op.Kind == "write" {
					runtime.Gosched() // let the others in between a read and the write that belongs to it
				}
				return nil
			})
			i := newImage(t, openDisk(t, fs, func(c *Config) { c.Mode = mode }), volA, extent)
			const rounds = 200
			var clients sync.WaitGroup
			for s := range int64(8) {
				clients.Go(func() {
					for n := range rounds {
						if err := do(i, put(n, 4096+s*sectorSize, fill(byte(n+int(s)), sectorSize))); err != nil {
							t.Error(err)
						}
					}
				})
			}
			clients.Wait()
			for s := range int64(8) {
				isAll(t, get(t, i, 4096+s*sectorSize, sectorSize), byte(rounds-1+int(s)))
			}
		})
	}
}

func TestH19FsyncFailsOnce(t *testing.T) {
	for _, kind := range []string{"eio", "enospc"} { // what a failed sync dropped is gone, whatever it was for
		t.Run(kind, func(t *testing.T) {
			m := labFS(t)
			fs, rules := inject(t, m)
			d := openDisk(t, fs)
			before := d.Incarnation()
			var volumes []*Image
			for n := range byte(10) {
				volumes = append(volumes, newImage(t, d, block.VolumeID{UUID: block.UUID{1, n}}, extent))
				ok(t, do(volumes[n], put(1, 0, fill(n, 4096))))
			}
			ok(t, rules.Add("datasync head.img #1 "+kind))
			syncs := d.Counters().Syncs
			want(t, volumes[3].Sync(), block.ErrIO)
			select {
			case <-d.Failed():
			default:
				t.Fatal("the instance lives on")
			}
			want(t, d.Err(), block.ErrIO)
			if errors.Is(d.Err(), block.ErrNoSpace) {
				t.Fatal("whoever waits for space would wait for ever")
			}
			// The next fdatasync would succeed; nobody gets to ask for it.
			for _, i := range volumes {
				want(t, i.Sync(), block.ErrIO)
				want(t, do(i, put(2, 0, fill(9, 4096))), block.ErrIO)
				want(t, i.ReadAt(make([]byte, 512), 0), block.ErrIO)
				_, err := i.TryWrite(put(2, 0, fill(9, 4096)))
				want(t, err, block.ErrIO)
			}
			if n := d.Counters().Syncs - syncs; n != 1 {
				t.Fatalf("%d syncs after one failed", n)
			}
			ok(t, d.Close())
			again := openDisk(t, fs)
			if c := again.Incarnation().Since(before); c != block.Rebooted {
				t.Fatalf("continuity %v after a failed sync", c)
			}
			if !getImage(t, again, volumes[3].ID()).Unflushed() {
				t.Fatal("what was written is not marked")
			}
		})
	}
}

// The proof of continuity is gone before anybody hears of the error.
func TestH19NobodyIsToldBeforeTheInstanceEnds(t *testing.T) {
	m := labFS(t)
	var d *Disk
	order := ""
	fs := vfs.Inject(m, func(op vfs.Op) error {
		switch {
		case op.Kind == "datasync" && op.Name == imageFile:
			return &vfs.OpError{Op: op.Kind, Name: op.Name, Kind: block.ErrIO}
		case op.Kind == "unlink" && op.Name == "disk.json", op.Kind == "syncdir" && op.Name == "/state":
			if d != nil && d.Err() != nil {
				t.Error("the error was told first")
			}
			order += op.Kind + " "
		}
		return nil
	})
	d = openDisk(t, fs)
	order = ""
	i := newImage(t, d, volA, extent)
	want(t, i.Sync(), block.ErrIO)
	if order != "unlink syncdir " {
		t.Fatalf("the instance file: %q", order)
	}
}

func TestH24RemountIsNotContinuity(t *testing.T) {
	reboot := func(c *Config) { c.Boot = block.UUID{0xbb} }
	same := func(*Config) {}
	tests := map[string]struct {
		between func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, d *Disk)
		config  func(*Config)
		want    block.Continuity
	}{
		"restart":  {func(t *testing.T, _ *vfs.Mem, _ *vfs.Rules, d *Disk) { ok(t, d.Close()) }, same, block.Restarted},
		"kill":     {func(_ *testing.T, m *vfs.Mem, _ *vfs.Rules, _ *Disk) { m.Kill() }, same, block.Restarted},
		"reboot":   {func(t *testing.T, _ *vfs.Mem, _ *vfs.Rules, d *Disk) { ok(t, d.Close()) }, reboot, block.Rebooted},
		"remount":  {func(t *testing.T, m *vfs.Mem, _ *vfs.Rules, d *Disk) { ok(t, d.Close()); m.Remount() }, same, block.Rebooted},
		"no state": {func(t *testing.T, _ *vfs.Mem, _ *vfs.Rules, d *Disk) { ok(t, d.Close()) }, func(c *Config) { c.InstanceFile = "" }, block.Rebooted},
		"read error, then killed": {func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, d *Disk) {
			ok(t, rules.Add("read head.img #1 eio"))
			i := getImage(t, d, volA)
			want(t, i.ReadAt(make([]byte, 4096), 0), block.ErrIO)
			ok(t, i.ReadAt(make([]byte, 4096), 0)) // the running instance goes on
			ok(t, d.Err())
			m.Kill()
		}, same, block.Rebooted},
		"write error, then killed": {func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, d *Disk) {
			ok(t, rules.Add("write head.img #1 eio"))
			want(t, do(getImage(t, d, volA), put(2, 0, fill(1, 512))), block.ErrIO)
			want(t, d.Err(), block.ErrIO)
			m.Kill()
		}, same, block.Rebooted},
		"record error, then killed": {func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, d *Disk) {
			ok(t, rules.Add("datasync head.idx #1 eio"))
			want(t, do(getImage(t, d, volA), put(2, region, fill(1, 512))), block.ErrIO)
			m.Kill()
		}, same, block.Rebooted},
		"error while opening": {func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, _ *Disk) {
			m.Kill()
			ok(t, rules.Add("syncdir volumes #1 eio")) // reported once; a second open finds nothing wrong
			_, err := Open(vfs.Inject(m, rules.Hook), labConfig())
			want(t, err, block.ErrIO)
		}, same, block.Rebooted},
		"error while opening an image": {func(t *testing.T, m *vfs.Mem, rules *vfs.Rules, d *Disk) {
			ok(t, d.Close())
			fs := vfs.Inject(m, rules.Hook)
			d, err := Open(fs, labConfig())
			ok(t, err)
			ok(t, rules.Add("read head.idx #1 eio"))
			_, err = d.Image(volA)
			want(t, err, block.ErrIO)
			ok(t, d.Close())
		}, same, block.Rebooted},
		"damaged instance file": {func(t *testing.T, m *vfs.Mem, _ *vfs.Rules, d *Disk) {
			ok(t, d.Close())
			state, err := m.OpenDir("/state")
			ok(t, err)
			ok(t, vfs.Replace(state, "disk.json", []byte("{")))
		}, same, block.Rebooted},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := labFS(t)
			fs, rules := inject(t, m)
			d := openDisk(t, fs)
			ok(t, do(newImage(t, d, volA, extent), put(1, 0, fill(1, 4096))))
			before := d.Incarnation()
			test.between(t, m, rules, d)
			rules.Clear()
			if got := openDisk(t, fs, test.config).Incarnation().Since(before); got != test.want {
				t.Fatalf("continuity %v, want %v", got, test.want)
			}
		})
	}
}

func TestH25FirstWriteToNewFiles(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, 2*extent)
	ok(t, do(i, put(1, 0, fill(1, 4096)))) // a new image, after birth
	ok(t, i.Sync())
	ok(t, do(i, put(2, extent+region, fill(2, 512)))) // a hole
	ok(t, i.Sync())
	ok(t, i.Grow(3*extent))
	w := put(3, 3*extent-4096, fill(3, 4096)) // what growth added, with FUA
	w.Durable = true
	ok(t, do(i, w))
	ok(t, do(i, put(4, 0, fill(4, 4096)))) // never flushed
	for seed := range uint64(50) {
		i := getImage(t, openDisk(t, m.Crash(seed)), volA)
		if lost := i.Lost([]block.RunIndex{0}); i.Size() != 3*extent || len(lost) > 0 {
			t.Fatalf("seed %d: size %d, lost %v", seed, i.Size(), lost)
		}
		isAll(t, get(t, i, extent+region, 512), 2)
		isAll(t, get(t, i, extent+region+512, 512), 0)
		isAll(t, get(t, i, 3*extent-4096, 4096), 3)
		for s := int64(0); s < 4096; s += sectorSize {
			if p := get(t, i, s, sectorSize); p[0] != 1 && p[0] != 4 {
				t.Fatalf("seed %d: sector %d is %d", seed, s/sectorSize, p[0])
			}
		}
	}
}

func TestH26TornRecordEverywhere(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, 4*extent)
	for e := range int64(4) {
		ok(t, do(i, put(1, e*extent, fill(byte(e+1), 4096))))
	}
	ok(t, i.Sync())
	ok(t, i.ClearMarks(1, Behind|Unflushed))
	newest := func(e block.ExtentIndex) int64 {
		ok(t, i.index.load(e))
		return i.index.record(e).offset()
	}
	torn, both := newest(1), newest(2)
	ok(t, d.Close())

	scribble(t, m, torn) // the newer slot of extent 1
	scribble(t, m, both) // both slots of extent 2
	scribble(t, m, otherSlot(both))
	d = openDisk(t, m)
	i = getImage(t, d, volA)
	if lost := i.Lost([]block.RunIndex{0}); len(lost) != 1 || lost[0] != 2 {
		t.Fatalf("lost %v, want extent 2 alone", lost)
	}
	for _, e := range []int64{0, 1, 3} {
		isAll(t, get(t, i, e*extent, 4096), byte(e+1))
	}
	want(t, i.ReadAt(make([]byte, 512), 2*extent), block.ErrCorrupt)
	want(t, do(i, put(1, 2*extent, fill(1, 512))), block.ErrPrecondition)
	want(t, i.Birth(1, []block.RunIndex{0}), block.ErrPrecondition) // it may stand for data
	// The damaged slot may have held any mark.
	if behind, unflushed := marksOf(i, 1); behind != ^uint64(0) || unflushed != ^uint64(0) {
		t.Fatalf("marks %x %x after damage", behind, unflushed)
	}
	if b, u := marksOf(i, 0); b|u != 0 {
		t.Fatalf("an undamaged record has marks %x %x", b, u)
	}
	// A torn header is the older one's turn.
	ok(t, i.Seal(2))
	ok(t, i.Seal(3))
	last := i.index.header.offset()
	ok(t, d.Close())
	scribble(t, m, last)
	d = openDisk(t, m)
	if i = getImage(t, d, volA); i.Generation() != 2 {
		t.Fatalf("generation %d after the seal at 3 was torn", i.Generation())
	}
	// The record heals with its next write.
	ok(t, i.Sync())
	ok(t, i.ClearMarks(9, Behind|Unflushed))
	ok(t, d.Close())
	i = getImage(t, openDisk(t, m), volA)
	if i.Unflushed() {
		t.Fatal("still marked")
	}
}

// otherSlot is the place of the same record's other slot.
func otherSlot(off int64) int64 {
	if (off-headerSize)%groupSize < pageSize {
		return off + pageSize
	}
	return off - pageSize
}

// scribble damages some bytes of volume A's index.
func scribble(t *testing.T, m *vfs.Mem, off int64) {
	t.Helper()
	dir, err := m.OpenDir("/disk/volumes/" + volA.String())
	ok(t, err)
	f, err := dir.Open(indexFile, 0)
	ok(t, err)
	_, err = f.WriteAt([]byte("torn"), off+20)
	ok(t, err)
	ok(t, f.Close())
}

func TestH27RecordBeforeData(t *testing.T) {
	m := labFS(t)
	checked := 0
	var lab *Image
	fs := vfs.Inject(m, func(op vfs.Op) error {
		changes := op.Kind == "write" || op.Kind == "trywrite" || op.Kind == "punch" || op.Kind == "zero"
		if op.Name != imageFile || !changes {
			return nil
		}
		checked++
		// What a power cut at this moment leaves for certain already marks the range.
		i := getImage(t, openDisk(t, m.Crash(0)), volA)
		for e := i.index.geometry.Extent(op.Offset); e <= i.index.geometry.Extent(op.Offset+op.Length-1); e++ {
			behind, unflushed := marksOf(i, e)
			if need := i.index.regions(e, op.Offset, op.Length); need&^(behind&unflushed) != 0 {
				t.Errorf("%v of %d bytes at %d: extent %d needs %x, has %x and %x", op.Kind, op.Length, op.Offset, e, need, behind, unflushed)
			}
		}
		return nil
	})
	lab = newImage(t, openDisk(t, fs), volA, 4*extent)
	for n, w := range []*block.IO{
		put(1, 0, fill(1, 512)),
		put(2, region-512, fill(1, 1024)),
		put(3, extent-4096, fill(1, 2*extent)),
		erase(block.OpTrim, false, region*7, 17<<10),
		erase(block.OpZero, true, 3*extent+region*9, region),
		erase(block.OpZero, false, 3*extent, 512),
	} {
		if done, err := lab.TryWrite(w); done || err != nil {
			t.Fatalf("%d: an unmarked region was written in line: %v", n, err)
		}
		ok(t, do(lab, w))
	}
	if checked < 5 { // the last one finds a hole
		t.Fatalf("only %d writes seen", checked)
	}
}

func TestH28ClearRacesWithAWrite(t *testing.T) {
	m := labFS(t)
	held, release := make(chan struct{}), make(chan struct{})
	hold := false
	fs := vfs.Inject(m, func(op vfs.Op) error {
		if hold && op.Kind == "write" && op.Name == imageFile {
			close(held)
			<-release
		}
		return nil
	})
	i := newImage(t, openDisk(t, fs), volA, 3*extent)
	marked := func(e block.ExtentIndex) bool { b, u := marksOf(i, e); return b&u != 0 }

	for e := range int64(3) {
		ok(t, do(i, put(90, e*extent, fill(1, 512))))
	}
	ok(t, i.ClearMarks(90, Behind|Unflushed))
	if !marked(0) {
		t.Fatal("cleared what no sync has covered")
	}
	ok(t, i.Sync())
	ok(t, do(i, put(91, 0, fill(2, 512)))) // overtakes the clear in extent 0
	hold = true
	write := make(chan error)
	go func() { write <- i.Write(put(89, extent, fill(2, 512))) }() // in flight in extent 1, an old number
	<-held
	ok(t, i.ClearMarks(90, Behind|Unflushed))
	if !marked(0) || !marked(1) || marked(2) {
		t.Fatalf("marked: %v %v %v; want the overtaken and the running one", marked(0), marked(1), marked(2))
	}
	hold = false
	close(release)
	ok(t, <-write)
	ok(t, i.ClearMarks(91, Behind|Unflushed))
	if !marked(0) || !marked(1) {
		t.Fatal("cleared after a sync that did not cover the write")
	}
	// A power cut now: what is not synced is still marked.
	cut := getImage(t, openDisk(t, m.Crash(1)), volA)
	if b, u := marksOf(cut, 0); b&u&1 == 0 {
		t.Fatal("an unsynced write is not marked on the disk")
	}
	ok(t, i.Sync())
	ok(t, i.ClearMarks(91, Unflushed))
	if b, u := marksOf(i, 0); b == 0 || u != 0 {
		t.Fatalf("cleared only unflushed: behind %x, unflushed %x", b, u)
	}
	// Synced here, but the flush that the clear stands for did not cover it everywhere.
	ok(t, do(i, put(92, 0, fill(3, 512))))
	ok(t, i.Sync())
	ok(t, i.ClearMarks(91, Behind|Unflushed))
	if !marked(0) {
		t.Fatal("cleared beyond upto")
	}
	// A new generation counts its own sequences.
	ok(t, i.Seal(2))
	ok(t, i.ClearMarks(0, Behind|Unflushed))
	if b, u := marksOf(i, 0); b|u != 0 || i.Unflushed() {
		t.Fatal("older generations' writes stay marked")
	}
	ok(t, i.ClearMarks(0, Behind|Unflushed))
}
