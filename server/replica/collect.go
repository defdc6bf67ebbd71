package replica

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
)

// Fate is what became of a volume, as a linearizable read says.
type Fate uint8

const (
	Unknown   Fate = iota // never heard of: proves nothing
	Live                  // it exists
	Tombstone             // it was deleted, for ever
)

// Registry answers, linearizably, what became of a volume of the cluster.
// ErrPrecondition: the registry is another cluster's.
type Registry interface {
	Fate(ctx context.Context, cluster block.ClusterID, id block.VolumeID) (Fate, error)
}

func (s *Store) collectLoop(ctx context.Context) {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for {
		s.collectAll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.collect:
		}
	}
}

// collectAll looks at every volume on every online disk once.
func (s *Store) collectAll(ctx context.Context) {
	for _, d := range s.online() {
		var unknown []block.VolumeID
		for _, id := range slices.Concat(d.Images(), d.Quarantined()) {
			fate, err := s.cfg.Registry.Fate(ctx, s.cfg.Cluster, id)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				s.cfg.Log.Debug("collection waits for the metadata service", "err", err)
				return
			case fate == Unknown:
				unknown = append(unknown, id)
			case fate == Tombstone:
				if err := s.remove(ctx, d, id); err != nil && ctx.Err() == nil {
					s.cfg.Log.Warn("cannot remove a deleted volume's files yet", "volume_id", id.String(), "disk_id", d.ID().String(), "err", err)
				}
			}
		}
		s.noteUnknown(d, unknown)
	}
}

// remove deletes the files of a volume that a tombstone names.
func (s *Store) remove(ctx context.Context, d *image.Disk, id block.VolumeID) error {
	if err := s.evict(ctx, d, id); err != nil {
		return err
	}
	if err := d.Quarantine(id, "deleted"); err != nil && !errors.Is(err, block.ErrNotFound) {
		return err
	}
	if err := s.cfg.Fault.Hit("collect.unlink", id.String()); err != nil {
		return err
	}
	if fate, err := s.cfg.Registry.Fate(ctx, s.cfg.Cluster, id); err != nil || fate != Tombstone {
		return err
	}
	if err := d.Purge(id); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.seats, key{d.ID(), id})
	s.mu.Unlock()
	s.cfg.Log.Info("removed a deleted volume's files", "volume_id", id.String(), "disk_id", d.ID().String())
	return nil
}

// evict closes the volume's fence on the disk for good and waits until nothing is in flight.
func (s *Store) evict(ctx context.Context, d *image.Disk, id block.VolumeID) error {
	s.mu.Lock()
	st := s.seats[key{d.ID(), id}]
	s.mu.Unlock()
	if st == nil {
		return nil
	}
	st.sealing.Lock()
	defer st.sealing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return st.shut(ctx)
}

func (s *Store) noteUnknown(d *image.Disk, unknown []block.VolumeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sl := range s.slots {
		if sl.disk != d {
			continue
		}
		if len(unknown) > 0 && !slices.Equal(sl.unknown, unknown) {
			s.cfg.Log.Error("volumes on a disk are unknown to the metadata service; they are left alone",
				"disk_id", d.ID().String(), "path", sl.path, "volumes", len(unknown), "first", unknown[0].String())
		}
		sl.unknown = unknown
	}
}
