package metadata

import (
	"bytes"
	"cmp"
	"iter"

	"github.com/benbjohnson/immutable"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// The orders of the trees.
type (
	byString struct{}
	byRun    struct{}
	byDisk   struct{}
	byVolume struct{}
)

func (byString) Compare(a, b string) int         { return cmp.Compare(a, b) }
func (byRun) Compare(a, b block.RunIndex) int    { return cmp.Compare(a, b) }
func (byDisk) Compare(a, b block.DiskID) int     { return compareIDs(a.UUID, b.UUID) }
func (byVolume) Compare(a, b block.VolumeID) int { return compareIDs(a.UUID, b.UUID) }

func compareIDs(a, b block.UUID) int { return bytes.Compare(a[:], b[:]) }

func newRuns() *runs { return immutable.NewSortedMap[block.RunIndex, replicas](byRun{}) }

func emptyView() *View {
	return &View{
		nodes:      immutable.NewSortedMap[string, *metapb.Node](byString{}),
		disks:      immutable.NewSortedMap[block.DiskID, disk](byDisk{}),
		volumes:    immutable.NewSortedMap[block.VolumeID, *volume](byVolume{}),
		names:      immutable.NewSortedMap[string, block.VolumeID](byString{}),
		tombstones: immutable.NewSortedMap[block.VolumeID, uint64](byVolume{}),
		consumers:  immutable.NewSortedMap[string, *metapb.Consumer](byString{}),
		pinned:     immutable.NewSortedMap[string, placement.Demand](byString{}),
		loads:      immutable.NewSortedMap[string, int](byString{}),
		level:      levelFirst,
	}
}

// entries are the keys and values of a tree in order.
func entries[K, V any](m *immutable.SortedMap[K, V]) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for it := m.Iterator(); !it.Done(); {
			k, v, _ := it.Next()
			if !yield(k, v) {
				return
			}
		}
	}
}

func values[K, V any](m *immutable.SortedMap[K, V]) iter.Seq[V] {
	return func(yield func(V) bool) {
		for _, v := range entries(m) {
			if !yield(v) {
				return
			}
		}
	}
}
