package consensus

import (
	"testing"

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

// H81: nothing after the command that cannot be applied is, also not in the
// same batch, and no index counts as applied any more.
func TestH81RestOfTheBatch(t *testing.T) {
	m := newList()
	failed := 0
	f := &fsm{machine: m, nudge: func() {}, fail: func(error) { failed++ }}
	var batch []*hraft.Log
	for i, command := range []string{"a 1", "newer", "b 2", "newer", "c 3"} {
		batch = append(batch, &hraft.Log{Index: uint64(i + 10), Type: hraft.LogCommand, Data: seal([]byte(command))})
	}
	responses := f.ApplyBatch(batch)
	if responses[0] != "1" || m.get("a") != "1" || m.get("b") != "" || m.get("c") != "" || failed != 1 || f.applied.index != 10 {
		t.Errorf("%v, %v, failed %d, applied %d", responses, m.copy(), failed, f.applied.index)
	}
	for _, r := range responses[1:] {
		if _, ok := r.(halted); !ok {
			t.Errorf("answered %v", r)
		}
	}
	if _, err := f.Snapshot(); err == nil {
		t.Error("a snapshot of it")
	}
}
