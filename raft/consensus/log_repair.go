package consensus

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	walfs "github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// finishRotation completes what a crash interrupted between the append that
// seals a full segment file and the record of that in the meta store. Left
// alone, raft-wal opens such a segment as its tail and answers every append
// with "sealed"; and it takes a seal that was never committed for one. So the
// entries are copied to a fresh segment, whose end is known.
//
// The meta store is open and loaded on return.
func finishRotation(dir string, meta *metadb.BoltMetaDB, size int) error {
	state, err := meta.Load(dir)
	if err != nil || len(state.Segments) == 0 {
		return err
	}
	tail := &state.Segments[len(state.Segments)-1]
	if !tail.SealTime.IsZero() {
		return nil
	}
	filer := segment.NewFiler(dir, walfs.New())
	old, err := filer.RecoverTail(*tail)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // never written to
	}
	if err != nil {
		return fmt.Errorf("recover the tail of the raft log: %w", err)
	}
	if sealed, _, err := old.Sealed(); err != nil || !sealed {
		return errors.Join(err, old.Close())
	}
	entries, err := readSegment(old, tail.MinIndex)
	if err = errors.Join(err, old.Close()); err != nil {
		return fmt.Errorf("read the tail of the raft log: %w", err)
	}
	fresh, err := writeSegment(filer, state.NextSegmentID, tail, entries)
	if err != nil {
		return fmt.Errorf("rewrite the tail of the raft log: %w", err)
	}
	state.NextSegmentID++
	*tail = fresh
	if !fresh.SealTime.IsZero() {
		state.Segments = append(state.Segments, following(fresh, state.NextSegmentID, size))
		state.NextSegmentID++
	}
	return meta.CommitState(state) // the log deletes files that no record names
}

func readSegment(r types.SegmentWriter, first uint64) ([]types.LogEntry, error) {
	var entries []types.LogEntry
	for index := first; index <= r.LastIndex(); index++ {
		raw, err := r.GetLog(index)
		if err != nil {
			return nil, err
		}
		entries = append(entries, types.LogEntry{Index: index, Data: append([]byte(nil), raw.Bs...)})
		if err := raw.Close(); err != nil {
			return nil, err
		}
	}
	return entries, nil
}

// writeSegment writes entries, durably, to a new file in place of old.
func writeSegment(filer *segment.Filer, id uint64, old *types.SegmentInfo, entries []types.LogEntry) (types.SegmentInfo, error) {
	info := *old
	info.ID, info.BaseIndex, info.CreateTime = id, old.MinIndex, time.Now()
	if err := filer.Delete(info.BaseIndex, id); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return info, err // the leftover of a repair that did not finish either
	}
	w, err := filer.Create(info)
	if err != nil {
		return info, err
	}
	if err := w.Append(entries); err != nil {
		return info, errors.Join(err, w.Close())
	}
	sealed, indexStart, err := w.Sealed()
	if sealed {
		info.SealTime, info.MaxIndex, info.IndexStart = time.Now(), w.LastIndex(), indexStart
	}
	return info, errors.Join(err, w.Close())
}

// following is the record of the empty segment after a sealed one.
func following(sealed types.SegmentInfo, id uint64, size int) types.SegmentInfo {
	next := sealed
	next.ID, next.BaseIndex, next.MinIndex = id, sealed.MaxIndex+1, sealed.MaxIndex+1
	next.MaxIndex, next.IndexStart, next.SealTime = 0, 0, time.Time{}
	next.SizeLimit, next.CreateTime = uint32(size), time.Now()
	return next
}
