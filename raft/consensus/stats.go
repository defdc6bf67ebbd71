package consensus

import (
	"io/fs"
	"path/filepath"
	"strings"

	hraft "github.com/hashicorp/raft"
)

// Stats is what metrics and status show. Sizes are bytes on disk.
type Stats struct {
	State         string // Leader, Follower, Candidate, Shutdown
	Leads         bool
	Term          uint64
	LastIndex     uint64 // newest in the log
	CommitIndex   uint64
	AppliedIndex  uint64 // handed to the machine
	SnapshotIndex uint64
	FirstLog      uint64
	LastLog       uint64
	LogBytes      int64 // segments
	StableBytes   int64 // term, vote and segment records
	SnapshotBytes int64
	Voters        []string // names
	Learners      []string // those that hold the state and have no vote
}

// Stats is cheap enough for a scrape: it reads three directories.
func (n *Node) Stats() Stats {
	state, _ := n.leadership.get()
	s := Stats{
		State: n.raft.State().String(), Leads: state.Leads, Term: n.raft.CurrentTerm(),
		LastIndex: n.raft.LastIndex(), CommitIndex: n.raft.CommitIndex(), AppliedIndex: n.raft.AppliedIndex(),
	}
	if ids, err := n.snapshots.ids(); err == nil && len(ids) > 0 {
		s.SnapshotIndex, _ = parseSnapshotID(ids[0])
	}
	s.FirstLog, s.LastLog, _ = bounds(n.logs)
	_ = filepath.WalkDir(n.config.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // removed meanwhile
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		switch {
		case strings.HasSuffix(path, ".wal"):
			s.LogBytes += info.Size()
		case filepath.Base(path) == "wal-meta.db":
			s.StableBytes += info.Size()
		case strings.Contains(path, ".snap"):
			s.SnapshotBytes += info.Size()
		}
		return nil
	})
	s.Voters, s.Learners = n.Members()
	return s
}

// Members are the names of those who vote, and of those who hold the state only.
func (n *Node) Members() (voters, learners []string) {
	for _, server := range n.raft.GetConfiguration().Configuration().Servers {
		if server.Suffrage == hraft.Voter {
			voters = append(voters, string(server.ID))
		} else {
			learners = append(learners, string(server.ID))
		}
	}
	return voters, learners
}
