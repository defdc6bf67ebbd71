package primary

import "github.com/gabion-storage/gabion/server/block"

// rangeLock orders operations on overlapping ranges: each waits for every
// conflicting one that came before it, so writes of a range are done in the
// order of arrival and readers share. The grain is block.LockGrain.
//
// Every entry knows how many earlier conflicting entries are left. An entry of
// at most one region stands in the bucket of the region it starts in, so what
// overlaps it stands in three buckets at most, or among the long ones. That
// keeps both ends cheap: a handful in flight touch nearly empty buckets, and
// thousands of scattered ones are not all looked at. The zero value is ready.
type rangeLock struct {
	buckets [lockBuckets][]span
	long    []span // longer than a region
	order   uint64 // of the last arrival
	entries int
	waiting int // entries with blockers; with none, a release looks at nobody
}

const (
	lockBucketBits  = 6
	lockBuckets     = 1 << lockBucketBits // at most 64: visit keeps a set of them in a word
	lockRegionShift = 8                   // grains to regions: 1 MiB
	longBucket      = lockBuckets
)

type span struct {
	first, last int64 // grains, inclusive
	op          *Op
}

// lockEntry is an operation's part of the lock, embedded in Op.
type lockEntry struct {
	first, last int64
	order       uint64
	blockers    int // earlier conflicting entries that are still there
	bucket      int
	index       int // in its bucket
	exclusive   bool
	held        bool // in the lock, waiting or not
}

// acquire gives op its place for [off, off+length), length > 0, and reports whether it need not wait.
func (l *rangeLock) acquire(op *Op, off, length int64, exclusive bool) bool {
	l.order++
	e := &op.lock
	*e = lockEntry{
		first: off / block.LockGrain, last: (off + length - 1) / block.LockGrain,
		order: l.order, exclusive: exclusive, held: true,
	}
	l.visit(e, func(o *lockEntry, _ *Op) { e.blockers++ })
	l.insert(op)
	if e.blockers > 0 {
		l.waiting++
	}
	return e.blockers == 0
}

// release takes op out, whether it held its range or waited for it, and
// appends to granted who need not wait any more.
func (l *rangeLock) release(op *Op, granted []*Op) []*Op {
	e := &op.lock
	l.remove(e)
	if e.blockers > 0 {
		l.waiting--
	}
	if l.waiting == 0 {
		return granted
	}
	l.visit(e, func(o *lockEntry, other *Op) {
		if o.order < e.order {
			return
		}
		if o.blockers--; o.blockers == 0 {
			l.waiting--
			granted = append(granted, other)
		}
	})
	return granted
}

// visit calls f for every entry that conflicts with e.
func (l *rangeLock) visit(e *lockEntry, f func(*lockEntry, *Op)) {
	scan := func(spans []span) {
		for i := range spans {
			if s := &spans[i]; s.first <= e.last && e.first <= s.last && (e.exclusive || s.op.lock.exclusive) {
				f(&s.op.lock, s.op)
			}
		}
	}
	if len(l.long) > 0 {
		scan(l.long)
	}
	from, to := e.first>>lockRegionShift-1, e.last>>lockRegionShift
	if to-from >= lockBuckets-1 {
		for i := range l.buckets {
			scan(l.buckets[i])
		}
		return
	}
	var seen uint64 // regions may share a bucket
	for region := from; region <= to; region++ {
		i := bucketOf(region)
		if seen&(1<<i) == 0 {
			seen |= 1 << i
			scan(l.buckets[i])
		}
	}
}

// bucketOf spreads regions, also those at a power of two apart.
func bucketOf(region int64) int {
	return int(uint64(region) * 0x9e3779b97f4a7c15 >> (64 - lockBucketBits))
}

func (l *rangeLock) insert(op *Op) {
	e := &op.lock
	e.bucket = bucketOf(e.first >> lockRegionShift)
	if e.last-e.first >= 1<<lockRegionShift {
		e.bucket = longBucket
	}
	b := l.bucket(e.bucket)
	l.entries++
	e.index = len(*b)
	*b = append(*b, span{e.first, e.last, op})
}

func (l *rangeLock) remove(e *lockEntry) {
	b := l.bucket(e.bucket)
	last := len(*b) - 1
	if e.index != last {
		(*b)[e.index] = (*b)[last]
		(*b)[e.index].op.lock.index = e.index
	}
	(*b)[last] = span{}
	*b = (*b)[:last]
	l.entries--
	e.held = false
}

func (l *rangeLock) bucket(i int) *[]span {
	if i == longBucket {
		return &l.long
	}
	return &l.buckets[i]
}
