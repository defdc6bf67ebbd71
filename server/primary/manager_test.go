package primary

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eventually polls a condition that other goroutines bring about.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s never came", what)
		}
	}
}

func (r *rig) read(f func(m *Map) bool) bool {
	r.meta.mu.Lock()
	defer r.meta.mu.Unlock()
	return f(&r.meta.m)
}

// TestH03ClosingDropsWhatWasNotSent: a connection ends with many writes parked
// behind one that hangs in the disk.
func TestH03ClosingDropsWhatWasNotSent(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("/1/1")
	c.must(c.write(0, block4k(1)))
	gate := make(chan struct{})
	r.disk.set(func() { r.disk.gate = gate; r.disk.writes = 0 })
	for range 1000 {
		c.send(&block.Request{Op: block.OpWrite, Length: 4096, Data: block4k(2)})
	}
	done := make(chan struct{})
	go func() {
		c.d.Disconnect()
		close(done)
	}()
	for range 999 {
		if req := c.wait(); !errors.Is(req.Err, block.ErrShutdown) {
			t.Fatalf("dropped write: %v", req.Err)
		}
	}
	select {
	case <-done:
		t.Fatal("Disconnect returned while a write was in flight")
	default:
	}
	// H04: nor is a newer session answered.
	opened := make(chan *client)
	go func() { opened <- r.open("/1/2") }()
	select {
	case <-opened:
		t.Fatal("the new session was answered too early")
	case <-time.After(20 * time.Millisecond):
	}
	r.disk.set(func() { r.disk.gate = nil })
	close(gate)
	<-done
	c2 := <-opened
	got, err := c2.read(0, 4096)
	c2.must(err)
	if !bytes.Equal(got, block4k(2)) || r.disk.writes != 1 {
		t.Errorf("%d writes reached the disk", r.disk.writes)
	}
}

// TestB019StalledReaderHoldsUpItself: a client that takes no data, and some of
// whose reads are started by others' goroutines, blocks nobody, nor itself.
func TestB019StalledReaderHoldsUpItself(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.open("/1/1"), r.open("/1/1")
	b.must(b.write(0, make([]byte, 1<<20)))
	release := make(chan struct{})
	a.s.buf = func(req *block.Request) error {
		<-release
		req.Data = make([]byte, req.Length)
		return nil
	}
	gate := make(chan struct{})
	r.disk.set(func() { r.disk.gate = gate })
	b.send(&block.Request{Op: block.OpWrite, Length: 1 << 20, Data: make([]byte, 1<<20)})
	for i := range int64(64) { // they wait for b's write, and are started by whoever finishes it
		a.send(&block.Request{Op: block.OpRead, Offset: i * 4096, Length: 4096})
	}
	r.disk.set(func() { r.disk.gate = nil })
	close(gate)
	b.must(b.wait().Err)
	b.must(b.write(2<<20, block4k(1)))
	b.must(b.do(&block.Request{Op: block.OpTrim, Offset: 3 << 20, Length: 1 << 20}))
	b.must(b.do(&block.Request{Op: block.OpFlush}))
	close(release)
	for range 64 {
		a.must(a.wait().Err)
	}
}

// TestReportedBeforeItWaits: what a batch has done in line is answered although
// a later read of it waits for the client.
func TestReportedBeforeItWaits(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("")
	c.must(c.write(0, block4k(1)))
	release := make(chan struct{})
	c.s.buf = func(req *block.Request) error {
		<-release
		req.Data = make([]byte, req.Length)
		return nil
	}
	c.d.Submit([]*block.Request{
		{Op: block.OpWrite, Length: 4096, Data: block4k(2), Stream: c.s},
		{Op: block.OpRead, Offset: 8192, Length: 4096, Stream: c.s},
		{Op: block.OpWrite, Offset: 4096, Length: 4096, Data: block4k(3), Stream: c.s},
	})
	c.must(c.wait().Err)
	c.must(c.wait().Err)
	close(release)
	c.must(c.wait().Err)
}

// newTwoDiskRig is a rig of whose first two runs, which are written, the first is on r.disk and the second on other.
func newTwoDiskRig(t *testing.T) (r *rig, other *memMember, c *client) {
	r = newRig(t, nil)
	g := r.m.cfg.Geometry
	other = newMember(block.DiskID{UUID: id(2)}, g, 2*rigSize)
	r.disks.members = append(r.disks.members, other)
	r.meta.place = func(run block.RunIndex) []block.DiskID {
		return []block.DiskID{r.disks.members[run%2].disk}
	}
	c = r.open("")
	c.must(c.write(0, make([]byte, 2*g.RunSize())))
	return r, other, c
}

// TestHungDiskHoldsUpItsRunsOnly: one of the volume's disks answers nothing.
func TestHungDiskHoldsUpItsRunsOnly(t *testing.T) {
	r, other, c := newTwoDiskRig(t)
	g := r.m.cfg.Geometry
	gate := make(chan struct{})
	other.set(func() { other.gate = gate })
	for i := range int64(200) {
		c.send(&block.Request{Op: block.OpRead, Offset: g.RunSize() + i*4096, Length: 4096})
	}
	d := r.open("")
	for i := range int64(100) {
		d.must(d.write(i*4096, block4k(3)))
	}
	other.set(func() { other.gate = nil })
	close(gate)
	for range 200 {
		c.must(c.wait().Err)
	}
}

// TestHungDiskHoldsUpItsRunsOnlyInLine: one batch has requests for a disk that answers nothing, and its goroutine waits
// for it in line. All for the other disk are answered, those that may wait as well as soon as the goroutine is replaced.
func TestHungDiskHoldsUpItsRunsOnlyInLine(t *testing.T) {
	r, other, c := newTwoDiskRig(t)
	g := r.m.cfg.Geometry
	gate := make(chan struct{})
	r.disk.set(func() { r.disk.slow = true })
	other.set(func() { other.gate = gate })
	c.s.asked = make(chan func(), 1)
	var batch []*block.Request
	for _, q := range []struct {
		op  block.Op
		run int64
	}{{block.OpRead, 0}, {block.OpWrite, 0}, {block.OpWrite, 1}, {block.OpRead, 0}, {block.OpWrite, 0}} {
		at := q.run*g.RunSize() + int64(len(batch))*4096
		batch = append(batch, &block.Request{Op: q.op, Offset: at, Length: 4096, Data: block4k(7), Stream: c.s})
	}
	submitted := make(chan struct{})
	go func() {
		defer close(submitted)
		c.d.Submit(batch)
	}()
	handOff := <-c.s.asked
	eventually(t, "the wait for the hung disk", func() (held bool) {
		other.set(func() { held = other.waiting > 0 })
		return held
	})
	handOff()
	for range len(batch) - 1 {
		if req := c.wait(); req.Err != nil || req == batch[2] {
			t.Errorf("%v at %d: %v", req.Op, req.Offset, req.Err)
		}
	}
	other.set(func() { other.gate = nil })
	close(gate)
	c.must(c.wait().Err)
	<-submitted
}

// TestH72DetachIsConfirmedWhenDrained, for an open volume and for one that is not open.
func TestH72DetachIsConfirmedWhenDrained(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("")
	c.must(c.write(0, block4k(1)))
	gate := make(chan struct{})
	r.disk.set(func() { r.disk.gate = gate })
	c.send(&block.Request{Op: block.OpWrite, Length: 4096, Data: block4k(2)})
	r.meta.edit(func(m *Map) { m.Attachments[0].Revoking = true })
	r.m.Changed(r.meta.m.Volume.ID)
	if err := <-c.s.closed; !errors.Is(err, block.ErrPermission) {
		t.Errorf("closed with %v", err)
	}
	if _, err := r.tryOpen(""); !errors.Is(err, block.ErrPermission) {
		t.Errorf("a revoked token: %v", err)
	}
	if r.read(func(m *Map) bool { return len(m.Attachments) == 0 }) {
		t.Error("confirmed while a write was in flight")
	}
	r.disk.set(func() { r.disk.gate = nil })
	close(gate)
	eventually(t, "the confirmation", func() bool { return r.read(func(m *Map) bool { return len(m.Attachments) == 0 }) })
	c.wait()
}

func TestIntentOfAClosedVolumeIsConfirmed(t *testing.T) {
	r := newRig(t, func(m *Map) {
		m.Generation, m.Node = 3, "n1"
		m.Volume.WantedSize = 2 * rigSize
		m.Attachments[0].Revoking = true
	})
	r.meta.fail = func(call string) error {
		r.meta.fail = nil // the first read fails: it is tried again
		return block.ErrUnavailable
	}
	r.m.Changed(r.meta.m.Volume.ID)
	r.m.Changed(r.meta.m.Volume.ID)
	eventually(t, "the confirmation", func() bool {
		return r.read(func(m *Map) bool { return m.Volume.Size == 2*rigSize && len(m.Attachments) == 0 })
	})
	if r.meta.grants != 1 {
		t.Errorf("%d grants", r.meta.grants)
	}
}

// TestChangeDuringAFailedGrantIsConfirmed: a detach comes while a client's
// opening is under way, and that fails.
func TestChangeDuringAFailedGrantIsConfirmed(t *testing.T) {
	r := newRig(t, func(m *Map) { m.Generation, m.Node = 3, "n1" })
	granting, answer := make(chan struct{}), make(chan struct{})
	r.meta.fail = func(call string) error {
		if call != "grant" {
			return nil
		}
		r.meta.fail = nil
		close(granting)
		r.meta.mu.Unlock()
		<-answer
		r.meta.mu.Lock()
		return block.ErrUnavailable
	}
	opened := make(chan error)
	go func() {
		_, err := r.tryOpen("")
		opened <- err
	}()
	<-granting
	r.meta.edit(func(m *Map) { m.Attachments[0].Revoking = true })
	r.m.Changed(r.meta.m.Volume.ID)
	close(answer)
	if err := <-opened; !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("opened with %v", err)
	}
	eventually(t, "the confirmation", func() bool { return r.read(func(m *Map) bool { return len(m.Attachments) == 0 }) })
}

func TestNothingToConfirmOpensNothing(t *testing.T) {
	for name, edit := range map[string]func(*Map){
		"another node's": func(m *Map) { m.Generation, m.Node, m.Attachments[0].Revoking = 3, "n2", true },
		"no intent":      func(m *Map) { m.Generation, m.Node = 3, "n1" },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, edit)
			r.m.Changed(r.meta.m.Volume.ID)
			eventually(t, "the look", func() bool {
				r.m.mu.Lock()
				defer r.m.mu.Unlock()
				return len(r.m.unsettled) == 0
			})
			if r.meta.grants != 0 {
				t.Error("opened")
			}
		})
	}
}

func TestGrowthReachesTheClient(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("")
	r.meta.edit(func(m *Map) { m.Volume.WantedSize = 2 * rigSize })
	r.m.Changed(r.meta.m.Volume.ID)
	eventually(t, "the new size", func() bool { return c.d.Info().Size == 2*rigSize })
	got, err := c.read(2*rigSize-4096, 4096)
	c.must(err)
	if !bytes.Equal(got, make([]byte, 4096)) {
		t.Error("new space does not read as zeros")
	}
	if r.disk.size != 0 {
		t.Errorf("a disk without data was touched: size %d", r.disk.size)
	}
	c.must(c.write(2*rigSize-4096, block4k(1)))
}

func TestDeletedVolumeIsRetired(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("")
	r.meta.mu.Lock()
	r.meta.deleted = true
	r.meta.mu.Unlock()
	r.m.Changed(r.meta.m.Volume.ID)
	<-c.s.closed
	eventually(t, "the end", func() bool { return len(r.m.Status()) == 0 })
	if _, err := r.tryOpen(""); !errors.Is(err, block.ErrPermission) {
		t.Errorf("open: %v", err)
	}
}

func TestOpenIsDoneOnce(t *testing.T) {
	r := newRig(t, nil)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := r.tryOpen(""); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if r.meta.grants != 1 {
		t.Errorf("%d grants", r.meta.grants)
	}
}

// A node that the metadata service does not know (it was restored from before) is no reason to refuse a client for good.
func TestOpenOnAnUnknownNodeIsNotPermanent(t *testing.T) {
	r := newRig(t, nil)
	r.meta.fail = func(call string) error {
		if call == "grant" {
			r.meta.fail = nil
			return block.ErrNotFound
		}
		return nil
	}
	if _, err := r.tryOpen(""); !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrPermission) {
		t.Errorf("open: %v", err)
	}
	r.open("")
}

func TestOpenGivesUpWithItsContext(t *testing.T) {
	faults := new(fault.Set)
	r := newRig(t, func(m *Map) {
		disk := block.DiskID{UUID: id(1)}
		m.Runs = []Run{{Index: 0, Disks: []block.DiskID{disk}}}
		m.Members = []Membership{{Disk: disk, In: true}}
	})
	r.m.cfg.Fault = faults
	if err := faults.Arm(fault.Rule{Point: "primary.seal", Hold: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.m.Open(ctx, r.name("/1/1"), newStream()); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("open: %v", err)
	}
	faults.Clear("")
	r.open("/1/1")
}

// TestCloseFinishesAndSyncs: what runs is answered, nothing new is accepted, every disk is synced at the end.
func TestCloseFinishesAndSyncs(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("")
	c.must(c.write(0, block4k(1)))
	gate := make(chan struct{})
	r.disk.set(func() { r.disk.gate = gate })
	c.send(&block.Request{Op: block.OpWrite, Length: 4096, Data: block4k(2)})
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := r.m.Close(short); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("close with a hung disk: %v", err)
	}
	if err := <-c.s.closed; !errors.Is(err, block.ErrShutdown) {
		t.Errorf("closed with %v", err)
	}
	if _, err := r.tryOpen(""); !errors.Is(err, block.ErrShutdown) {
		t.Errorf("open after close: %v", err)
	}
	syncs := r.disk.syncs
	r.disk.set(func() { r.disk.gate = nil })
	close(gate)
	if err := r.m.Close(t.Context()); err != nil {
		t.Error(err)
	}
	c.wait()
	if r.disk.syncs == syncs {
		t.Error("the disk was not synced")
	}
	if r.disk.unflushed {
		t.Error("after an orderly stop a reboot would cost the cache epoch")
	}
}

func TestDescribe(t *testing.T) {
	r := newRig(t, func(m *Map) { m.Attachments[0].ReadOnly = true })
	info, err := r.m.Describe(t.Context(), r.name(""))
	if err != nil || info.Size != rigSize || !info.ReadOnly || info.PreferredBlock != 4096 || r.meta.grants != 0 {
		t.Errorf("%+v, %v, %d grants", info, err, r.meta.grants)
	}
	if _, err := r.m.Describe(t.Context(), r.name("")+"AAAA"); !errors.Is(err, block.ErrPermission) {
		t.Error(err)
	}
	c := r.open("")
	if err := c.write(0, block4k(1)); !errors.Is(err, block.ErrReadOnly) {
		t.Errorf("a write to a read-only attachment: %v", err)
	}
	r.meta.edit(func(m *Map) { m.Volume.CacheEpoch = 2 })
	if _, err := r.m.Describe(t.Context(), r.name("/1/1")); !errors.Is(err, block.ErrCacheLost) {
		t.Error(err)
	}
}

// TestNewAttachmentIsFound: the volume is open, the attachment is newer than its map.
func TestNewAttachmentIsFound(t *testing.T) {
	r := newRig(t, nil)
	r.open("")
	old := r.secret
	r.secret = bytes.Repeat([]byte{8}, 32)
	r.meta.edit(func(m *Map) {
		m.Attachments = append(m.Attachments, Attachment{ID: block.AttachmentID{UUID: id(6)}, Node: "c2", ReadOnly: true, TokenDigest: sha256.Sum256(r.secret)})
	})
	r.open("")
	r.secret = old
	r.open("")
}

// TestRandomClients has clients hammer a volume over slow and quick disks, each
// in its own range and all in a shared one; run it with -race.
func TestRandomClients(t *testing.T) {
	seeds(t, 3, func(t *testing.T, rnd *rand.Rand) {
		r := newRig(t, nil)
		stop := make(chan struct{})
		var toggler, clients sync.WaitGroup
		toggler.Go(func() {
			for slow := false; ; slow = !slow {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
					r.disk.set(func() { r.disk.slow = slow })
				}
			}
		})
		for k := range 4 {
			c := r.open("/1/1")
			own := rand.New(rand.NewPCG(rnd.Uint64(), uint64(k)))
			clients.Go(func() { c.hammer(own, int64(k)) })
		}
		clients.Wait()
		close(stop)
		toggler.Wait()
		if s := r.m.Status()[0]; s.InFlight+s.Queued+s.Syncing+s.Blocked+s.Births+s.Space != 0 {
			t.Errorf("left over: %+v", s)
		}
	})
}

func (c *client) hammer(rnd *rand.Rand, k int64) {
	const size = 1 << 20
	base := (k + 1) * 8 << 20
	model := make([]byte, size)
	for i := range 300 {
		off := rnd.Int64N(size/512-64) * 512
		n := (1 + rnd.Int64N(64)) * 512
		switch op := rnd.IntN(8); {
		case op < 3:
			p := bytes.Repeat([]byte{byte(i)}, int(n))
			c.must(c.do(&block.Request{Op: block.OpWrite, Offset: base + off, Length: n, Data: p, FUA: op == 0}))
			copy(model[off:], p)
		case op == 3:
			c.must(c.do(&block.Request{Op: block.OpTrim, Offset: base + off, Length: n}))
			clear(model[off : off+n])
		case op == 4:
			c.must(c.do(&block.Request{Op: block.OpFlush}))
		case op == 5: // all write one value each into one place: a read sees one of them, whole
			c.must(c.write(4096, bytes.Repeat([]byte{byte(k + 1)}, 16384)))
			got, err := c.read(4096, 16384)
			c.must(err)
			if !bytes.Equal(got, bytes.Repeat(got[:1], 16384)) {
				c.t.Errorf("a mixture of two writes")
			}
		default:
			got, err := c.read(base+off, n)
			c.must(err)
			if !bytes.Equal(got, model[off:off+n]) {
				c.t.Errorf("client %d, step %d: wrong content at %d", k, i, off)
				return
			}
		}
	}
}

func FuzzParseName(f *testing.F) {
	f.Add(block.VolumeID{UUID: id(1)}.String() + "/" + base64.RawURLEncoding.EncodeToString(make([]byte, 32)) + "/1/2")
	f.Add("//")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseName(s)
		if err == nil && (len(s) > maxName || n.volume.String() != s[:36] || (n.session > 0) != (n.epoch > 0)) {
			t.Errorf("%q: %+v", s, n)
		}
	})
}
