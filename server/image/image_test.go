package image

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/vfs"
)

func TestImagesOnADisk(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	_, err := d.Image(volA)
	want(t, err, block.ErrNotFound)
	want(t, d.Quarantine(volA, "x"), block.ErrNotFound)
	_, err = d.CreateImage(Description{ID: volA, Size: 1000})
	want(t, err, block.ErrInvalid)

	a := newImage(t, d, volA, extent)
	again, err := d.CreateImage(Description{ID: volA, Name: "other", Size: 2 * extent})
	ok(t, err)
	if again != a || a.Size() != extent || getImage(t, d, volA) != a {
		t.Fatal("a repeated creation made something else")
	}
	newImage(t, d, volB, extent)
	if ids := d.Images(); fmt.Sprint(ids) != fmt.Sprint([]block.VolumeID{volA, volB}) {
		t.Fatalf("images %v", ids)
	}
	for n := range 2 { // twice under the same name
		if n > 0 {
			newImage(t, d, volA, extent)
		}
		ok(t, d.Quarantine(volA, "test"))
		want(t, a.ReadAt(make([]byte, 512), 0), block.ErrShutdown)
		want(t, a.Sync(), block.ErrShutdown)
	}
	if q := d.Quarantined(); len(q) != 1 || q[0] != volA || len(d.Images()) != 1 {
		t.Fatalf("quarantined %v, images %v", q, d.Images())
	}
	ok(t, d.Purge(volA))
	ok(t, d.Purge(volA))
	if q := d.Quarantined(); len(q) != 0 {
		t.Fatalf("quarantined %v", q)
	}
	ok(t, d.Close())
	ok(t, d.Close())
	_, err = d.Image(volB)
	want(t, err, block.ErrShutdown)
	if ids := openDisk(t, m).Images(); len(ids) != 1 {
		t.Fatalf("images %v", ids)
	}
}

func TestUnfinishedImagesGo(t *testing.T) {
	m := labFS(t)
	ok(t, m.MkdirAll("/disk/volumes/"+unfinished+volA.String()))
	ok(t, m.MkdirAll("/disk/volumes/stranger"))
	d := openDisk(t, m)
	list, err := d.volumes.ReadDir()
	ok(t, err)
	if len(list) != 1 || list[0].Name != "stranger" {
		t.Fatalf("left: %v", list)
	}
}

func TestSealGrowDescribe(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, extent)
	ok(t, i.Seal(7))
	ok(t, i.Seal(7))
	want(t, i.Seal(6), block.ErrStale)
	want(t, i.Grow(4096), block.ErrInvalid)
	want(t, i.Grow(extent+1), block.ErrInvalid)
	want(t, i.Grow(block.MaxVolumeSize+4096), block.ErrTooLarge)
	ok(t, i.Grow(block.MaxVolumeSize))
	ok(t, i.Grow(block.MaxVolumeSize))
	want(t, i.SetDescription(Description{ID: volB}), block.ErrInvalid)
	want(t, i.SetDescription(Description{ID: volA, Name: string(fill('x', 1<<20))}), block.ErrTooLarge)
	ok(t, i.SetDescription(Description{ID: volA, Name: "new", Version: 5, Policy: map[string]string{"a": "b"}}))
	ok(t, d.Close())
	i = getImage(t, openDisk(t, m), volA)
	desc, described := i.Description()
	if i.Generation() != 7 || i.Size() != block.MaxVolumeSize || !described || desc.Name != "new" ||
		desc.Size != i.Size() || desc.Version != 5 || desc.Policy["a"] != "b" {
		t.Fatalf("%d %d %+v", i.Generation(), i.Size(), desc)
	}
}

// A caller is covered only by a sync that started after its call, and callers share.
func TestSyncsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := labFS(t)
		started, proceed := make(chan int), make(chan error)
		var hold atomic.Bool
		n := 0
		fs := vfs.Inject(m, func(op vfs.Op) error {
			if !hold.Load() || op.Kind != "datasync" || op.Name != imageFile {
				return nil
			}
			n++
			started <- n
			return <-proceed
		})
		d := openDisk(t, fs)
		i := newImage(t, d, volA, extent)
		ok(t, i.Sync())
		hold.Store(true)
		ok(t, i.Sync()) // nothing to do
		ok(t, do(i, put(1, 0, fill(1, 512))))
		var done atomic.Int32
		var callers sync.WaitGroup
		call := func(count int) {
			for range count {
				callers.Go(func() {
					if err := i.Sync(); err != nil {
						t.Error(err)
					}
					done.Add(1)
				})
			}
		}
		call(1)
		<-started
		ok(t, do(i, put(2, 0, fill(2, 512)))) // not covered by the sync that is running
		call(10)
		synctest.Wait()
		proceed <- nil
		if second := <-started; second != 2 || done.Load() > 1 {
			t.Fatalf("sync %d, %d callers answered by the first", second, done.Load())
		}
		proceed <- nil
		callers.Wait()
		if n != 2 {
			t.Fatalf("%d syncs for eleven callers", n)
		}
		// A write that ends while a sync runs is not covered by it.
		ok(t, do(i, put(3, 0, fill(3, 512))))
		call(1)
		<-started
		ok(t, do(i, put(4, 0, fill(4, 512))))
		proceed <- nil
		callers.Wait()
		call(1)
		if third := <-started; third != 4 {
			t.Fatalf("sync %d", third)
		}
		proceed <- nil
		callers.Wait()
		hold.Store(false)
	})
}

// Concurrent first writers share commits of their marks.
func TestFirstWritersShareCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started, proceed := make(chan struct{}), make(chan struct{})
		var hold atomic.Bool
		fs := vfs.Inject(labFS(t), func(op vfs.Op) error {
			if hold.Load() && op.Kind == "datasync" && op.Name == indexFile {
				started <- struct{}{}
				<-proceed
			}
			return nil
		})
		d := openDisk(t, fs)
		i := newImage(t, d, volA, 16*extent)
		before := d.Counters().RecordSyncs
		hold.Store(true)
		var writers sync.WaitGroup
		for n := range int64(40) {
			writers.Go(func() {
				if err := do(i, put(int(n), n*4*region, fill(1, 512))); err != nil {
					t.Error(err)
				}
			})
		}
		<-started
		synctest.Wait()
		hold.Store(false)
		close(proceed)
		writers.Wait()
		if n := d.Counters().RecordSyncs - before; n > 2 {
			t.Fatalf("%d commits for 40 concurrent writers", n)
		}
	})
}

// A sequential writer pays a few commits per extent, a random one one per region.
func TestMarksAhead(t *testing.T) {
	d := openDisk(t, labFS(t))
	i := newImage(t, d, volA, 16*extent)
	commits := func(write func()) uint64 {
		before := d.Counters().RecordSyncs
		write()
		return d.Counters().RecordSyncs - before
	}
	if n := commits(func() {
		for off := int64(0); off < extent; off += 512 {
			ok(t, do(i, put(1, off, fill(1, 512))))
		}
	}); n > 7 {
		t.Fatalf("%d commits for a sequential writer", n)
	}
	_ = commits(func() {
		for r := int64(0); r < 64; r += 2 {
			ok(t, do(i, put(1, extent+r*region, fill(1, 512))))
		}
	})
	if b, u := marksOf(i, 1); b != 0x5555555555555555 || u != b {
		t.Fatalf("random writes marked %x", b)
	}
	if n := commits(func() { ok(t, do(i, put(1, 0, fill(1, extent)))) }); n != 0 {
		t.Fatalf("%d commits for marked regions", n)
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	fs, c := realDisk(t)
	d, err := Open(fs, c)
	ok(t, err)
	defer d.Close()
	i := newImage(t, d, volA, extent)
	p := make([]byte, 4096)
	w := put(1, 0, p)
	ok(t, do(i, w))
	records := d.Counters().RecordSyncs
	if n := testing.AllocsPerRun(200, func() {
		if i.Reserve(w) != nil {
			t.Error("no credit")
		}
		if done, err := i.TryWrite(w); !done && (err != nil || i.Write(w) != nil) {
			t.Error("not written")
		}
		if done, err := i.TryReadAt(p, 0); !done && (err != nil || i.ReadAt(p, 0) != nil) {
			t.Error("not read")
		}
	}); n != 0 {
		t.Fatalf("%v allocations per write and read", n)
	}
	if n := d.Counters().RecordSyncs - records; n != 0 {
		t.Fatalf("%d record writes for a marked region", n)
	}
}

// Thin: the largest volume takes no memory and no space until it is written.
func TestIdleVolumesAreSmall(t *testing.T) {
	const count = 200
	var disks []*Disk
	memory := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	m := vfs.NewMem()
	ok(t, m.MkdirAll("/disk"))
	ok(t, m.MkdirAll("/state"))
	g := block.Geometry{ExtentSize: block.DefaultExtentSize}
	_, err := Init(m, "/disk", labCluster, g)
	ok(t, err)
	big := func(c *Config) { c.Geometry = g }
	d := openDisk(t, m, big)
	for n := range count {
		i, err := d.CreateImage(Description{ID: block.VolumeID{UUID: block.UUID{1, byte(n)}}, Size: block.MaxVolumeSize})
		ok(t, err)
		ok(t, i.Seal(1))
		// A few runs at both ends, written, flushed and gone idle.
		runs := []block.RunIndex{0, 1, 2, 65535}
		ok(t, i.Birth(1, runs))
		ok(t, do(i, put(1, block.MaxVolumeSize-4096, fill(1, 4096))))
		ok(t, i.Sync())
		ok(t, i.ClearMarks(1, Behind|Unflushed))
		if used, err := i.Allocated(); err != nil || used > 64<<10 {
			t.Fatalf("%d bytes on the disk, %v", used, err)
		}
	}
	ok(t, d.Close())
	before := memory()
	disks = append(disks, openDisk(t, m, big))
	for _, id := range disks[0].Images() {
		i := getImage(t, disks[0], id)
		if lost := i.Lost([]block.RunIndex{0, 1, 2, 65535}); len(lost) > 0 || i.Unflushed() {
			t.Fatalf("lost %v, unflushed %v", lost, i.Unflushed())
		}
	}
	if each := int64(memory()-before) / count; each > 16<<10 {
		t.Fatalf("%d bytes of memory per idle volume", each)
	}
	runtime.KeepAlive(disks)
}

func TestFaultPoints(t *testing.T) {
	set := new(fault.Set)
	m := labFS(t)
	ok(t, set.Arm(fault.Rule{Point: "disk.open", Error: "unavailable", Count: 1}))
	c := labConfig()
	c.Fault = set
	_, err := Open(m, c)
	want(t, err, block.ErrUnavailable)
	d := openDisk(t, m, func(c *Config) { c.Fault = set })
	i := newImage(t, d, volA, extent)
	arm := func(point, kind string) {
		set.Clear("")
		ok(t, set.Arm(fault.Rule{Point: point, Match: volA.String(), Error: kind, Count: 1}))
	}
	arm("disk.space", "nospace")
	want(t, do(i, put(1, 0, fill(1, 512))), block.ErrNoSpace)
	arm("disk.record", "nospace")
	want(t, do(i, put(1, 0, fill(1, 512))), block.ErrNoSpace)
	arm("disk.write", "nospace")
	want(t, do(i, put(1, 0, fill(1, 512))), block.ErrNoSpace)
	ok(t, do(i, put(1, 0, fill(1, 512))))
	arm("disk.read", "io")
	want(t, i.ReadAt(make([]byte, 512), 0), block.ErrIO)
	isAll(t, get(t, i, 0, 512), 1)
	ok(t, d.Err())
	if d.space.held.Load() != 0 {
		t.Fatal("credit is lost")
	}
	arm("disk.sync", "io")
	want(t, i.Sync(), block.ErrIO)
	want(t, d.Err(), block.ErrIO)
	if errors.Is(d.Err(), block.ErrNoSpace) {
		t.Fatal("wrong cause")
	}
}

// Many clients, all operations, under the race detector.
func TestConcurrentUse(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, 32*extent)
	var all sync.WaitGroup
	for c := range int64(8) { // each its own quarter of an extent, as the range lock has it
		all.Go(func() {
			off := c * extent / 4
			for n := range 60 {
				p := fill(byte(n), 4096+512*n)
				if err := do(i, put(n, off+int64(n%3)*region, p)); err != nil {
					t.Error(err)
				}
				got := make([]byte, len(p))
				if err := i.ReadAt(got, off+int64(n%3)*region); err != nil || string(got) != string(p) {
					t.Error("read something else", err)
				}
				if n%10 == 0 {
					_ = i.Sync()
				}
			}
		})
	}
	all.Go(func() {
		for n := range 30 {
			if err := i.ClearMarks(block.Sequence(n), Behind|Unflushed); err != nil {
				t.Error(err)
			}
			_ = i.Unflushed()
			_ = i.Lost([]block.RunIndex{0, 1})
			_, _ = i.Status(nil, 0, 16*extent, 10)
			_ = d.Check()
			_, _ = d.Usage()
		}
	})
	for range 2 {
		all.Go(func() {
			if err := i.Birth(1, []block.RunIndex{1}); err != nil {
				t.Error(err)
			}
			if err := i.Grow(33 * extent); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	ok(t, d.Close())
}

func TestHeldOffReadsAreHandedOff(t *testing.T) {
	fs, rules := inject(t, labFS(t))
	i := newImage(t, openDisk(t, fs), volA, extent)
	p := make([]byte, 4096)
	tries := func(text string) {
		t.Helper()
		rules.Clear()
		ok(t, do(i, put(1, 0, p))) // marks the region
		ok(t, rules.Add("tryread * * "+text))
		ok(t, rules.Add("trywrite * * "+text))
		if done, err := i.TryReadAt(p, 0); done || err != nil {
			t.Fatalf("%s: %v %v", text, done, err)
		}
		if done, err := i.TryWrite(put(2, 0, p)); done || err != nil {
			t.Fatalf("%s: %v %v", text, done, err)
		}
	}
	tries("again")
	rules.Clear()
	if done, err := i.TryWrite(put(2, 0, p)); !done || err != nil {
		t.Fatalf("%v %v", done, err)
	}
	tries("enospc")
	tries("unsupported")
}

// WriteCached does what only the page cache can hold up, and nothing else.
func TestWriteCached(t *testing.T) {
	fs := labFS(t)
	d := openDisk(t, fs)
	i := newImage(t, d, block.VolumeID{UUID: block.NewUUID()}, 4*block.MinExtentSize)
	w := put(1, 0, fill(1, 4096))
	ok(t, i.Reserve(w))
	if done, err := i.WriteCached(w); done || err != nil {
		t.Fatalf("into an unmarked region: done %v, %v", done, err)
	}
	ok(t, i.Write(w))
	w = put(2, 0, fill(2, 4096))
	ok(t, i.Reserve(w))
	if done, err := i.WriteCached(w); !done || err != nil {
		t.Fatalf("into a marked region: done %v, %v", done, err)
	}
	isAll(t, get(t, i, 0, 4096), 2)
	ok(t, i.Sync())
	z := erase(block.OpTrim, false, 0, 4096)
	if done, err := i.WriteCached(z); done || err != nil {
		t.Fatalf("a trim: done %v, %v", done, err)
	}
	ok(t, d.Close())
	d = openDisk(t, fs, func(c *Config) { c.Mode = Direct })
	i = getImage(t, d, i.ID())
	w = put(3, 0, fill(3, 4096))
	ok(t, i.Reserve(w))
	if done, err := i.WriteCached(w); done || err != nil {
		t.Fatalf("on a direct disk: done %v, %v", done, err)
	}
	i.Release(w)
	ok(t, d.Close())
}

// Whoever tries a write on an image that was closed meanwhile has its credit back.
func TestTriesOnAClosedImageGiveTheirCreditBack(t *testing.T) {
	d := openDisk(t, labFS(t))
	i := newImage(t, d, block.VolumeID{UUID: block.NewUUID()}, 4*block.MinExtentSize)
	w := put(1, 0, fill(1, 4096))
	ok(t, i.Reserve(w))
	ok(t, i.Reserve(w))
	ok(t, d.Close())
	for name, try := range map[string]func(*block.IO) (bool, error){"TryWrite": i.TryWrite, "WriteCached": i.WriteCached} {
		if done, err := try(w); !done || err == nil {
			t.Errorf("%s: done %v, %v", name, done, err)
		}
	}
	if held := d.space.held.Load(); held != 0 {
		t.Errorf("%d bytes of credit are still held", held)
	}
}
