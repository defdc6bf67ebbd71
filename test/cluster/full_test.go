package cluster_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// Disks fill up under ext4 and XFS, with both answers to it, and serve again when there is space.
func TestH68FullAndFreeAgain(t *testing.T) {
	for _, c := range []struct {
		fstype string
		size   int64
	}{{"ext4", 160 << 20}, {"xfs", 320 << 20}} {
		t.Run(c.fstype+"/error", func(t *testing.T) { fullError(t, c.fstype, c.size) })
		t.Run(c.fstype+"/wait", func(t *testing.T) { fullWait(t, c.fstype, c.size) })
	}
}

const mib = 1 << 20

// fill writes from off on until a write fails, and returns where.
func fill(t *testing.T, r *raw, off int64, p []byte) int64 {
	t.Helper()
	for ; off < 1<<30; off += int64(len(p)) {
		if err := r.write(off, p); errors.Is(err, eNoSpace) {
			return off
		} else if err != nil {
			t.Fatalf("writing at %d: %v", off, err)
		}
	}
	t.Fatal("the disk never got full")
	return 0
}

func fullError(t *testing.T, fstype string, size int64) {
	s := startOn(t, mount(t, fstype, size))
	r := connect(t, s, volume(t, s, "v", "1GiB", "--on-full", "error", "--durability", "flush"))
	ones, twos := bytes.Repeat([]byte{1}, mib), bytes.Repeat([]byte{2}, mib)
	end := fill(t, r, 0, ones)
	t.Logf("full after %d MiB of %d", end/mib, size/mib)
	if end < size/4 {
		t.Errorf("only %d MiB fit", end/mib)
	}
	if err := r.flush(); err != nil {
		t.Errorf("FLUSH on a full disk: %v", err)
	}
	checkFilled(t, r, end, ones)
	// What has space can be overwritten, and what has none cannot be written.
	if err := r.write(0, twos); err != nil {
		t.Errorf("overwriting on a full disk: %v", err)
	}
	if err := r.write(0, ones); err != nil {
		t.Errorf("overwriting again: %v", err)
	}
	end = fill(t, r, end+8*mib, ones) // a file system may have kept a little to itself before
	// Giving space back always works, and makes room.
	if err := r.trim(0, 16*mib); err != nil {
		t.Errorf("trim on a full disk: %v", err)
	}
	eventually(t, 30*time.Second, "the trimmed space can be written again", func() bool {
		return r.write(end+8*mib, ones) == nil
	})
	if !strings.Contains(cli(t, s, "volume", "show", "v"), "v") {
		t.Error("the volume cannot be shown")
	}
	cli(t, s, "detach", "v")
	cli(t, s, "volume", "delete", "v")
	eventually(t, 60*time.Second, "the deleted volume's space makes room for another", func() bool {
		return s.CreateVolume(t.Context(), "next", "64MiB", "--on-full", "error") == nil
	})
	u, err := s.Attach(t.Context(), "next")
	if err != nil {
		t.Fatal(err)
	}
	r = connect(t, s, u)
	eventually(t, 60*time.Second, "the deleted volume's space can be written", func() bool {
		return r.write(0, ones) == nil && r.write(32*mib, ones) == nil
	})
}

func checkFilled(t *testing.T, r *raw, end int64, want []byte) {
	t.Helper()
	p := make([]byte, len(want))
	for off := int64(0); off < end; off += int64(len(p)) {
		if err := r.read(off, p); err != nil || !bytes.Equal(p, want) {
			t.Fatalf("what was written at %d reads otherwise: %v", off, err)
		}
	}
}

func fullWait(t *testing.T, fstype string, size int64) {
	s := startOn(t, mount(t, fstype, size))
	u := volume(t, s, "v", "1GiB", "--on-full", "wait", "--durability", "flush")
	filler := connect(t, s, u)
	p := bytes.Repeat([]byte{1}, mib)
	// The writer goes on until it is held up; nobody tells it so.
	written := make(chan int64, 1024)
	ended := make(chan error, 1)
	go func() {
		for off := int64(0); off < size+256*mib; off += mib {
			if err := filler.write(off, p); err != nil {
				ended <- err
				return
			}
			written <- off
		}
		ended <- nil
	}()
	eventually(t, 60*time.Second, "the status tells that writes wait for space", func() bool { return waitsForSpace(t, s) })
	eventually(t, 10*time.Second, "the event, once it lasts", func() bool { return strings.Contains(cli(t, s, "events"), "VolumeWaitsForSpace") })
	select {
	case err := <-ended:
		t.Fatalf("the writer was not held up: %v", err)
	default:
	}
	// A write that waits holds up nobody (H14).
	other := connect(t, s, u)
	if err := other.flush(); err != nil {
		t.Errorf("FLUSH beside a waiting write: %v", err)
	}
	if err := other.write(0, p); err != nil {
		t.Errorf("overwriting beside a waiting write: %v", err)
	}
	if err := other.read(0, make([]byte, 4096)); err != nil {
		t.Errorf("reading beside a waiting write: %v", err)
	}
	had := len(written)
	if err := other.trim(0, 64*mib); err != nil {
		t.Errorf("trim beside a waiting write: %v", err)
	}
	took := eventually(t, 30*time.Second, "the writer goes on", func() bool { return len(written) > had })
	t.Logf("the writer went on %v after the trim", took)
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the writer saw an error: %v", err)
		}
	default:
	}
	// Detach drops what still waits: it was never in flight.
	cli(t, s, "detach", "v")
	if err := <-ended; err == nil {
		t.Error("the writer went on after the detach")
	}
	cli(t, s, "volume", "delete", "v")
	cli(t, s, "status")
}

// waitsForSpace is what the status says now.
func waitsForSpace(t *testing.T, s *cluster.Server) bool {
	t.Helper()
	return strings.Contains(cli(t, s, "status"), "wait for space")
}
