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

	// lasting is how long something is wrong with a volume before it is reported: to be opened is nothing to attend to.
	lasting = 3 * time.Second
)

// complaints are what is wrong on this node and not in the states of its disks,
// for `gabion status`. Only one goroutine calls now.
type complaints struct {
	disks   func() []replica.Report
	volumes func() []primary.VolumeStatus
	since   map[block.VolumeID]time.Time // of the volumes in which something is wrong
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
	since := make(map[block.VolumeID]time.Time, len(c.since))
	for _, v := range c.volumes() {
		if v.Problem == "" {
			continue
		}
		at, known := c.since[v.ID]
		if !known {
			at = time.Now()
		}
		if since[v.ID] = at; time.Since(at) >= lasting {
			complain("volume "+v.Name, v.Problem, v.Remedy)
		}
	}
	c.since = since
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
