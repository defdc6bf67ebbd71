package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
)

// checkDisks keeps an empty --data beside a disk of some cluster from founding
// another one (H70), and says early what a new server needs.
func (s *server) checkDisks(context.Context) error {
	founded, err := s.founded()
	if err != nil {
		return err
	}
	s.warnShared()
	if founded {
		return nil
	}
	switch {
	case s.join != "":
		return fmt.Errorf("%w: --join %s: this version has one metadata server to a cluster, so no other can enter it: start with --bootstrap", block.ErrUnsupported, s.join)
	case !s.bootstrap:
		return fmt.Errorf("%w: --data %s is empty: found a cluster with --bootstrap, or name the directory that this server had before", block.ErrPrecondition, s.data)
	}
	for _, path := range s.disks {
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%w: --disk %s: there is no such directory: mount the disk's file system there, or create it", block.ErrNotFound, path)
		}
		id, err := image.Probe(s.fs, path)
		switch {
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

// founded reports whether this server was part of a cluster before.
func (s *server) founded() (bool, error) {
	_, err := os.Lstat(filepath.Join(s.raftDir(), "identity.json"))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w: --data %s: %w", block.ErrUnavailable, s.data, err)
	}
	return true, nil
}

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
// without any from looking alive.
func (s *server) someDisk() error {
	var problems []string
	for _, r := range s.store.Reports() {
		if r.Online {
			return nil
		}
		problems = append(problems, r.Problem)
	}
	return fmt.Errorf("%w: no disk can be used: %s", block.ErrUnavailable, strings.Join(problems, "; "))
}
