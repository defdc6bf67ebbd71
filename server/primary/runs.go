package primary

import (
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// runTable says where each run of a volume is. A 64 TiB volume without data
// costs a slice header: pages exist where runs were born or are wanted.
type runTable struct {
	pages []*[runPage]setIndex
	sets  []copySet           // sets[i] is setIndex i+firstSet
	known map[string]setIndex // by the disks' ids, one after the other; looked up, never iterated
}

const runPage = 256

// setIndex is what a run's entry says.
type setIndex uint32

const (
	unborn   setIndex = iota // reads as zeros
	wanted                   // as unborn, and a birth was asked for
	firstSet                 // from here on: born on that set of copies
)

// copySet is the copies that hold a run, in the order of the placement.
type copySet struct{ copies []*Copy }

func (t *runTable) at(r block.RunIndex) setIndex {
	if p := int(r / runPage); p < len(t.pages) && t.pages[p] != nil {
		return t.pages[p][r%runPage]
	}
	return unborn
}

func (t *runTable) put(r block.RunIndex, s setIndex) {
	p := int(r / runPage)
	if p >= len(t.pages) {
		t.pages = append(t.pages, make([]*[runPage]setIndex, p+1-len(t.pages))...)
	}
	if t.pages[p] == nil {
		t.pages[p] = new([runPage]setIndex)
	}
	t.pages[p][r%runPage] = s
}

func (t *runTable) set(s setIndex) *copySet { return &t.sets[s-firstSet] }

// setOf is the set of these copies, made if need be.
func (t *runTable) setOf(copies []*Copy) setIndex {
	var key []byte
	for _, c := range copies {
		key = append(key, c.Disk.UUID[:]...)
	}
	if s, ok := t.known[string(key)]; ok {
		return s
	}
	if t.known == nil {
		t.known = make(map[string]setIndex)
	}
	t.sets = append(t.sets, copySet{copies: slices.Clone(copies)})
	s := firstSet + setIndex(len(t.sets)-1)
	t.known[string(key)] = s
	return s
}

// born lists the committed runs of which cp holds a copy, in order.
func (t *runTable) born(cp *Copy) []block.RunIndex {
	mine := make([]bool, len(t.sets))
	for i := range t.sets {
		mine[i] = slices.Contains(t.sets[i].copies, cp)
	}
	var runs []block.RunIndex
	for p, page := range t.pages {
		if page == nil {
			continue
		}
		for i, s := range page {
			if s >= firstSet && mine[s-firstSet] {
				runs = append(runs, block.RunIndex(p*runPage+i))
			}
		}
	}
	return runs
}
