package image

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// statusOf checks the contract of Status and returns what it says, in one piece.
func statusOf(t *testing.T, i *Image, off, length int64, limit int) []block.Status {
	t.Helper()
	list, err := i.Status(nil, off, length, limit)
	ok(t, err)
	var sum int64
	for n, s := range list {
		sum += s.Length
		if s.Length <= 0 || n > 0 && list[n-1].Hole == s.Hole || sum != length && (off+sum)%statusGrain != 0 {
			t.Fatalf("descriptor %d of %+v", n, list)
		}
	}
	if sum > length || sum < length && len(list) != limit || len(list) > limit {
		t.Fatalf("%d of %d bytes in %d descriptors of %d", sum, length, len(list), limit)
	}
	return list
}

// B011, B012: status over a long range, at the end, one descriptor at a time.
func TestB012StatusAtTheEnd(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		size := int64(2*extent + 4096)
		i := newImage(t, d, volA, size)
		if s := statusOf(t, i, 0, size, 10); len(s) != 1 || !s[0].Hole || !s[0].Zero {
			t.Fatalf("a fresh volume: %+v", s)
		}
		ok(t, do(i, put(1, size-4096, fill(1, 512)))) // data in the first bytes of the last block
		ok(t, do(i, put(1, extent, fill(1, 4096))))
		s := statusOf(t, i, 0, size, 10)
		if s[len(s)-1].Hole || len(s) != 4 {
			t.Fatalf("%+v", s)
		}
		statusOf(t, i, 512, size-1024, 10)
		if s := statusOf(t, i, extent, extent, 1); len(s) != 1 || s[0].Hole || s[0].Length > extent {
			t.Fatalf("%+v", s)
		}
		// Appending leaves alone what was there.
		before := []block.Status{{Length: 1, Hole: true, Zero: true}}
		after, err := i.Status(before, 0, extent, 5)
		ok(t, err)
		if len(after) != 2 || after[0].Length != 1 {
			t.Fatalf("%+v", after)
		}
	})
}

// forEachDisk runs a test on a disk in memory and on a real one, in both modes.
func forEachDisk(t *testing.T, test func(t *testing.T, d *Disk)) {
	for _, mode := range []Mode{Buffered, Direct} {
		t.Run("mem "+mode.String(), func(t *testing.T) {
			test(t, openDisk(t, labFS(t), func(c *Config) { c.Mode = mode }))
		})
		t.Run("os "+mode.String(), func(t *testing.T) {
			fs, c := realDisk(t)
			c.Mode = mode
			d, err := Open(fs, c)
			if mode == Direct && err != nil {
				t.Skip(err) // a temporary directory without O_DIRECT
			}
			ok(t, err)
			t.Cleanup(func() { ok(t, d.Close()) })
			test(t, d)
		})
	}
}

func TestB013TrimGivesSpaceBack(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		i := newImage(t, d, volA, 16*extent)
		ok(t, do(i, put(1, 0, fill(1, 16*extent))))
		before, err := i.Allocated()
		ok(t, err)
		ok(t, do(i, erase(block.OpTrim, false, extent, 14*extent)))
		after, err := i.Allocated()
		ok(t, err)
		if before-after < 13*extent {
			t.Fatalf("%d bytes before, %d after", before, after)
		}
		isAll(t, get(t, i, 0, extent), 1)
		isAll(t, get(t, i, extent, 14*extent), 0)
		isAll(t, get(t, i, 15*extent, extent), 1)
		if n := d.Counters().TrimsWritten; n != 0 {
			t.Fatalf("%d trims counted as failed", n)
		}
	})
	t.Run("no holes", func(t *testing.T) {
		for _, mode := range []Mode{Buffered, Direct} {
			fs, rules := inject(t, labFS(t))
			d := openDisk(t, fs, func(c *Config) { c.Mode = mode })
			ok(t, rules.Add("punch * * unsupported"))
			ok(t, rules.Add("zero * * unsupported"))
			i := newImage(t, d, volA, 2*extent)
			ok(t, do(i, put(1, 512, fill(1, extent))))
			ok(t, do(i, erase(block.OpTrim, false, 1024, extent-4096)))
			ok(t, do(i, erase(block.OpZero, true, extent+512, 8192)))
			isAll(t, get(t, i, 512, 512), 1)
			isAll(t, get(t, i, 1024, extent-4096), 0)
			isAll(t, get(t, i, extent-3072, 3584), 1)
			isAll(t, get(t, i, extent+512, 8192), 0)
			if n := d.Counters().TrimsWritten; n != 1 {
				t.Fatalf("%d trims counted", n)
			}
		}
	})
}

func TestB014TrimOffTheGrid(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		const size = 2 * extent
		i := newImage(t, d, volA, size)
		model := make([]byte, size)
		for n := range model {
			model[n] = byte(n/512) | 1
		}
		ok(t, do(i, put(1, 0, model)))
		for _, op := range []block.Op{block.OpTrim, block.OpZero} {
			for _, w := range []*block.IO{
				erase(op, false, 512, 9728), erase(op, true, 20<<10+512, 9728), erase(op, false, size-4096, 4096),
				erase(op, false, 64<<10+512, 64<<10), erase(op, true, extent-512, 70<<10+512),
			} {
				ok(t, do(i, w))
				clear(model[w.Offset : w.Offset+w.Length])
			}
			for _, w := range []*block.IO{erase(op, false, size-4096, 8192), erase(op, false, size, 512), erase(op, false, 0, 0)} {
				want(t, do(i, w), block.ErrInvalid)
			}
			if !bytes.Equal(get(t, i, 0, size), model) {
				t.Fatal("differs from the model")
			}
		}
	})
}

func TestB016OffsetArithmeticWraps(t *testing.T) {
	i := newImage(t, openDisk(t, labFS(t)), volA, extent)
	ok(t, do(i, put(1, 0, fill(1, extent))))
	offsets := []int64{math.MinInt64, -512, -1, extent - 512, extent, math.MaxInt64 - 511, math.MaxInt64}
	for _, off := range offsets {
		for _, length := range []int64{1024, extent + 512, math.MaxInt64} {
			for _, op := range []block.Op{block.OpTrim, block.OpZero} {
				want(t, do(i, erase(op, false, off, length)), block.ErrInvalid)
			}
			_, err := i.Status(nil, off, length, 10)
			want(t, err, block.ErrInvalid)
		}
		want(t, do(i, put(1, off, fill(2, 1024))), block.ErrInvalid)
		want(t, i.ReadAt(make([]byte, 1024), off), block.ErrInvalid)
		if done, _ := i.TryReadAt(make([]byte, 1024), off); done {
			t.Fatal("read beyond the end")
		}
		if done, _ := i.TryWrite(put(1, off, fill(2, 1024))); done {
			t.Fatal("wrote beyond the end")
		}
	}
	want(t, i.Write(&block.IO{Op: block.OpRead, Length: 512}), block.ErrInvalid)
	want(t, do(i, &block.IO{Op: block.OpWrite, Length: 512}), block.ErrInvalid)
	isAll(t, get(t, i, 0, extent), 1)
	if held := i.disk.space.held.Load(); held != 0 {
		t.Fatalf("%d bytes of credit left", held)
	}
}

// B018, with a model file: operations over many extents, in all sizes.
func TestB018ManyExtents(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		const size = 16 * extent
		rng := rand.New(rand.NewPCG(18, 0))
		i := newImage(t, d, volA, size)
		model := make([]byte, size)
		for n := range 60 {
			off := rng.Int64N(size/512) * 512
			length := min(size-off, (1+rng.Int64N(1+rng.Int64N(size/512)))*512)
			switch w := erase(block.OpTrim, false, off, length); n % 4 {
			case 0, 1:
				p := fill(byte(n+1), int(length))
				ok(t, do(i, put(n, off, p)))
				copy(model[off:], p)
			default:
				if n%4 == 3 {
					w = erase(block.OpZero, n%8 == 3, off, length)
				}
				ok(t, do(i, w))
				clear(model[off : off+length])
			}
			for _, step := range []int{512, 3 * extent, 1 << 20} {
				at := rng.Int64N((size-int64(step))/512) * 512
				if !bytes.Equal(get(t, i, at, step), model[at:at+int64(step)]) {
					t.Fatalf("operation %d: %d bytes at %d differ", n, step, at)
				}
			}
		}
		if !bytes.Equal(get(t, i, 0, size), model) {
			t.Fatal("differs from the model")
		}
	})
}

// B133: each small file in turn empty, half, random or gone.
func TestB133DamagedMetadataFiles(t *testing.T) {
	damages := map[string]func(p []byte) []byte{
		"empty":  func([]byte) []byte { return []byte{} },
		"half":   func(p []byte) []byte { return p[:len(p)/2] },
		"random": func(p []byte) []byte { return fill(0x5a, len(p)) },
		"gone":   func([]byte) []byte { return nil },
	}
	outcomes := map[string]map[string]error{ // nil: opens
		volumeFile: {"empty": nil, "half": nil, "random": nil, "gone": nil},
		indexFile:  {"empty": block.ErrCorrupt, "half": nil, "random": block.ErrCorrupt, "gone": block.ErrCorrupt},
		imageFile:  {"empty": nil, "half": nil, "gone": block.ErrCorrupt},
	}
	for file, byDamage := range outcomes {
		for damage, target := range byDamage {
			t.Run(file+" "+damage, func(t *testing.T) {
				m := labFS(t)
				d := openDisk(t, m)
				newImage(t, d, volB, extent)
				i := newImage(t, d, volA, 32*extent)
				ok(t, i.Birth(1, []block.RunIndex{1}))
				ok(t, do(i, put(1, 0, fill(1, 4096))))
				ok(t, i.Sync())
				ok(t, d.Close())
				spoil(t, m, file, damages[damage])

				d = openDisk(t, m)
				isAll(t, get(t, getImage(t, d, volB), 0, extent), 0) // the others go on
				i, err := d.Image(volA)
				if target != nil {
					want(t, err, target)
					ok(t, d.Err())
					ok(t, d.Quarantine(volA, "damaged"))
					newImage(t, d, volA, extent) // rebuilt
					return
				}
				ok(t, err)
				lost := i.Lost([]block.RunIndex{0, 1})
				_, described := i.Description()
				switch file {
				case volumeFile:
					if described || len(lost) > 0 {
						t.Fatalf("described %v, lost %v", described, lost)
					}
					ok(t, i.SetDescription(Description{ID: volA, Name: "again"}))
					isAll(t, get(t, i, 0, 4096), 1)
				case imageFile:
					if n := map[string]int{"empty": 32, "half": 16}[damage]; len(lost) != n || lost[n-1] != 31 {
						t.Fatalf("lost %v", lost)
					}
				case indexFile: // cut behind the header and the first page
					if len(lost) > 32 {
						t.Fatalf("lost %v", lost)
					}
				}
			})
		}
	}
}

func spoil(t *testing.T, m *vfs.Mem, name string, damage func([]byte) []byte) {
	t.Helper()
	dir, err := m.OpenDir("/disk/volumes/" + volA.String())
	ok(t, err)
	if name == imageFile { // too long to read: cut it
		f, err := dir.Open(name, 0)
		ok(t, err)
		info, err := f.Stat()
		ok(t, err)
		if p := damage(make([]byte, 1000)); p == nil {
			ok(t, dir.Unlink(name))
		} else {
			ok(t, f.Truncate(info.Size*int64(len(p))/1000))
		}
		ok(t, f.Close())
		return
	}
	p, err := vfs.ReadFile(dir, name, 1<<30)
	ok(t, err)
	if p = damage(p); p == nil {
		ok(t, dir.Unlink(name))
		return
	}
	ok(t, vfs.Replace(dir, name, p))
}

// B142: small writes far apart take what they need and not their surroundings.
func TestB142HolesAreHoles(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		i := newImage(t, d, volA, 16*extent)
		for off := int64(0); off < 16*extent; off += 64 << 10 {
			ok(t, do(i, put(1, off, fill(1, 4096))))
		}
		ok(t, i.Sync())
		used, err := i.img.Stat()
		ok(t, err)
		if data := int64(16*extent) / 16; used.Allocated > data*3/2 {
			t.Fatalf("%d bytes for %d of data", used.Allocated, data)
		}
	})
}

// B160: small trims make no holes in what is allocated, and allocate nothing in holes.
func TestB160SmallTrims(t *testing.T) {
	forEachDisk(t, func(t *testing.T, d *Disk) {
		i := newImage(t, d, volA, 2*extent)
		ok(t, do(i, put(1, 0, fill(1, extent))))
		for off := int64(4096); off < 2*extent; off += 16 << 10 {
			ok(t, do(i, erase(block.OpTrim, false, off, 4096)))
			isAll(t, get(t, i, off, 4096), 0)
		}
		ok(t, i.Sync())
		if s := statusOf(t, i, 0, 2*extent, 100); len(s) != 2 || s[0].Length != extent {
			t.Fatalf("%+v", s)
		}
		isAll(t, get(t, i, 0, 4096), 1)
		isAll(t, get(t, i, 8192, 8192), 1)
	})
}

// B167: a new volume on used space, a grown one, a trimmed one, a partly
// written block: zeros or one's own data, also after a power cut.
func TestB167NoOldTenantsData(t *testing.T) {
	const marker = 0xee
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, 4*extent)
	ok(t, do(i, put(1, 0, fill(marker, 4*extent))))
	ok(t, i.Sync())
	ok(t, d.Quarantine(volA, "deleted"))
	ok(t, d.Purge(volA))
	i = newImage(t, d, volA, extent) // the very same id, to be nasty
	ok(t, do(i, put(2, 512, fill(1, 512))))
	ok(t, i.Grow(4*extent))
	ok(t, do(i, put(2, extent+512, fill(1, 512))))
	for seed := range uint64(20) {
		for _, i := range []*Image{i, getImage(t, openDisk(t, m.Crash(seed)), volA)} {
			if p := get(t, i, 0, 4*extent); bytes.IndexByte(p, marker) >= 0 {
				t.Fatalf("seed %d: old data at %d", seed, bytes.IndexByte(p, marker))
			}
		}
	}
}
