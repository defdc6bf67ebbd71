package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// knownFile, in the server's state directory, remembers which disk was at which
// path: a blank directory where a disk was is a missing mount, not a new disk.
const knownFile = "disks.json"

const knownLimit = 1 << 20

func (s *Store) readKnown() (map[string]block.DiskID, error) {
	known := map[string]block.DiskID{}
	dir, err := s.cfg.FS.OpenDir(s.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	b, err := vfs.ReadFile(dir, knownFile, knownLimit)
	if errors.Is(err, block.ErrNotFound) {
		return known, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &known)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; it says which disk belongs at which path: restore it, or remove it after checking that every disk is mounted",
			filepath.Join(s.cfg.StateDir, knownFile), err)
	}
	return known, nil
}

// remember records what is open where, durably, if it is news.
func (s *Store) remember() error {
	s.knownMu.Lock()
	defer s.knownMu.Unlock()
	now := maps.Clone(s.known)
	s.mu.Lock()
	for _, sl := range s.slots {
		if !sl.id.IsZero() {
			now[sl.path] = sl.id
		}
	}
	s.mu.Unlock()
	if maps.Equal(now, s.known) {
		return nil
	}
	if err := s.writeKnown(now); err != nil {
		return err
	}
	s.known = now
	return nil
}

// writeKnown replaces the file; durable on return.
func (s *Store) writeKnown(known map[string]block.DiskID) error {
	b, err := json.MarshalIndent(known, "", "  ")
	if err != nil {
		return err
	}
	dir, err := s.cfg.FS.OpenDir(s.cfg.StateDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return vfs.Replace(dir, knownFile, b)
}
