package image

import (
	"errors"
	"fmt"
	"io"

	"github.com/gabion-storage/gabion/server/block"
)

// Birth makes every extent of the runs present, zero, born at g, which must
// be the sealed generation; durable on return. Repeats are no-ops. An extent
// that was written since it was born in an older generation is never touched:
// ErrPrecondition. ErrStale: g is below the sealed generation. ErrNoSpace:
// nothing can be relied on to be born.
func (i *Image) Birth(g block.Generation, runs []block.RunIndex) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if err := i.birth(g, runs); err != nil {
		return fmt.Errorf("birth in volume %s at generation %d: %w", i.name, g, err)
	}
	return nil
}

func (i *Image) birth(g block.Generation, runs []block.RunIndex) error {
	x := &i.index
	// One birth or record write at a time: a repeat that races with the first finds its records.
	x.turn.Lock()
	defer x.turn.Unlock()
	switch sealed := x.header.generation; {
	case g < sealed:
		return fmt.Errorf("%w: disk %s has seen generation %d", block.ErrStale, i.disk.name, sealed)
	case g > sealed:
		return fmt.Errorf("%w: sealed at generation %d only", block.ErrPrecondition, sealed)
	}
	unborn, err := i.unborn(g, runs)
	if err != nil || len(unborn) == 0 {
		return err
	}
	// The index grows by two pages for a group at most; on a full disk no birth is begun.
	space := int64(len(runs)) * groupSize
	enough := i.disk.space.take(space)
	defer i.disk.space.give(space, true)
	if !enough {
		return fmt.Errorf("disk %s: %w", i.disk.name, block.ErrNoSpace)
	}
	if err := i.blank(unborn); err != nil {
		return err
	}
	return x.bear(g, unborn)
}

// extents of the runs, also those beyond the size: growth into a run needs no birth.
func (i *Image) extents(runs []block.RunIndex) ([]block.ExtentIndex, error) {
	limit := i.index.geometry.Runs(i.size.Load())
	list := make([]block.ExtentIndex, 0, len(runs)*block.ExtentsPerRun)
	for _, r := range runs {
		if int64(r) >= limit {
			return nil, fmt.Errorf("%w: run %d of a volume with %d", block.ErrInvalid, r, limit)
		}
		for n := range block.ExtentIndex(block.ExtentsPerRun) {
			list = append(list, r.First()+n)
		}
	}
	return list, nil
}

// unborn is which extents a birth at g has to make, after it has refused what must not be touched.
func (i *Image) unborn(g block.Generation, runs []block.RunIndex) ([]block.ExtentIndex, error) {
	extents, err := i.extents(runs)
	if err != nil {
		return nil, err
	}
	x := &i.index
	var list []block.ExtentIndex
	for _, e := range extents {
		if err := x.loadInTurn(e); err != nil {
			return nil, i.disk.judge(err)
		}
		x.mu.Lock()
		r := *x.record(e)
		x.mu.Unlock()
		switch {
		case r.damaged:
			return nil, fmt.Errorf("%w: the record of extent %d is damaged; it may stand for data", block.ErrPrecondition, e)
		case r.flags&present == 0:
			list = append(list, e)
		case r.born == g:
			// This very birth, done before; there may be writes since.
		case r.flags&written != 0 || r.born > g:
			return nil, fmt.Errorf("%w: extent %d was born at generation %d and written since", block.ErrPrecondition, e, r.born)
		default:
			list = append(list, e) // an older birth that was never committed
		}
	}
	return list, nil
}

// blank makes the extents read as zeros, durably, whatever lay there (H49).
func (i *Image) blank(extents []block.ExtentIndex) error {
	size, extent := i.size.Load(), i.index.geometry.ExtentSize
	changed := false
	for first, last := range ranges(extents) {
		start, end := int64(first)*extent, min(size, (int64(last)+1)*extent)
		if end <= start {
			continue // beyond the size: nothing was ever written there
		}
		if err := i.extend(end, end); err != nil {
			return err
		}
		at, err := i.img.SeekData(start)
		if errors.Is(err, io.EOF) || err == nil && at >= end {
			continue
		}
		if err == nil {
			err = i.trim(start, end-start)
		}
		if err != nil {
			return i.disk.judge(err)
		}
		changed = true
	}
	// After a kill a hole may be there that an interrupted birth did not sync.
	if !changed && i.index.synced.Load() > 0 {
		return nil
	}
	if err := i.syncAll(); err != nil {
		return i.disk.judge(err)
	}
	return nil
}

// ranges yields first and last of each row of consecutive extents.
func ranges(extents []block.ExtentIndex) func(yield func(first, last block.ExtentIndex) bool) {
	return func(yield func(first, last block.ExtentIndex) bool) {
		for a := 0; a < len(extents); {
			b := a
			for b+1 < len(extents) && extents[b+1] == extents[b]+1 {
				b++
			}
			if !yield(extents[a], extents[b]) {
				return
			}
			a = b + 1
		}
	}
}

// bear writes both slots of each record. Called in turn.
func (x *index) bear(g block.Generation, extents []block.ExtentIndex) error {
	slots := make([]slot, 0, 2*len(extents))
	x.mu.Lock()
	for _, e := range extents {
		s := slot{counter: x.record(e).counter + 1, extent: e, flags: present, born: g}
		slots = append(slots, s)
		s.counter++
		slots = append(slots, s)
	}
	x.mu.Unlock()
	if err := x.writeSlots(slots); err != nil {
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for n, e := range extents {
		x.record(e).slot = slots[2*n+1]
		group := x.group(e)
		group.present.Store(group.present.Load() | 1<<(e%slotsPerPage))
	}
	return nil
}

// DropBirths forgets births below g that were never written: orphans, on the
// caller's proof that no commit of theirs can succeed any more. Others are
// left as they are. Durable on return.
func (i *Image) DropBirths(g block.Generation, runs []block.RunIndex) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if err := i.dropBirths(g, runs); err != nil {
		return fmt.Errorf("drop births of volume %s: %w", i.name, err)
	}
	return nil
}

func (i *Image) dropBirths(g block.Generation, runs []block.RunIndex) error {
	extents, err := i.extents(runs)
	if err != nil {
		return err
	}
	x := &i.index
	x.turn.Lock()
	defer x.turn.Unlock()
	var orphans []block.ExtentIndex
	var slots []slot
	for _, e := range extents {
		if err := x.loadInTurn(e); err != nil {
			return i.disk.judge(err)
		}
		x.mu.Lock()
		if r := x.record(e); r.flags&(present|written) == present && r.born < g && r.clean() {
			orphans = append(orphans, e)
			slots = append(slots, slot{counter: r.counter + 1, extent: e, born: r.born})
			group := x.group(e)
			group.present.Store(group.present.Load() &^ (1 << (e % slotsPerPage)))
		}
		x.mu.Unlock()
	}
	if len(orphans) == 0 {
		return nil
	}
	if err := x.writeSlots(slots); err != nil {
		return err
	}
	x.mu.Lock()
	for n, e := range orphans {
		x.record(e).slot = slots[n]
	}
	x.mu.Unlock()
	return i.blank(orphans)
}
