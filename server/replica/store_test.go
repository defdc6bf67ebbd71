package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/server/vfs"
)

const extent = block.MinExtentSize

// node is a storage node with memory disks, whose server can be started again.
type node struct {
	t       *testing.T
	mem     *vfs.Mem
	rules   vfs.Rules
	cfg     Config
	fates   *registry
	changed chan block.DiskID
	space   chan struct{}
}

type registry struct {
	mu    sync.Mutex
	fate  map[block.VolumeID]Fate
	err   error
	asked int
}

func (r *registry) Fate(_ context.Context, _ block.ClusterID, id block.VolumeID) (Fate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	return r.fate[id], r.err
}

func (r *registry) set(id block.VolumeID, f Fate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fate[id] = f
}

func newNode(t *testing.T, paths ...string) *node {
	n := &node{
		t: t, mem: vfs.NewMem(), fates: &registry{fate: map[block.VolumeID]Fate{}},
		changed: make(chan block.DiskID, 100), space: make(chan struct{}, 100),
	}
	for _, p := range append([]string{"/state"}, paths...) {
		n.must(n.mem.MkdirAll(p))
	}
	n.cfg = Config{
		FS: vfs.Inject(n.mem, n.rules.Hook), Paths: paths, StateDir: "/state",
		Cluster:  block.ClusterID{UUID: block.NewUUID()},
		Geometry: block.Geometry{ExtentSize: extent},
		Boot:     block.NewUUID(), Process: block.NewUUID(), Registry: n.fates, Log: slog.New(slog.DiscardHandler),
		Changed: func(id block.DiskID) { n.changed <- id },
		Space:   func() { n.space <- struct{}{} },
	}
	return n
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) open() *Store {
	n.t.Helper()
	s, err := Open(n.cfg)
	n.must(err)
	return s
}

// refused opens the store and expects it to fail, saying each of words.
func (n *node) refused(sentinel error, words ...string) {
	n.t.Helper()
	s, err := Open(n.cfg)
	if err == nil {
		_ = s.Close()
		n.t.Fatal("opened")
	}
	if !errors.Is(err, sentinel) {
		n.t.Errorf("%v, want %v", err, sentinel)
	}
	for _, w := range words {
		if !bytes.Contains([]byte(err.Error()), []byte(w)) {
			n.t.Errorf("%q does not say %q", err, w)
		}
	}
}

func (n *node) run(s *Store) (stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	return func() {
		cancel()
		n.must(<-done)
		n.must(s.Close())
	}
}

func volume() image.Description {
	return image.Description{ID: block.VolumeID{UUID: block.NewUUID()}, Name: "v", Size: 64 * extent}
}

// sealed returns a copy that is sealed at g and holds run 0.
func (n *node) sealed(s *Store, v image.Description, g block.Generation) *Copy {
	n.t.Helper()
	c, err := s.Copy(v, s.Reports()[0].ID)
	n.must(err)
	_, err = c.Seal(n.t.Context(), g, v.Size, nil)
	n.must(err)
	n.must(c.Birth(n.t.Context(), g, []block.RunIndex{0}))
	return c
}

func write(c *Copy, g block.Generation, seq block.Sequence, b byte) error {
	io := &block.IO{Generation: g, Sequence: seq, Op: block.OpWrite, Length: 4096, Data: bytes.Repeat([]byte{b}, 4096)}
	if err := c.Reserve(io); err != nil {
		return err
	}
	return c.Write(io)
}

func read(t *testing.T, c *Copy, g block.Generation) byte {
	t.Helper()
	p := make([]byte, 4096)
	if err := c.Read(g, p, 0); err != nil {
		t.Fatal(err)
	}
	return p[0]
}

func TestDisksAreKnownAgain(t *testing.T) {
	n := newNode(t, "/a", "/b")
	s := n.open()
	before := s.Reports()
	n.must(s.Close())
	s = n.open()
	for i, r := range s.Reports() {
		if r.ID != before[i].ID || !r.Online || r.Problem != "" || r.Incarnation != before[i].Incarnation {
			t.Errorf("%+v, want %+v", r, before[i])
		}
	}
	n.must(s.Close())
}

func TestStartIsRefused(t *testing.T) {
	t.Run("disk of another cluster", func(t *testing.T) {
		n := newNode(t, "/a")
		n.must(n.open().Close())
		n.cfg.Cluster = block.ClusterID{UUID: block.NewUUID()}
		n.refused(block.ErrPrecondition, "/a", n.cfg.Cluster.String())
	})
	t.Run("disk named twice", func(t *testing.T) {
		n := newNode(t, "/a")
		n.must(n.open().Close())
		n.cfg.Paths = []string{"/a", "/a"}
		n.refused(block.ErrInUse, "/a")
	})
	t.Run("held by another server (H39)", func(t *testing.T) {
		n := newNode(t, "/a")
		s := n.open()
		n.refused(block.ErrInUse, "/a")
		n.must(s.Close())
	})
}

// H69: a blank directory where a disk was is a missing mount. The server starts
// with an alarm, makes nothing there, and picks the disk up when it is back.
func TestH69MountMissingAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a", "/b")
		n.must(n.open().Close())
		n.cfg.FS = vfs.Inject(n.mem, func(op vfs.Op) error {
			if op.Name == "/a" { // what a blank mount point looks like
				return n.rules.Hook(op)
			}
			return nil
		})
		n.must(n.rules.Add("opendir * #1 eio"))
		s := n.open()
		if r := s.Reports()[0]; r.Online || r.Problem == "" {
			t.Fatalf("%+v", r)
		}
		stop := n.run(s)
		<-n.changed
		if r := s.Reports()[0]; !r.Online {
			t.Fatalf("%+v", r)
		}
		stop()
	})
}

func TestH69BlankWhereADiskWas(t *testing.T) {
	n := newNode(t, "/a")
	n.must(n.open().Close())
	n.must(n.mem.MkdirAll("/blank"))
	blank := redirect{n.mem, "/a", "/blank"}
	n.cfg.FS = blank
	s := n.open()
	r := s.Reports()[0]
	if r.Online || !bytes.Contains([]byte(r.Problem), []byte("mount")) {
		t.Errorf("%+v", r)
	}
	d, err := n.mem.OpenDir("/blank")
	n.must(err)
	if e, _ := d.ReadDir(); len(e) != 0 {
		t.Errorf("something was made in the blank directory: %v", e)
	}
	n.must(d.Close())
	n.must(s.Close())
}

// H69: a disk that could be opened only while the server ran is known as well.
func TestH69BlankWhereADiskCameLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		n.cfg.FS = vfs.Inject(n.mem, func(op vfs.Op) error {
			if op.Name == "/a" {
				return n.rules.Hook(op)
			}
			return nil
		})
		n.must(n.rules.Add("opendir * #1 eio"))
		s := n.open()
		if s.Reports()[0].Online {
			t.Fatal("opened at once")
		}
		stop := n.run(s)
		<-n.changed
		stop()
		n.must(n.mem.MkdirAll("/blank"))
		n.cfg.FS = redirect{n.mem, "/a", "/blank"}
		s = n.open()
		if r := s.Reports()[0]; r.Online {
			t.Errorf("a missing mount was taken for a new disk: %+v", r)
		}
		n.must(s.Close())
	})
}

// redirect shows another directory at a path, as a missing mount does.
type redirect struct {
	vfs.FS
	from, to string
}

func (r redirect) OpenDir(path string) (vfs.Dir, error) {
	if path == r.from {
		path = r.to
	}
	return r.FS.OpenDir(path)
}

// H19: one failed sync ends the open instance for all ten volumes; the second
// result never counts; the disk comes back as another incarnation.
func TestH19FsyncFailsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		s := n.open()
		stop := n.run(s)
		before := s.Reports()[0].Incarnation
		var copies []*Copy
		for range 10 {
			c := n.sealed(s, volume(), 1)
			n.must(write(c, 1, 1, 'x'))
			copies = append(copies, c)
		}
		n.must(n.rules.Add("datasync head.img #1 eio"))
		if err := copies[3].Sync(t.Context(), 1); !errors.Is(err, block.ErrIO) {
			t.Fatalf("sync: %v", err)
		}
		for i, c := range copies {
			if err := c.Sync(t.Context(), 1); !errors.Is(err, block.ErrIO) {
				t.Errorf("copy %d of the ended instance: sync: %v", i, err)
			}
			if err := write(c, 1, 2, 'y'); err == nil {
				t.Errorf("copy %d of the ended instance takes writes", i)
			}
			// Not ErrIO: that would be a bad range, and the client's error.
			err := c.Read(1, make([]byte, 512), 0)
			if _, try := c.TryRead(1, make([]byte, 512), 0); !isUnavailable(err) || !isUnavailable(try) {
				t.Errorf("copy %d of the ended instance: read: %v, in line: %v", i, err, try)
			}
		}
		<-n.changed // failed
		<-n.changed // opened again
		after := s.Reports()[0]
		if !after.Online || after.Incarnation.Since(before) != block.Rebooted {
			t.Errorf("%+v after %+v", after.Incarnation, before)
		}
		c, err := s.Copy(copies[3].desc, after.ID)
		n.must(err)
		sealed, err := c.Seal(t.Context(), 1, copies[3].desc.Size, []block.RunIndex{0})
		n.must(err)
		if !sealed.Unflushed || sealed.Incarnation != after.Incarnation || len(sealed.Lost) != 0 {
			t.Errorf("%+v", sealed)
		}
		n.must(c.Sync(t.Context(), 1))
		stop()
	})
}

// A disk that opens well and fails in service does not take its volumes through ten takeovers a second.
func TestFlappingDiskIsOpenedEverMoreRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		s := n.open()
		stop := n.run(s)
		v := volume()
		n.must(n.rules.Add("datasync head.img * eio"))
		began, fails := time.Now(), 0
		for ; time.Since(began) < 30*time.Second; fails++ {
			c, err := s.Copy(v, s.Reports()[0].ID)
			n.must(err)
			if _, err := c.Seal(t.Context(), 1, v.Size, nil); err != nil {
				t.Fatal(err)
			}
			_ = c.Sync(t.Context(), 1)
			<-n.changed // failed
			<-n.changed // opened again
		}
		if fails > 15 {
			t.Errorf("opened again %d times in 30 s", fails)
		}
		n.rules.Clear()
		stop()
	})
}

// H24: an instance that ended does not live on because the state directory is sick as well.
func TestH24ProofThatCannotBeRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		s := n.open()
		stop := n.run(s)
		before := s.Reports()[0].Incarnation
		c := n.sealed(s, volume(), 1)
		n.must(n.rules.Add("datasync head.img #1 eio"))
		n.must(n.rules.Add("unlink disk-*.json #1 eio"))
		if err := c.Sync(t.Context(), 1); !errors.Is(err, block.ErrIO) {
			t.Fatalf("sync: %v", err)
		}
		<-n.changed // failed
		<-n.changed // opened again
		if after := s.Reports()[0].Incarnation; after.Since(before) != block.Rebooted {
			t.Errorf("%+v after %+v", after, before)
		}
		stop()
	})
}

// volume.json is for readers without the metadata service: a seal mends it and keeps it true.
func TestSealDescribesTheVolume(t *testing.T) {
	n := newNode(t, "/a")
	s := n.open()
	v := volume()
	v.Policy = map[string]string{"cache-epoch": "1"}
	n.sealed(s, v, 1)
	n.must(s.Close())
	dir, err := n.mem.OpenDir("/a/volumes/" + v.ID.String())
	n.must(err)
	n.must(dir.Unlink("volume.json"))
	for _, epoch := range []string{"1", "2"} {
		s = n.open()
		v.Policy = map[string]string{"cache-epoch": epoch}
		c, err := s.Copy(v, s.Reports()[0].ID)
		n.must(err)
		_, err = c.Seal(t.Context(), 1, v.Size, []block.RunIndex{0})
		n.must(err)
		n.must(s.Close())
		p, err := vfs.ReadFile(dir, "volume.json", 1<<16)
		if err != nil || !bytes.Contains(p, []byte(`"cache-epoch": "`+epoch+`"`)) {
			t.Errorf("epoch %s: %v\n%s", epoch, err, p)
		}
	}
	n.must(dir.Close())
}

func isUnavailable(err error) bool {
	return errors.Is(err, block.ErrUnavailable) && !errors.Is(err, block.ErrIO)
}

func TestSealFences(t *testing.T) {
	n := newNode(t, "/a")
	s := n.open()
	v := volume()
	c := n.sealed(s, v, 4)
	n.must(write(c, 4, 1, 'x'))
	for _, g := range []block.Generation{0, 3, 5} {
		if err := write(c, g, 2, 'y'); !errors.Is(err, block.ErrStale) {
			t.Errorf("write of generation %d into 4: %v", g, err)
		}
	}
	other, err := s.Copy(v, c.Disk())
	n.must(err)
	if _, err := other.Seal(t.Context(), 3, v.Size, nil); !errors.Is(err, block.ErrStale) {
		t.Errorf("seal 3 after 4: %v", err)
	}
	if err := write(c, 4, 3, 'y'); !errors.Is(err, block.ErrStale) {
		t.Errorf("the fence is open after a refused seal: %v", err)
	}
	_, err = other.Seal(t.Context(), 6, v.Size, []block.RunIndex{0})
	n.must(err)
	if err := write(c, 4, 4, 'z'); !errors.Is(err, block.ErrStale) {
		t.Errorf("write of generation 4 into 6: %v", err)
	}
	if got := read(t, other, 6); got != 'x' {
		t.Errorf("read %q", got)
	}
	n.must(s.Close())
	s = n.open()
	again, err := s.Copy(v, c.Disk())
	n.must(err)
	if _, err := again.Seal(t.Context(), 5, v.Size, nil); !errors.Is(err, block.ErrStale) {
		t.Errorf("seal 5 after 6 and a restart: %v", err)
	}
	n.must(s.Close())
}

// H29, one copy: a write of generation 1 sits in the file system; the seal at 2
// waits for it, and gives up by its deadline with the fence closed.
func TestH29SealDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		hold, started := make(chan struct{}), make(chan struct{})
		armed := false
		n.cfg.FS = vfs.Inject(n.mem, func(op vfs.Op) error {
			if armed && op.Kind == "write" && op.Name == "head.img" {
				armed = false
				close(started)
				<-hold
			}
			return nil
		})
		s := n.open()
		v := volume()
		c := n.sealed(s, v, 1)
		n.must(write(c, 1, 1, 'a'))
		armed = true
		done := make(chan error, 1)
		go func() { done <- write(c, 1, 2, 'b') }()
		<-started
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Seal(short, 2, v.Size, nil); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("a seal that cannot drain: %v", err)
		}
		if err := write(c, 1, 3, 'c'); !errors.Is(err, block.ErrStale) {
			t.Errorf("write at the closed fence: %v", err)
		}
		sealed := make(chan error, 1)
		go func() {
			_, err := c.Seal(t.Context(), 2, v.Size, []block.RunIndex{0})
			sealed <- err
		}()
		synctest.Wait()
		select {
		case err := <-sealed:
			t.Fatalf("sealed over a write in flight: %v", err)
		default:
		}
		close(hold)
		n.must(<-done)
		n.must(<-sealed)
		if got := read(t, c, 2); got != 'b' {
			t.Errorf("read %q", got)
		}
		n.must(s.Close())
	})
}

func TestCollection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		s := n.open()
		live, dead, stranger := volume(), volume(), volume()
		for i, v := range []image.Description{live, dead, stranger} {
			n.must(write(n.sealed(s, v, 1), 1, 1, byte('0'+i)))
		}
		n.fates.set(live.ID, Live)
		n.fates.set(dead.ID, Live)
		stop := n.run(s)
		synctest.Wait()
		n.fates.mu.Lock()
		n.fates.err = block.ErrUnavailable
		n.fates.mu.Unlock()
		s.Collect()
		synctest.Wait()
		if got := len(s.online()[0].Images()); got != 3 {
			t.Fatalf("%d images while metadata does not answer", got)
		}
		n.fates.mu.Lock()
		n.fates.err = nil
		n.fates.mu.Unlock()
		n.fates.set(dead.ID, Tombstone)
		s.Collect()
		synctest.Wait()
		d := s.online()[0]
		if got := fmt.Sprint(d.Images()); bytes.Contains([]byte(got), []byte(dead.ID.String())) || len(d.Images()) != 2 {
			t.Errorf("images: %v", got)
		}
		if q := d.Quarantined(); len(q) != 0 {
			t.Errorf("quarantined: %v", q)
		}
		if u := s.Reports()[0].Unknown; len(u) != 1 || u[0] != stranger.ID {
			t.Errorf("unknown: %v", u)
		}
		stop()
	})
}

// A tombstone seen once is asked for again right before the unlink (H71).
func TestH71ProofIsAskedAgain(t *testing.T) {
	n := newNode(t, "/a")
	v := volume()
	flips := &flip{answers: []Fate{Tombstone, Live}}
	n.cfg.Registry = flips
	s := n.open()
	n.must(write(n.sealed(s, v, 1), 1, 1, 'x'))
	s.collectAll(t.Context())
	d := s.online()[0]
	if len(d.Images())+len(d.Quarantined()) != 1 {
		t.Errorf("files were removed on a withdrawn proof: %v, %v", d.Images(), d.Quarantined())
	}
	n.must(s.Close())
}

type flip struct{ answers []Fate }

func (f *flip) Fate(context.Context, block.ClusterID, block.VolumeID) (Fate, error) {
	a := f.answers[0]
	f.answers = f.answers[1:]
	return a, nil
}

// H68: who was refused is told when there is room again.
func TestH68SpaceComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "/a")
		n.mem.SetCapacity(16 << 20)
		s := n.open()
		stop := n.run(s)
		c := n.sealed(s, volume(), 1)
		n.mem.SetCapacity(1)
		io := &block.IO{Generation: 1, Sequence: 1, Op: block.OpWrite, Offset: extent, Length: extent, Data: make([]byte, extent)}
		for ; c.Reserve(io) == nil; io.Sequence++ {
			c.Release(io)
			time.Sleep(time.Second) // of the bubble's clock: credits are an estimate that is renewed
		}
		time.Sleep(2 * time.Second)
		select {
		case <-n.space:
			t.Fatal("told of space that is not there")
		default:
		}
		n.mem.SetCapacity(16 << 20)
		<-n.space
		n.must(c.Reserve(io))
		c.Release(io)
		stop()
	})
}

// B134: the cleaner runs while volumes are being born, against a metadata
// service that does not know them yet, was emptied, or is another cell's:
// nothing is deleted, and the births are there afterwards.
func TestB134CleanerMeetsTheUnborn(t *testing.T) {
	for name, answer := range map[string]struct {
		fate Fate
		err  error
	}{
		"live, run not committed":  {fate: Live},
		"not heard of":             {fate: Unknown},
		"another cluster's answer": {err: block.ErrPrecondition},
		"no leader":                {err: block.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "/a")
			s := n.open()
			var copies []*Copy
			for range 20 {
				c := n.sealed(s, volume(), 1) // its run is durable here and not committed
				n.fates.set(c.desc.ID, answer.fate)
				copies = append(copies, c)
			}
			n.fates.err = answer.err
			s.collectAll(t.Context())
			for _, c := range copies {
				n.must(write(c, 1, 1, 'x'))
				if got := read(t, c, 1); got != 'x' {
					t.Errorf("read %q", got)
				}
			}
			n.must(s.Close())
		})
	}
}

// H70: a map from before the runs were committed opens nothing, whatever
// generation it comes to, and raises none here.
func TestH70MapFromAnOlderBackup(t *testing.T) {
	n := newNode(t, "/a")
	s := n.open()
	v := volume()
	c := n.sealed(s, v, 1)
	n.must(write(c, 1, 1, 'x'))
	n.must(c.Birth(t.Context(), 1, []block.RunIndex{1})) // never written: an orphan is no reason
	for g := block.Generation(1); g < 5; g++ {
		if _, err := c.Seal(t.Context(), g, v.Size, nil); !errors.Is(err, block.ErrPrecondition) {
			t.Fatalf("generation %d: %v", g, err)
		}
	}
	_, err := c.Seal(t.Context(), 2, v.Size, []block.RunIndex{0})
	n.must(err)
	if got := read(t, c, 2); got != 'x' {
		t.Errorf("read %q", got)
	}
	if err := s.CheckUnwritten(v.ID, nil); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("as a volume without runs: %v", err)
	}
	n.must(s.CheckUnwritten(v.ID, []block.DiskID{c.Disk()})) // its seal compares
	w := volume()
	w.ID = block.VolumeID{UUID: block.UUID{9}}
	n.must(s.CheckUnwritten(w.ID, nil)) // unknown here
	n.must(n.sealed(s, w, 1).Birth(t.Context(), 1, []block.RunIndex{0}))
	n.must(s.CheckUnwritten(w.ID, nil)) // born only
	n.must(s.Close())
	s = n.open() // and with records that are not in memory
	c, err = s.Copy(v, c.Disk())
	n.must(err)
	if _, err := c.Seal(t.Context(), 9, v.Size, []block.RunIndex{1}); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("after a restart: %v", err)
	}
	n.must(s.Close())
}
