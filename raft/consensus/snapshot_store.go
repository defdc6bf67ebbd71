package consensus

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	snapshotBegin   = "GABSNAP1"
	snapshotEnd     = "GABSNEND"
	snapshotTrailer = 8 + 4 + len(snapshotEnd)
	maxSnapshotMeta = 1 << 20
	keptSnapshots   = 2
)

// snapshotStore keeps each snapshot in one file; see DESIGN.md for its format.
// The library's own store leaves entries of its directories unsynced.
type snapshotStore struct {
	dir string
	log *slog.Logger
}

type snapshotMeta struct {
	Index              uint64              `json:"index"`
	Term               uint64              `json:"term"`
	Configuration      hraft.Configuration `json:"configuration"`
	ConfigurationIndex uint64              `json:"configuration_index"`
}

func openSnapshots(dir string, log *slog.Logger) (*snapshotStore, error) {
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	s := &snapshotStore{dir: dir, log: log}
	unfinished, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	for _, path := range unfinished {
		err = errors.Join(err, os.Remove(path))
	}
	return s, err
}

func snapshotID(index, term uint64) string { return fmt.Sprintf("%020d-%020d", index, term) }

func (s *snapshotStore) path(id string) string { return filepath.Join(s.dir, id+".snap") }

// ids are the finished snapshots, newest first.
func (s *snapshotStore) ids() ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, "*.snap"))
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, path := range paths {
		id := strings.TrimSuffix(filepath.Base(path), ".snap")
		if _, ok := parseSnapshotID(id); ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids) // names of fixed width sort by index, then term
	slices.Reverse(ids)
	return ids, nil
}

func parseSnapshotID(id string) (index uint64, ok bool) {
	var term uint64
	n, err := fmt.Sscanf(id, "%020d-%020d", &index, &term)
	return index, err == nil && n == 2 && id == snapshotID(index, term)
}

// olderIndex is the index of the oldest snapshot of the full set, 0 while
// there are fewer: the log above it is still needed.
func (s *snapshotStore) olderIndex() uint64 {
	ids, err := s.ids()
	if err != nil || len(ids) < keptSnapshots {
		return 0
	}
	index, _ := parseSnapshotID(ids[keptSnapshots-1])
	return index
}

// List implements hraft.SnapshotStore: newest first, files with a readable head only.
func (s *snapshotStore) List() ([]*hraft.SnapshotMeta, error) {
	ids, err := s.ids()
	if err != nil {
		return nil, err
	}
	var list []*hraft.SnapshotMeta
	for _, id := range ids {
		r, err := s.open(id)
		if err != nil {
			s.log.Error("a snapshot is damaged", "snapshot", id, "err", err)
			continue
		}
		list = append(list, r.library())
		_ = r.Close()
	}
	return list, nil
}

// Open implements hraft.SnapshotStore. The checksum is verified before the
// first byte is given out.
func (s *snapshotStore) Open(id string) (*hraft.SnapshotMeta, io.ReadCloser, error) {
	r, err := s.open(id)
	if err != nil {
		return nil, nil, err
	}
	if err := r.verify(); err != nil {
		_ = r.Close()
		return nil, nil, err
	}
	return r.library(), r, nil
}

// setAside takes a damaged snapshot out of the list and leaves it for people.
func (s *snapshotStore) setAside(id string) error {
	return replace(s.path(id), filepath.Join(s.dir, id+".bad"))
}

// reap deletes all but the newest ones.
func (s *snapshotStore) reap() error {
	ids, err := s.ids()
	for i := keptSnapshots; i < len(ids); i++ {
		err = errors.Join(err, os.Remove(s.path(ids[i])))
	}
	return err
}

// snapshotReader is an open snapshot, positioned in its payload.
type snapshotReader struct {
	f     *os.File
	id    string
	meta  snapshotMeta
	begin int64 // of the payload
	size  int64
	*io.SectionReader
}

func (r *snapshotReader) Close() error { return r.f.Close() }

func (r *snapshotReader) library() *hraft.SnapshotMeta {
	return &hraft.SnapshotMeta{
		Version: 1, ID: r.id, Index: r.meta.Index, Term: r.meta.Term, Size: r.size,
		Configuration: r.meta.Configuration, ConfigurationIndex: r.meta.ConfigurationIndex,
	}
}

func (s *snapshotStore) open(id string) (_ *snapshotReader, err error) {
	index, ok := parseSnapshotID(id)
	if !ok {
		return nil, fmt.Errorf("%w: no snapshot %.60q", block.ErrNotFound, id)
	}
	f, err := os.Open(s.path(id))
	if err != nil {
		return nil, err
	}
	r := &snapshotReader{f: f, id: id}
	if err := r.readHead(); err != nil || r.meta.Index != index {
		return nil, errors.Join(fmt.Errorf("%w: snapshot %s: its head is damaged", block.ErrCorrupt, id), err, f.Close())
	}
	r.SectionReader = io.NewSectionReader(f, r.begin, r.size)
	return r, nil
}

func (r *snapshotReader) readHead() error {
	info, err := r.f.Stat()
	if err != nil {
		return err
	}
	fixed := make([]byte, len(snapshotBegin)+4)
	if _, err := io.ReadFull(r.f, fixed); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(fixed[len(snapshotBegin):])
	if string(fixed[:len(snapshotBegin)]) != snapshotBegin || n > maxSnapshotMeta {
		return errors.New("not a snapshot")
	}
	rest := make([]byte, n+4)
	if _, err := io.ReadFull(r.f, rest); err != nil {
		return err
	}
	if castagnoli(append(fixed, rest[:n]...)) != binary.LittleEndian.Uint32(rest[n:]) {
		return errors.New("checksum of the head")
	}
	r.begin = int64(len(fixed) + len(rest))
	r.size = info.Size() - r.begin - int64(snapshotTrailer)
	if r.size < 0 {
		return errors.New("too short")
	}
	return json.Unmarshal(rest[:n], &r.meta)
}

func (r *snapshotReader) verify() error {
	trailer := make([]byte, snapshotTrailer)
	if _, err := r.f.ReadAt(trailer, r.begin+r.size); err != nil {
		return err
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := io.Copy(sum, io.NewSectionReader(r.f, r.begin, r.size)); err != nil {
		return err
	}
	if !bytes.Equal(trailer, endOf(uint64(r.size), sum)) {
		return fmt.Errorf("%w: snapshot %s does not match its checksum", block.ErrCorrupt, r.id)
	}
	return nil
}

func endOf(size uint64, sum hash.Hash32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, size)
	b = binary.LittleEndian.AppendUint32(b, sum.Sum32())
	return append(b, snapshotEnd...)
}

// Create implements hraft.SnapshotStore.
func (s *snapshotStore) Create(version hraft.SnapshotVersion, index, term uint64, configuration hraft.Configuration,
	configurationIndex uint64, _ hraft.Transport) (hraft.SnapshotSink, error) {
	if version != 1 {
		return nil, fmt.Errorf("%w: snapshot version %d", block.ErrFormat, version)
	}
	meta, err := json.Marshal(snapshotMeta{index, term, configuration, configurationIndex})
	if err != nil {
		return nil, err
	}
	head := append([]byte(snapshotBegin), binary.LittleEndian.AppendUint32(nil, uint32(len(meta)))...)
	head = append(head, meta...)
	head = binary.LittleEndian.AppendUint32(head, castagnoli(head))

	id := snapshotID(index, term)
	f, err := os.CreateTemp(s.dir, id+".*.tmp")
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(head); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	return &snapshotSink{store: s, id: id, f: f, sum: sum, w: bufio.NewWriterSize(io.MultiWriter(f, sum), 64<<10)}, nil
}

// snapshotSink writes one snapshot. Close makes it durable and visible.
type snapshotSink struct {
	store *snapshotStore
	id    string
	f     *os.File
	w     *bufio.Writer
	sum   hash.Hash32
	size  uint64
	done  bool
}

// ID implements hraft.SnapshotSink.
func (s *snapshotSink) ID() string { return s.id }

// Write implements io.Writer.
func (s *snapshotSink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.size += uint64(n)
	return n, err
}

// Close implements hraft.SnapshotSink.
func (s *snapshotSink) Close() error {
	if s.done {
		return nil
	}
	s.done = true
	err := s.w.Flush()
	if err == nil {
		_, err = s.f.Write(endOf(s.size, s.sum))
	}
	if err = errors.Join(err, s.f.Sync(), s.f.Close()); err != nil {
		return errors.Join(err, os.Remove(s.f.Name()))
	}
	if err := replace(s.f.Name(), s.store.path(s.id)); err != nil {
		return err
	}
	return s.store.reap()
}

// Cancel implements hraft.SnapshotSink.
func (s *snapshotSink) Cancel() error {
	if s.done {
		return nil
	}
	s.done = true
	return errors.Join(s.f.Close(), os.Remove(s.f.Name()))
}
