package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
)

// checkData says early what a new server needs, and learns what one that joins
// must know. It keeps an empty --data beside a disk of some cluster from founding
// another one (H70).
func (s *server) checkData(ctx context.Context) (err error) {
	if s.origin, s.cluster, err = consensus.OriginOf(s.raftDir()); err != nil {
		return fmt.Errorf("--data %s: %w", s.data, err)
	}
	s.warnShared()
	switch {
	case s.enters():
		if err := s.meet(ctx); err != nil {
			return err
		}
	case s.origin == consensus.Founded && s.join != "":
		return s.checkJoin(ctx, s.cluster)
	case s.origin != consensus.Blank:
		return nil
	case !s.bootstrap:
		return fmt.Errorf("%w: --data %s is empty: found a cluster with --bootstrap, enter one with --join, or name the directory that this server had before",
			block.ErrPrecondition, s.data)
	}
	return s.checkDisks()
}

// checkDisks looks at the disks of a server that is new: they are blank, or of the cluster that it enters.
func (s *server) checkDisks() error {
	for _, path := range s.disks {
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%w: --disk %s: there is no such directory: mount the disk's file system there, or create it", block.ErrNotFound, path)
		}
		id, err := image.Probe(s.fs, path)
		switch {
		case err == nil && s.enters() && id.Cluster == s.cluster:
		case err == nil && s.enters():
			return fmt.Errorf("%w: disk %s belongs to cluster %s, and --join %s is cluster %s: name another disk",
				block.ErrPrecondition, path, id.Cluster, s.join, s.cluster)
		case err == nil:
			return fmt.Errorf("%w: disk %s belongs to cluster %s, but --data %s is empty: "+
				"a new cluster would know nothing of its volumes. Name the --data directory of that cluster (restore it if it is lost), or another disk",
				block.ErrPrecondition, path, id.Cluster, s.data)
		case !errors.Is(err, block.ErrNotFound):
			return fmt.Errorf("disk %s: %w", path, err)
		}
	}
	return nil
}

func (s *server) raftDir() string { return filepath.Join(s.data, "raft") }

// warnShared says which disks have no file system of their own: fine to try
// things out, but then one is full when the other is, and a mount that is
// missing at the first start looks just like this.
func (s *server) warnShared() {
	seen := map[uint64]string{}
	for _, path := range append([]string{s.data}, s.disks...) {
		var st syscall.Stat_t
		if syscall.Stat(path, &st) != nil {
			continue // whoever opens it says why
		}
		if other, shared := seen[st.Dev]; shared {
			s.log.Warn("a disk has no file system of its own", "path", path, "shared_with", other)
		}
		seen[st.Dev] = path
	}
}

// someDisk lets a server with a dead disk serve its others, and keeps one
// that has lost all from looking alive. One that was given none serves no volume.
func (s *server) someDisk() error {
	if len(s.disks) == 0 {
		return nil
	}
	var problems []string
	for _, r := range s.store.Reports() {
		if r.Online {
			return nil
		}
		problems = append(problems, r.Problem)
	}
	return fmt.Errorf("%w: no disk can be used: %s", block.ErrUnavailable, strings.Join(problems, "; "))
}
