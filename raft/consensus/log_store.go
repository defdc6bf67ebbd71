package consensus

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	hraft "github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
)

// logStore is raft-wal with what it leaves to its user: it survives a failed
// write, keeps the log back to the older snapshot, and knows its size and
// whether the disk hangs.
type logStore struct {
	dir     string
	segment int
	log     *slog.Logger

	// keep is the first index a later start might need: everything above the
	// older of the kept snapshots.
	keep func() uint64

	mu     sync.RWMutex // held to exchange wal and meta
	wal    *wal.WAL
	meta   *metadb.BoltMetaDB
	broken bool // by a failed write; raft's main goroutine only

	bytes   atomic.Int64 // payload appended by this process, and found after the snapshot at its start
	writing atomic.Int64 // start of the write in progress, Unix nanoseconds; 0: none

	// before is called at the start of each write; tests stop or fail it.
	before atomic.Value // func() error
}

func openLog(dir string, segment int, log *slog.Logger) (*logStore, error) {
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	s := &logStore{dir: dir, segment: segment, log: log, keep: func() uint64 { return 0 }}
	return s, s.open()
}

func (s *logStore) open() error {
	meta := &metadb.BoltMetaDB{}
	if err := finishRotation(s.dir, meta, s.segment); err != nil {
		return errors.Join(err, meta.Close())
	}
	w, err := wal.Open(s.dir, wal.WithMetaStore(meta), wal.WithSegmentSize(s.segment), wal.WithLogger(newLogger(s.log, "wal")))
	if err != nil {
		return errors.Join(err, meta.Close())
	}
	s.wal, s.meta = w, meta
	return nil
}

func (s *logStore) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.wal.Close(), s.meta.Close()) // the WAL leaves its meta store open
}

// reopen after a failed write: the writer of raft-wal counts the entries of a
// batch as appended before they are, and refuses the index for ever after.
func (s *logStore) reopen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := errors.Join(s.wal.Close(), s.meta.Close()); err != nil {
		s.log.Warn("closing the raft log after a failed write", "err", err)
	}
	return s.open()
}

// FirstIndex implements hraft.LogStore.
func (s *logStore) FirstIndex() (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.wal.FirstIndex()
}

// LastIndex implements hraft.LogStore.
func (s *logStore) LastIndex() (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.wal.LastIndex()
}

// GetLog implements hraft.LogStore.
func (s *logStore) GetLog(index uint64, l *hraft.Log) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	err := s.wal.GetLog(index, l)
	if errors.Is(err, wal.ErrNotFound) {
		return hraft.ErrLogNotFound
	}
	return err
}

// StoreLog implements hraft.LogStore.
func (s *logStore) StoreLog(l *hraft.Log) error { return s.StoreLogs([]*hraft.Log{l}) }

// StoreLogs implements hraft.LogStore: durable on return. After an error the
// entries may or may not be in the log.
func (s *logStore) StoreLogs(logs []*hraft.Log) error {
	s.writing.Store(time.Now().UnixNano())
	defer s.writing.Store(0)
	if s.broken {
		if err := s.recover(logs[0].Index); err != nil {
			return err
		}
	}
	err := s.store(logs)
	if err != nil {
		s.broken = true
		return fmt.Errorf("raft log: %w", err)
	}
	for _, l := range logs {
		s.bytes.Add(int64(len(l.Data)))
	}
	return nil
}

func (s *logStore) store(logs []*hraft.Log) error {
	if before, ok := s.before.Load().(func() error); ok {
		if err := before(); err != nil {
			return err
		}
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.wal.StoreLogs(logs)
}

// recover makes the log usable after a failed write. Entries of that write
// that did reach the disk are taken out: raft does not count them and is about
// to write other ones in their place.
func (s *logStore) recover(next uint64) error {
	if err := s.reopen(); err != nil {
		return fmt.Errorf("raft log: reopen after a failed write: %w", err)
	}
	last, err := s.wal.LastIndex()
	if err == nil && last >= next {
		err = s.wal.DeleteRange(next, last)
	}
	if err != nil {
		return fmt.Errorf("raft log: undo a failed write: %w", err)
	}
	s.broken = false
	return nil
}

// DeleteRange implements hraft.LogStore. A cut at the front stops before what
// keep names; deleting all (a snapshot was installed) and cutting the tail (a
// conflict with the leader) are done as asked.
func (s *logStore) DeleteRange(low, high uint64) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	first, err := s.wal.FirstIndex()
	if err != nil {
		return err
	}
	last, err := s.wal.LastIndex()
	if err != nil {
		return err
	}
	if low <= first && high < last {
		if high = min(high, max(s.keep(), 1)-1); high < first {
			return nil
		}
	}
	return s.wal.DeleteRange(low, high)
}

// IsMonotonic implements hraft.MonotonicLogStore: no gaps, ever.
func (s *logStore) IsMonotonic() bool { return true }

// Get implements hraft.StableStore.
func (s *logStore) Get(key []byte) ([]byte, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.wal.Get(key)
}

// GetUint64 implements hraft.StableStore.
func (s *logStore) GetUint64(key []byte) (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.wal.GetUint64(key)
}

// Set implements hraft.StableStore.
func (s *logStore) Set(key, value []byte) error {
	return s.insist(func() error { return s.wal.Set(key, value) })
}

// SetUint64 implements hraft.StableStore.
func (s *logStore) SetUint64(key []byte, value uint64) error {
	return s.insist(func() error { return s.wal.SetUint64(key, value) })
}

// insist repeats a write of term or vote until it succeeds, because raft
// panics if it does not, and a full metadata disk must not take the volumes of
// this process with it. Whoever closes the node meanwhile waits with it.
func (s *logStore) insist(write func() error) error {
	warned := false
	for {
		s.mu.RLock()
		err := write()
		s.mu.RUnlock()
		if err == nil {
			return nil
		}
		if !warned {
			s.log.Error("raft cannot write its term or vote; it waits until it can: free space on the metadata disk", "err", err)
			warned = true
		}
		time.Sleep(time.Second)
	}
}

// stalled reports whether the write in progress has taken longer than limit.
func (s *logStore) stalled(limit time.Duration) bool {
	since := s.writing.Load()
	return since != 0 && time.Now().UnixNano()-since > int64(limit)
}
