package primary

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

var seed = flag.Uint64("seed", 0, "repeat one random run; 0: many")

func seeds(t *testing.T, n int, f func(t *testing.T, r *rand.Rand)) {
	t.Helper()
	from, to := uint64(1), uint64(n)
	if *seed != 0 {
		from, to = *seed, *seed
	}
	for s := from; s <= to && !t.Failed(); s++ {
		f(t, rand.New(rand.NewPCG(s, 0)))
		if t.Failed() {
			t.Logf("repeat with: go test ./server/primary -run '^%s$' -seed %d", t.Name(), s)
		}
	}
}

// TestRangeLock compares the lock with the rule in its shortest form: an entry
// waits for every earlier entry that conflicts with it.
func TestRangeLock(t *testing.T) {
	type entry struct {
		op      *Op
		granted bool
	}
	seeds(t, 300, func(t *testing.T, r *rand.Rand) {
		var l rangeLock
		var list []*entry // in order of arrival
		mayRun := func(i int) bool {
			e := &list[i].op.lock
			return !slices.ContainsFunc(list[:i], func(o *entry) bool {
				f := &o.op.lock
				return f.first <= e.last && e.first <= f.last && (e.exclusive || f.exclusive)
			})
		}
		space := int64(1) << (12 + r.IntN(24))
		for range 400 {
			if len(list) == 0 || len(list) < 200 && r.IntN(2) == 0 {
				length := int64(1) << r.IntN(32)
				off := r.Int64N(space)
				e := &entry{op: new(Op)}
				e.granted = l.acquire(e.op, off, length, r.IntN(2) == 0)
				list = append(list, e)
				if want := mayRun(len(list) - 1); e.granted != want {
					t.Errorf("entry [%d, %d): granted %v, want %v", off, off+length, e.granted, want)
					return
				}
				continue
			}
			i := r.IntN(len(list))
			gone := list[i]
			list = slices.Delete(list, i, i+1)
			for _, op := range l.release(gone.op, nil) {
				k := slices.IndexFunc(list, func(e *entry) bool { return e.op == op })
				if k < 0 || list[k].granted {
					t.Error("granted twice, or to nobody")
					return
				}
				list[k].granted = true
			}
			for k, e := range list {
				if e.granted != mayRun(k) {
					t.Errorf("entry %d of %d: granted %v", k, len(list), e.granted)
					return
				}
			}
		}
	})
}

func TestRunTable(t *testing.T) {
	var rt runTable
	a, b := &Copy{Disk: block.DiskID{UUID: id(1)}}, &Copy{Disk: block.DiskID{UUID: id(2)}}
	sa, sb, sab := rt.setOf([]*Copy{a}), rt.setOf([]*Copy{b}), rt.setOf([]*Copy{a, b})
	if sa == sb || rt.setOf([]*Copy{a, b}) != sab || sa < firstSet {
		t.Fatal("sets")
	}
	rt.put(0, sa)
	rt.put(65535, sb)
	rt.put(300, sab)
	rt.put(301, wanted)
	if rt.at(0) != sa || rt.at(1) != unborn || rt.at(1<<31) != unborn || rt.at(301) != wanted {
		t.Fatal("entries")
	}
	if got := rt.born(a); !slices.Equal(got, []block.RunIndex{0, 300}) {
		t.Fatal(got)
	}
	if got := rt.born(b); !slices.Equal(got, []block.RunIndex{300, 65535}) {
		t.Fatal(got)
	}
}

// BenchmarkLockMany is one arrival and one release among 4,096 entries: scattered, or all in a row.
func BenchmarkLockMany(b *testing.B) {
	for name, stride := range map[string]int64{"scattered": 1 << 30, "in a row": 4096} {
		b.Run(name, func(b *testing.B) {
			var l rangeLock
			ops := make([]Op, 4096)
			for i := range ops {
				l.acquire(&ops[i], int64(i)*stride, 4096, true)
			}
			for i := 0; b.Loop(); i++ {
				op := &ops[i%len(ops)]
				l.release(op, nil)
				l.acquire(op, int64(i%len(ops))*stride, 4096, true)
			}
		})
	}
}
