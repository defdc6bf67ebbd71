package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
)

// H78: what is wrong may be that nobody can answer for the cell; the status says that, too.
func TestStatusWithoutLeader(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	ports, err := daemon.FreePorts(len(portNames))
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, dir, ports)
	defer r.stop(t)
	if got := r.gabion(t, "status"); !strings.Contains(got, "All is well") || !strings.Contains(got, "1 of 1 up") || !strings.Contains(got, "1 of 1 online") {
		t.Errorf("of a new server:\n%s", got)
	}
	if err := r.faults.Arm(fault.Rule{Point: "metadata.read", Error: "unavailable"}); err != nil {
		t.Fatal(err)
	}
	if got := r.gabion(t, "status"); !strings.Contains(got, "No leader confirms") || strings.Contains(got, "is down") {
		t.Errorf("of a server that cannot read:\n%s", got)
	}
}

func TestComplaints(t *testing.T) {
	disks := []replica.Report{
		{ID: block.DiskID{UUID: block.UUID{1}}, Path: "/fine", Online: true},
		{ID: block.DiskID{UUID: block.UUID{2}}, Path: "/failed", Problem: "in the disk's own state"},
		{Path: "/never", Problem: "input/output error \xff" + strings.Repeat("x", 2*maxSentence)},
		{ID: block.DiskID{UUID: block.UUID{3}}, Path: "/old", Online: true, Unknown: make([]block.VolumeID, 7)},
	}
	volumes := []primary.VolumeStatus{{Name: "fine"}, {ID: block.VolumeID{UUID: block.UUID{4}}, Name: "stuck", Problem: "Writes wait.", Remedy: "Add disks."}}
	c := complaints{disks: func() []replica.Report { return disks }, volumes: func() []primary.VolumeStatus { return volumes }}
	texts := func(list []*metapb.Condition) (all []string) {
		for _, x := range list {
			all = append(all, x.Object+": "+x.Problem+" "+x.Remedy)
			if len(x.Problem) > maxSentence {
				t.Errorf("%s: %d bytes", x.Object, len(x.Problem))
			}
		}
		return all
	}
	first := texts(c.now())
	if len(first) != 2 || !strings.Contains(first[0], "disk /never: ") || !strings.Contains(first[1], "7 volumes on /old") {
		t.Fatalf("at first: %q", first)
	}
	passed := func(d time.Duration) {
		w := c.wrong[volumes[1].ID]
		w.first, w.last = w.first.Add(-d), w.last.Add(-d)
		c.wrong[volumes[1].ID] = w
	}
	passed(lasting)
	if later := texts(c.now()); len(later) != 3 || later[2] != "volume stuck: Writes wait. Add disks." {
		t.Errorf("later: %q", later)
	}
	volumes[1].Problem = "" // for a moment: all that waits is tried again
	passed(lasting / 2)
	if moment := texts(c.now()); len(moment) != 3 {
		t.Errorf("for a moment: %q", moment)
	}
	passed(lasting / 2)
	if after := texts(c.now()); len(after) != 2 || len(c.wrong) != 0 {
		t.Errorf("after: %q", after)
	}
	for range 2 * maxConditions {
		disks = append(disks, disks[2])
	}
	if many := c.now(); len(many) != maxConditions+1 {
		t.Errorf("%d complaints", len(many))
	}
}
