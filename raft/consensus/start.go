package consensus

import (
	"errors"
	"fmt"
	"log/slog"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// found is what the directory holds, checked.
type found struct {
	snapshot      uint64 // index of the snapshot to start from, 0: none
	last          uint64 // newest index
	bytes         int64  // of log after the snapshot
	commands      int64  // in the log after the snapshot
	configuration hraft.Configuration
	damaged       []string // snapshots newer than the one to start from
}

func (f found) empty() bool { return f.last == 0 }

// onlyVoter reports whether the newest configuration needs nobody but node.
func (f found) onlyVoter(node string) bool {
	voters := 0
	own := false
	for _, s := range f.configuration.Servers {
		if s.Suffrage == hraft.Voter {
			voters++
			own = own || s.ID == hraft.ServerID(node)
		}
	}
	return own && voters == 1
}

// inspect checks that the state can be rebuilt without a gap, from the newest
// snapshot that is whole and the log after it. If it cannot be, that is an
// error: raft itself would go on with a hole, or panic. Else damaged snapshots
// are set aside; not before, since they prove to the next start what is missing.
func inspect(snapshots *snapshotStore, logs *logStore, log *slog.Logger) (found, error) {
	f, reached, err := newestSnapshot(snapshots, log)
	if err != nil {
		return f, err
	}
	first, last, err := bounds(logs)
	if err != nil {
		return f, err
	}
	if last > 0 && last < f.snapshot {
		// The snapshot came from the leader and the log before it was not
		// removed yet. An append at the snapshot's index would leave a gap.
		if err := logs.DeleteRange(first, last); err != nil {
			return f, err
		}
		first, last = 0, 0
	}
	f.last = max(f.snapshot, last)
	if last > 0 && first > f.snapshot+1 {
		return f, hole(f.snapshot+1, first-1)
	}
	if reached > f.last {
		return f, hole(f.last+1, reached)
	}
	for index := f.snapshot + 1; index <= last; index++ {
		if err := f.read(logs, index); err != nil {
			return f, err
		}
	}
	for _, id := range f.damaged {
		if err := snapshots.setAside(id); err != nil {
			return f, err
		}
	}
	return f, nil
}

func hole(from, to uint64) error {
	return fmt.Errorf("%w: the metadata log has no entries %d to %d and no snapshot covers them: "+
		"restore the data directory from a backup, or empty it and let the node join again", block.ErrCorrupt, from, to)
}

// newestSnapshot finds the newest whole snapshot. reached is the newest index
// that any snapshot proves to have been there.
func newestSnapshot(snapshots *snapshotStore, log *slog.Logger) (f found, reached uint64, err error) {
	ids, err := snapshots.ids()
	if err != nil {
		return f, 0, err
	}
	for _, id := range ids {
		index, _ := parseSnapshotID(id)
		reached = max(reached, index)
		meta, r, err := snapshots.Open(id)
		if err == nil {
			f.snapshot, f.configuration = meta.Index, meta.Configuration
			return f, reached, r.Close()
		}
		log.Error("a metadata snapshot is damaged; starting from an older one if the log allows", "snapshot", id, "err", err)
		f.damaged = append(f.damaged, id)
	}
	return f, reached, nil
}

func bounds(logs *logStore) (first, last uint64, err error) {
	first, err1 := logs.FirstIndex()
	last, err2 := logs.LastIndex()
	return first, last, errors.Join(err1, err2)
}

// read checks one entry.
func (f *found) read(logs *logStore, index uint64) error {
	var l hraft.Log
	if err := logs.GetLog(index, &l); err != nil {
		return fmt.Errorf("%w: metadata log entry %d: %w", block.ErrCorrupt, index, err)
	}
	if l.Index != index {
		return fmt.Errorf("%w: metadata log entry %d says it is %d", block.ErrCorrupt, index, l.Index)
	}
	switch l.Type {
	case hraft.LogConfiguration:
		f.configuration = hraft.DecodeConfiguration(l.Data)
	case hraft.LogCommand:
		if _, err := unseal(index, l.Data); err != nil {
			return err
		}
		f.commands++
	}
	f.bytes += int64(len(l.Data))
	return nil
}
