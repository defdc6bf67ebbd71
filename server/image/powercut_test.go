package image

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

const sectorSize = 512

// model is what one volume may look like after a power cut. A sector's content
// is named by a number; 0 is zeros.
type model struct {
	id         block.VolumeID
	sure, size int64 // size confirmed, size asked for
	generation [2]block.Generation
	born       map[block.RunIndex]bool // confirmed
	next       uint64
	sectors    map[int64]*sectorModel
	names      []string // volume.json may carry any of these
	exists     [2]bool  // before and after a running creation or deletion
}

type sectorModel struct {
	durable uint64   // covered by a finished sync
	since   []uint64 // written since, the newest last; any of them may be found
	acked   uint64   // the newest whose write has returned
	base    uint64   // content when its marks were last cleared
}

func newModel(id block.VolumeID) *model {
	return &model{id: id, born: map[block.RunIndex]bool{}, sectors: map[int64]*sectorModel{}}
}

func (m *model) sector(n int64) *sectorModel {
	if m.sectors[n] == nil {
		m.sectors[n] = &sectorModel{}
	}
	return m.sectors[n]
}

func (s *sectorModel) current() uint64 {
	if len(s.since) == 0 {
		return s.durable
	}
	return s.since[len(s.since)-1]
}

func (m *model) content(sector int64, number uint64) []byte {
	p := make([]byte, sectorSize)
	if number != 0 {
		for i := 0; i < sectorSize; i += 32 {
			copy(p[i:], m.id.UUID[:])
			binary.LittleEndian.PutUint64(p[i+16:], uint64(sector))
			binary.LittleEndian.PutUint64(p[i+24:], number)
		}
	}
	return p
}

// identify is the number of a sector's content; ok is false for anything that m never wrote there.
func (m *model) identify(sector int64, p []byte) (number uint64, ok bool) {
	number = binary.LittleEndian.Uint64(p[24:])
	return number, string(p) == string(m.content(sector, number))
}

// world is a workload and what it knows, over a file system whose every
// operation may be the last before a power cut.
type world struct {
	t      testing.TB
	fs     *vfs.Mem
	config Config
	disk   *Disk
	vols   map[block.VolumeID]*model
	made   bool   // the disk's Init has returned
	cut    func() // called before every file operation
	busy   bool   // in cut: its own operations are not cut
	ops    int
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, fs: vfs.NewMem(), config: labConfig(), vols: map[block.VolumeID]*model{}, cut: func() {}}
	ok(t, w.fs.MkdirAll("/disk"))
	ok(t, w.fs.MkdirAll("/state"))
	return w
}

// hooked is the file system as the workload sees it.
func (w *world) hooked() vfs.FS {
	return vfs.Inject(w.fs, func(op vfs.Op) error {
		if !w.busy {
			w.ops++
			w.busy = true
			w.cut()
			w.busy = false
		}
		return nil
	})
}

func (w *world) init() {
	if _, err := Init(w.hooked(), "/disk", labCluster, w.config.Geometry); err != nil && !errors.Is(err, block.ErrExists) {
		w.t.Fatal(err)
	}
	w.made = true
}

func (w *world) open() {
	var err error
	w.disk, err = Open(w.hooked(), w.config)
	ok(w.t, err)
}

func (w *world) image(id block.VolumeID) *Image { return getImage(w.t, w.disk, id) }

func (w *world) create(id block.VolumeID, size int64) {
	m := newModel(id)
	m.exists, m.size, m.sure = [2]bool{false, true}, size, size
	m.names = []string{"first"}
	w.vols[id] = m
	_, err := w.disk.CreateImage(Description{ID: id, Name: "first", Size: size})
	ok(w.t, err)
	m.exists[0] = true
}

func (w *world) seal(id block.VolumeID, g block.Generation) {
	m := w.vols[id]
	m.generation[1] = g
	ok(w.t, w.image(id).Seal(g))
	m.generation[0] = g
}

func (w *world) birth(id block.VolumeID, r block.RunIndex) {
	m := w.vols[id]
	ok(w.t, w.image(id).Birth(m.generation[0], []block.RunIndex{r}))
	m.born[r] = true
}

func (w *world) write(id block.VolumeID, op block.Op, noHole bool, off, length int64) {
	m := w.vols[id]
	m.next++
	data := make([]byte, 0, length)
	for s := off / sectorSize; s < (off+length)/sectorSize; s++ {
		number := m.next
		if op != block.OpWrite {
			number = 0
		}
		data = append(data, m.content(s, number)...)
		m.sector(s).since = append(m.sector(s).since, number)
	}
	io := &block.IO{Generation: m.generation[0], Sequence: block.Sequence(m.next), Op: op, NoHole: noHole, Offset: off, Length: length}
	if op == block.OpWrite {
		io.Data = data
	}
	ok(w.t, do(w.image(id), io))
	for s := off / sectorSize; s < (off+length)/sectorSize; s++ {
		m.sector(s).acked = m.sector(s).current()
	}
}

func (w *world) sync(id block.VolumeID) {
	ok(w.t, w.image(id).Sync())
	for _, s := range w.vols[id].sectors {
		s.durable, s.since = s.current(), nil
	}
}

// clear is what a primary does when all is quiet.
func (w *world) clear(id block.VolumeID) {
	w.sync(id)
	m := w.vols[id]
	for _, s := range m.sectors {
		s.base = s.durable
	}
	ok(w.t, w.image(id).ClearMarks(block.Sequence(m.next), Behind|Unflushed))
}

func (w *world) grow(id block.VolumeID, size int64) {
	m := w.vols[id]
	m.size = size
	ok(w.t, w.image(id).Grow(size))
	m.sure = size
}

func (w *world) rename(id block.VolumeID, name string) {
	m := w.vols[id]
	m.names = append(m.names, name)
	ok(w.t, w.image(id).SetDescription(Description{ID: id, Name: name}))
	m.names = []string{name}
}

func (w *world) delete(id block.VolumeID) {
	m := w.vols[id]
	m.exists = [2]bool{true, false}
	ok(w.t, w.disk.Quarantine(id, "deleted"))
	m.exists[0] = false
	ok(w.t, w.disk.Purge(id))
}

// check opens a disk after a power cut, or a kill, and compares. With adopt
// the model takes over what it finds.
func (w *world) check(fs vfs.FS, killed, adopt bool) error {
	if _, err := Probe(fs, "/disk"); errors.Is(err, block.ErrNotFound) && !w.made {
		_, err := Init(fs, "/disk", labCluster, w.config.Geometry)
		return err
	}
	c := w.config
	if !killed {
		c.Boot = block.NewUUID()
	}
	d, err := Open(fs, c)
	if err != nil {
		return err
	}
	defer d.Close()
	there := d.Images()
	for _, id := range slices.SortedFunc(maps.Keys(w.vols), compareVolumes) {
		m := w.vols[id]
		found := slices.Contains(there, id)
		if found != m.exists[0] && found != m.exists[1] {
			return fmt.Errorf("volume %s exists: %v", id, found)
		}
		if adopt {
			m.exists = [2]bool{found, found}
		}
		if !found {
			continue
		}
		i, err := d.Image(id)
		if err != nil {
			return err
		}
		if err := m.check(i, killed, adopt); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
	}
	return nil
}

func (m *model) check(i *Image, killed, adopt bool) error {
	if g := i.Generation(); g != m.generation[0] && g != m.generation[1] {
		return fmt.Errorf("generation %d, sealed %v", g, m.generation)
	}
	size := i.Size()
	if size != m.sure && size != m.size {
		return fmt.Errorf("size %d, confirmed %d, asked %d", size, m.sure, m.size)
	}
	desc, described := i.Description()
	if !described || !slices.Contains(m.names, desc.Name) {
		return fmt.Errorf("volume.json says %q (%v), not one of %q", desc.Name, described, m.names)
	}
	for r := range m.born {
		if lost := i.Lost([]block.RunIndex{r}); len(lost) > 0 {
			return fmt.Errorf("confirmed births are lost: %v", lost)
		}
	}
	if adopt {
		m.generation = [2]block.Generation{i.Generation(), i.Generation()}
		m.sure, m.size = size, size
		if !killed {
			m.names = []string{desc.Name}
		}
	}
	buf := make([]byte, extent)
	for e := range block.ExtentIndex(i.index.geometry.Extents(size)) {
		if !i.index.present(e) {
			continue
		}
		start := int64(e) * extent
		p := buf[:min(extent, size-start)]
		clear(p) // holes need not be read
		if at, err := i.img.SeekData(start); err == nil && at < start+int64(len(p)) {
			if err := i.ReadAt(p, start); err != nil {
				return err
			}
		}
		behind, unflushed := marksOf(i, e)
		for n := int64(0); n < int64(len(p)); n += sectorSize {
			marked := behind&unflushed>>(n/region)&1 != 0
			if err := m.checkSector((start+n)/sectorSize, p[n:n+sectorSize], marked, killed, adopt); err != nil {
				return err
			}
		}
	}
	return nil
}

var zeroSector [sectorSize]byte

func (m *model) checkSector(n int64, p []byte, marked, killed, adopt bool) error {
	s := m.sectors[n]
	if s == nil {
		if [sectorSize]byte(p) != zeroSector {
			return fmt.Errorf("sector %d was never written and holds %x", n, p[:32])
		}
		return nil
	}
	number, known := m.identify(n, p)
	if !known {
		return fmt.Errorf("sector %d is foreign or torn: %x", n, p[:32])
	}
	if number != s.current() && number != s.acked && (killed || number != s.durable && !slices.Contains(s.since, number)) {
		return fmt.Errorf("sector %d holds %d; durable %d, since %v, acknowledged %d", n, number, s.durable, s.since, s.acked)
	}
	if number != s.base && !marked {
		return fmt.Errorf("sector %d went from %d to %d and is not marked (H27)", n, s.base, number)
	}
	switch {
	case adopt && !killed:
		s.durable, s.since, s.acked = number, nil, number
	case adopt && number != s.current(): // what was running when it was killed never landed
		s.since, s.acked = append(s.since, number), number
	}
	return nil
}

// TestPowerCutAtEveryOperation runs one workload and, before each of its file
// operations, looks at what several power cuts and a kill would leave.
// H25 first-write-to-new-files, H27 record-before-data, H26's first half.
func TestPowerCutAtEveryOperation(t *testing.T) {
	for _, mode := range []Mode{Buffered, Direct} {
		t.Run(mode.String(), func(t *testing.T) {
			w := newWorld(t)
			w.config.Mode = mode
			cuts := 0
			w.cut = func() {
				for seed := range uint64(3) {
					cuts++
					if err := w.check(w.fs.Crash(seed*uint64(w.ops)+min(seed, 1)), false, false); err != nil {
						t.Fatalf("power cut before operation %d, seed %d: %v", w.ops, seed, err)
					}
				}
			}
			everything(w)
			w.cut()
			t.Logf("%d file operations, %d power cuts", w.ops, cuts)
		})
	}
}

// everything does each mutating operation, and each after each that matters.
func everything(w *world) {
	const K, E = 1 << 10, extent
	w.init()
	w.open()
	w.create(volA, 2*E)
	w.seal(volA, 1)
	w.birth(volA, 0)
	w.write(volA, block.OpWrite, false, 0, 4*K)         // first write to an extent
	w.write(volA, block.OpWrite, false, 0, 512)         // part of a block, marked
	w.write(volA, block.OpWrite, false, E-512, 1024)    // two extents, sub-block
	w.sync(volA)                                        // a flush
	w.write(volA, block.OpWrite, false, 2*K, 8*K)       // again, and a new region
	w.write(volA, block.OpZero, false, 4*K, 2*K)        // short: zeros in place
	w.write(volA, block.OpTrim, false, 512, 32*K)       // off the grid
	w.write(volA, block.OpZero, true, 64*K+512, 20*K)   // allocated zeros
	w.clear(volA)                                       // a flush and clean marks
	w.write(volA, block.OpWrite, false, 4*K, 4*K)       // marked anew
	w.write(volA, block.OpTrim, false, E, E)            // a whole extent
	w.create(volB, 3*E)                                 // a neighbour
	w.seal(volB, 4)                                     // born under its own generation
	w.birth(volB, 0)                                    //
	w.write(volB, block.OpWrite, false, 0, 16*K)        // same addresses, other content
	w.grow(volA, 20*E)                                  // into the run and beyond
	w.write(volA, block.OpWrite, false, 15*E, 4*K)      // what growth added
	w.birth(volA, 1)                                    // a run of its own
	w.write(volA, block.OpWrite, false, 16*E-4*K, 12*K) // over the border of runs
	w.rename(volA, "second")                            // volume.json
	w.clear(volB)                                       //
	w.seal(volA, 2)                                     // a new primary
	w.write(volA, block.OpWrite, false, 0, 4*K)         //
	w.sync(volA)                                        //
	w.delete(volB)                                      //
	w.write(volA, block.OpWrite, false, 8*K, 4*K)       //
	ok(w.t, w.disk.Close())                             // an orderly end
}

// TestPowerCutRandom goes on from each power cut or kill, many times over.
func TestPowerCutRandom(t *testing.T) {
	first, count := number(t, "SEED", 1), uint64(60)
	if os.Getenv("SEED") != "" {
		count = 1
	}
	count = number(t, "SEEDS", count) // for a soak
	for seed := first; seed < first+count; seed++ {
		if !t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { randomLives(t, seed) }) {
			t.Fatalf("reproduce with: SEED=%d go test ./server/image -run TestPowerCutRandom", seed)
		}
	}
}

func number(t *testing.T, name string, otherwise uint64) uint64 {
	s := os.Getenv(name)
	if s == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(s, 10, 64)
	ok(t, err)
	return n
}

// errCut unwinds a workload whose machine has lost power.
var errCut = errors.New("cut")

func randomLives(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t)
	if rng.IntN(3) == 0 {
		w.config.Mode = Direct
	}
	w.init()
	for range 6 {
		left := 20 + rng.IntN(400)
		w.cut = func() {
			if left--; left == 0 {
				panic(errCut)
			}
		}
		w.busy = false
		life(w, rng)
		w.cut = func() {}
		killed := rng.IntN(2) == 0
		if killed {
			w.fs.Kill()
		} else {
			w.fs = w.fs.Crash(rng.Uint64())
		}
		// Look without leaving a trace, then again for good.
		if err := w.check(w.fs, killed, true); err != nil {
			t.Fatalf("seed %d, killed %v: %v", seed, killed, err)
		}
		w.fs.Kill()
	}
}

func life(w *world, rng *rand.Rand) {
	defer func() {
		if r := recover(); r != nil && r != errCut { //nolint:errorlint // the very value
			panic(r)
		}
	}()
	w.open()
	for {
		id := []block.VolumeID{volA, volB}[rng.IntN(2)]
		m := w.vols[id]
		if m == nil || !m.exists[0] {
			w.create(id, int64(1+rng.IntN(3))*extent-int64(rng.IntN(3))*4096)
			w.seal(id, 1+block.Generation(rng.IntN(3)))
			continue
		}
		randomStep(w, rng, id, m)
	}
}

func randomStep(w *world, rng *rand.Rand, id block.VolumeID, m *model) {
	r := block.RunIndex(rng.IntN(int(w.image(id).index.geometry.Runs(m.sure))))
	if !m.born[r] {
		if m.generation[0] == 0 {
			w.seal(id, 1)
		}
		w.birth(id, r)
		return
	}
	switch n := rng.IntN(100); {
	case n < 60:
		op := []block.Op{block.OpWrite, block.OpWrite, block.OpWrite, block.OpTrim, block.OpZero}[rng.IntN(5)]
		limit := min(m.sure, int64(r+1)*16*extent) - int64(r)*16*extent
		off := rng.Int64N(limit/sectorSize) * sectorSize
		length := min(limit-off, (1+rng.Int64N(1+rng.Int64N(100)))*sectorSize)
		w.write(id, op, rng.IntN(2) == 0, int64(r)*16*extent+off, length)
	case n < 75:
		w.sync(id)
	case n < 85:
		w.clear(id)
	case n < 90:
		w.seal(id, m.generation[0]+1)
	case n < 93 && m.sure < 20*extent:
		w.grow(id, m.sure+4096*(1+rng.Int64N(3*extent/4096)))
	case n < 96:
		w.rename(id, fmt.Sprint("name", rng.IntN(1000)))
	case n < 98:
		w.delete(id)
	}
}
