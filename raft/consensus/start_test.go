package consensus

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// A supervisor starts what ended again: a start that was refused because only
// a damaged snapshot covers what was acknowledged must be refused again.
func TestDamagedSnapshotIsRefusedEachTime(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	snapshots, err := openSnapshots(filepath.Join(dir, "snapshots"), log)
	if err != nil {
		t.Fatal(err)
	}
	for _, index := range []uint64{100, 200} {
		sink, err := snapshots.Create(1, index, 1, hraft.Configuration{}, 1, nil)
		if err == nil {
			_, err = sink.Write([]byte("state"))
		}
		if err := errors.Join(err, sink.Close()); err != nil {
			t.Fatal(err)
		}
	}
	path := snapshots.path(snapshotID(200, 1))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	logs, err := openLog(filepath.Join(dir, "log"), 1<<20, log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = logs.close() }()
	for start := range 3 {
		if _, err := inspect(snapshots, logs, log); !errors.Is(err, block.ErrCorrupt) {
			t.Fatalf("start %d: %v", start, err)
		}
	}
}
