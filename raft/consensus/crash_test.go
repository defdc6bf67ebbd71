package consensus

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft-wal/metadb"

	"github.com/gabion-storage/gabion/server/block"
)

// victim is a server that applies as fast as it can, says what was
// acknowledged, and never ends by itself.
func victim(dir string) {
	c := Config{
		Dir: dir, Node: "n1", Cluster: testCluster, Bootstrap: true, Listen: "127.0.0.1:0",
		Machine: newList(), Log: slog.New(slog.DiscardHandler),
		Policy: Policy{Segment: 16 << 10, Commands: 40, Check: 10 * time.Millisecond},
	}
	n, err := Open(c)
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	for i := 0; ; {
		key := fmt.Sprintf("%s-%d", os.Getenv("GABION_TEST_ROUND"), i)
		_, _, err := n.Apply(context.Background(), []byte(key+" "+strings.Repeat("x", 200)))
		switch {
		case err == nil:
			fmt.Println("ack", key)
			i++
		case !errors.Is(err, block.ErrUnavailable):
			fmt.Println("error", err)
			os.Exit(1)
		default:
			time.Sleep(time.Millisecond)
		}
	}
}

// Killed again and again at arbitrary moments, among them in rotations and
// snapshots: every acknowledged command is there.
func TestKillNine(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	acked := map[string]bool{}
	for round := range 6 {
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), "GABION_TEST_VICTIM="+dir, fmt.Sprint("GABION_TEST_ROUND=", round))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 60+37*round && lines.Scan(); n++ {
			note(t, acked, lines.Text())
		}
		_ = cmd.Process.Kill()
		for lines.Scan() { // acknowledged before it died
			note(t, acked, lines.Text())
		}
		_ = cmd.Wait()
	}
	m := newList()
	n := open(t, single(t, dir, m))
	lead(t, n)
	if _, err := n.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := m.copy()
	for key := range acked {
		if _, ok := got[key]; !ok {
			t.Errorf("%s was acknowledged and is gone", key)
		}
	}
	if len(acked) < 300 {
		t.Errorf("only %d commands", len(acked))
	}
}

func note(t *testing.T, acked map[string]bool, line string) {
	verb, rest, _ := strings.Cut(line, " ")
	if verb != "ack" {
		t.Fatalf("victim: %s", line)
	}
	acked[rest] = true
}

// snapshots makes a directory with commands k0..; after every tenth a snapshot.
func withSnapshots(t *testing.T, commands int) string {
	t.Helper()
	dir := t.TempDir()
	n := open(t, single(t, dir, newList()))
	lead(t, n)
	for i := range commands {
		put(t, n, fmt.Sprint("k", i), "v")
		if i%10 == 9 {
			if err := n.Snapshot(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	closeNode(t, n)
	return dir
}

// B128: a damaged newest snapshot costs nothing, because the log reaches back
// to the one before; damage beyond that is refused.
func TestB128DamagedSnapshot(t *testing.T) {
	dir := withSnapshots(t, 45)
	files := snapshotFiles(t, dir)
	if len(files) != 2 {
		t.Fatalf("%d snapshots", len(files))
	}
	flip := func(path string, at int64) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if at < 0 {
			size, _ := f.Seek(0, io.SeekEnd)
			at += size
		}
		_, err1 := f.ReadAt(b, at)
		b[0] ^= 0x10
		_, err2 := f.WriteAt(b, at)
		if err := errors.Join(err1, err2, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for name, damage := range map[string]func(newest, older string){
		"head":      func(newest, _ string) { flip(newest, 20) },
		"payload":   func(newest, _ string) { flip(newest, -40) },
		"trailer":   func(newest, _ string) { flip(newest, -2) },
		"torn":      func(newest, _ string) { _ = os.Truncate(newest, 50) },
		"empty":     func(newest, _ string) { _ = os.Truncate(newest, 0) },
		"gone":      func(newest, _ string) { _ = os.Remove(newest) },
		"tmp":       func(newest, _ string) { _ = os.Rename(newest, newest+".tmp") },
		"untouched": func(string, string) {},
	} {
		c := copyDir(t, dir)
		damage(filepath.Join(c, "snapshots", filepath.Base(files[1])), filepath.Join(c, "snapshots", filepath.Base(files[0])))
		m := newList()
		n := open(t, single(t, c, m))
		lead(t, n)
		if len(m.copy()) != 45 {
			t.Errorf("%s: %d keys", name, len(m.copy()))
		}
		put(t, n, "on", "wards")
		closeNode(t, n)
	}

	c := copyDir(t, dir)
	for _, f := range files {
		flip(filepath.Join(c, "snapshots", filepath.Base(f)), 20)
	}
	if _, err := Open(single(t, c, newList())); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), "no entries") {
		t.Errorf("both damaged: %v", err)
	}
	// And again: the damaged files were set aside, the refusal stays.
	if _, err := Open(single(t, c, newList())); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("both damaged, second start: %v", err)
	}
}

// A log that was removed behind a snapshot that is damaged too: what the
// snapshots prove to have been there is missed.
func TestB128LogGoneSnapshotDamaged(t *testing.T) {
	dir := withSnapshots(t, 30)
	files := snapshotFiles(t, dir)
	if err := errors.Join(os.Truncate(files[1], 30), os.RemoveAll(filepath.Join(dir, "log"))); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(single(t, dir, newList())); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("got %v", err)
	}
}

// A rotten entry in the middle of the log is found before anything is applied.
func TestRottenEntry(t *testing.T) {
	dir := t.TempDir()
	n := open(t, single(t, dir, newList()))
	lead(t, n)
	for i := range 20 {
		put(t, n, fmt.Sprint("k", i), "value-of-a-key")
	}
	closeNode(t, n)
	segments, err := filepath.Glob(filepath.Join(dir, "log", "*.wal"))
	if err != nil || len(segments) != 1 {
		t.Fatalf("%v, %v", segments, err)
	}
	b, err := os.ReadFile(segments[0])
	if err != nil {
		t.Fatal(err)
	}
	at := strings.Index(string(b), "k7 value")
	b[at+4] ^= 1
	if err := os.WriteFile(segments[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	m := newList()
	if _, err := Open(single(t, dir, m)); !errors.Is(err, block.ErrCorrupt) || len(m.copy()) != 0 {
		t.Errorf("got %v", err)
	}
}

// The state that a crash leaves between sealing a segment and recording it:
// the file is sealed, the record is the old one.
func TestCrashBetweenSealAndRotation(t *testing.T) {
	for _, torn := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "log")
		s, err := openLog(dir, 64<<10, testLog(t))
		if err != nil {
			t.Fatal(err)
		}
		var before []byte
		index := uint64(1)
		for len(segments(t, dir)) == 1 {
			before, err = os.ReadFile(filepath.Join(dir, metadb.FileName))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.StoreLogs(entries(index, index+4)); err != nil {
				t.Fatal(err)
			}
			index += 5
			rotated(t, dir)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
		crashed := copyDir(t, dir)
		if err := os.WriteFile(filepath.Join(crashed, metadb.FileName), before, 0o600); err != nil {
			t.Fatal(err)
		}
		last := index - 1
		if torn { // the batch that sealed did not arrive whole
			tear(t, crashed)
			last -= 5
		}
		for range 2 { // the second finds nothing to do
			s, err = openLog(crashed, 64<<10, testLog(t))
			if err != nil {
				t.Fatal(err)
			}
			if _, got, _ := bounds(s); got != last {
				t.Errorf("torn %v: last %d, want %d", torn, got, last)
			}
			if err := s.StoreLogs(entries(last+1, last+3)); err != nil {
				t.Fatalf("torn %v: append: %v", torn, err)
			}
			last += 3
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// rotated waits for the rotation that follows a batch which filled the segment.
func rotated(t *testing.T, dir string) {
	t.Helper()
	files := segments(t, dir)
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if used := len(bytes.TrimRight(b, "\x00")); used < 64<<10 {
		return // the index that seals takes it past the limit
	}
	for deadline := time.Now().Add(10 * time.Second); len(files) == 1 && time.Now().Before(deadline); files = segments(t, dir) {
		time.Sleep(time.Millisecond)
	}
}

func segments(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.wal"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// tear zeroes the end of the first segment's last commit.
func tear(t *testing.T, dir string) {
	t.Helper()
	path := segments(t, dir)[0]
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	end := len(b)
	for end > 0 && b[end-1] == 0 {
		end--
	}
	for i := max(end-8, 0); i < end; i++ {
		b[i] = 0
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
