package consensus

import (
	hraft "github.com/hashicorp/raft"
)

var (
	errNotLeaderForTest      = hraft.ErrNotLeader
	errLeadershipLostForTest = hraft.ErrLeadershipLost
	errShutdownForTest       = hraft.ErrRaftShutdown
)

// entries are commands with the indexes from first to last.
func entries(first, last uint64) []*hraft.Log {
	var logs []*hraft.Log
	for i := first; i <= last; i++ {
		logs = append(logs, &hraft.Log{Index: i, Term: 1, Type: hraft.LogCommand, Data: seal(make([]byte, 1000))})
	}
	return logs
}
