package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
)

const (
	maxConditions = 100  // in one report
	maxSentence   = 1024 // bytes of a text in a report: what the metadata service takes

	// lasting is how long something is wrong with a volume before it is reported (to be opened is nothing to attend to),
	// and how long nothing is before that is believed: requests that wait are tried again now and then, all at once.
	lasting = 3 * time.Second
)

// complaints are what is wrong on this node and not in the states of its disks,
// for `gabion status`. Only one goroutine calls now.
type complaints struct {
	disks   func() []replica.Report
	volumes func() []primary.VolumeStatus
	wrong   map[block.VolumeID]trouble
}

// trouble is what is wrong with a volume.
type trouble struct {
	first, last     time.Time // seen
	problem, remedy string
}

func (c *complaints) now() []*metapb.Condition {
	var list []*metapb.Condition
	complain := func(object, problem, remedy string) {
		list = append(list, &metapb.Condition{
			Severity: metapb.Condition_ERROR, Object: sentence(object), Problem: sentence(problem), Remedy: sentence(remedy),
		})
	}
	for _, d := range c.disks() {
		if d.ID.IsZero() && !d.Online {
			complain("disk "+d.Path, "The disk could never be opened: "+d.Problem+".", "See the kernel's log and the mount; the server takes the disk when it is well.")
		}
		if n := len(d.Unknown); n > 0 {
			complain("disk "+d.ID.String(),
				fmt.Sprintf("The metadata service does not know %d volumes on %s, the first is %s: it is older than the disk, or the disk is a stranger.", n, d.Path, d.Unknown[0]),
				"Nothing of them is touched. Restore a newer backup of the metadata, or take the disk back to where it belongs.")
		}
	}
	wrong, now := make(map[block.VolumeID]trouble, len(c.wrong)), time.Now()
	for _, v := range c.volumes() {
		w, known := c.wrong[v.ID]
		if v.Problem != "" {
			if !known {
				w.first = now
			}
			w.last, w.problem, w.remedy = now, v.Problem, v.Remedy
		} else if !known || now.Sub(w.last) >= lasting {
			continue
		}
		wrong[v.ID] = w
		if w.last.Sub(w.first) >= lasting {
			complain("volume "+v.Name, w.problem, w.remedy)
		}
	}
	c.wrong = wrong
	if more := len(list) - maxConditions; more > 0 {
		list = list[:maxConditions]
		complain("metrics", fmt.Sprintf("This node has %d problems more.", more), "See gabion_volume_problem and the disk metrics on its HTTP port.")
	}
	return list
}

// sentence is what of a text fits into a report, and into its encoding.
func sentence(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), maxSentence)], "")
}
