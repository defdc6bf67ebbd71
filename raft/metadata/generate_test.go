package metadata

import (
	"fmt"
	"math/rand/v2"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// source chooses: math/rand for long logs, rapid for short ones that shrink.
type source interface{ IntN(n int) int }

var _ source = (*rand.Rand)(nil)

// generator makes commands that are likely to mean something in a state: some
// repeat, some come late, some contradict.
type generator struct {
	source
	ids int // drawn so far, for new volumes and attachments
}

func (g *generator) one(of ...string) string { return of[g.IntN(len(of))] }

func (g *generator) seldom() bool { return g.IntN(8) == 0 }

const generatedExtent = block.MinExtentSize // a run is 4 MiB

func (g *generator) command(v *View) *metapb.Command {
	c := &metapb.Command{Level: g.level(v), Time: int64(g.IntN(1000))}
	switch {
	case v.Cluster() == nil:
		c.Kind = &metapb.Command_InitCluster{InitCluster: &metapb.InitCluster{ClusterId: id("c1"), ExtentSize: generatedExtent, DefaultReplicas: 1, Overcommit: 1}}
	case len(v.Nodes()) == 0:
		c.Kind = g.putNode()
	default:
		g.any(c, v)
	}
	return c
}

func (g *generator) any(c *metapb.Command, v *View) {
	vol := g.volume(v)
	switch k := g.IntN(100); {
	case k < 1:
		c.Kind = &metapb.Command_RemoveNode{RemoveNode: &metapb.RemoveNode{Name: g.one("n1", "n2", "n3", "n4")}}
	case k < 7:
		c.Kind = g.putNode()
	case k < 12:
		node := g.one("n1", "n2", "n3")
		c.Kind = &metapb.Command_PutDisks{PutDisks: &metapb.PutDisks{Node: node, Disks: g.disks(node)}}
	case k < 24:
		c.Kind = &metapb.Command_CreateVolume{CreateVolume: &metapb.CreateVolume{Id: g.volumeID(v), Name: g.one("a", "b", "c", "d", "e"),
			Size: g.size(), Policy: g.policy(), Rack: g.rack(v)}}
	case k < 30:
		c.Kind = &metapb.Command_ResizeVolume{ResizeVolume: &metapb.ResizeVolume{Id: vol, Size: g.size()}}
	case k < 34:
		c.Kind = &metapb.Command_DeleteVolume{DeleteVolume: &metapb.DeleteVolume{Id: vol}}
	case k < 42:
		g.ids++
		a := &metapb.Attachment{Id: id(fmt.Sprint("a", g.ids)), VolumeId: vol, Node: g.one("k1", "k2", "k3"), ReadOnly: g.IntN(3) > 0, Token: []byte(fmt.Sprintf("%032d", g.ids)),
			Foreign: v.Level() >= LevelTerms && g.IntN(3) == 0, Alone: v.Level() >= LevelTerms && g.IntN(3) == 0}
		c.Kind = &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{Attachment: a, Version: uint64(g.IntN(2) * g.IntN(5))}}
	case k < 48:
		c.Kind = &metapb.Command_DetachVolume{DetachVolume: &metapb.DetachVolume{VolumeId: vol, AttachmentId: g.attachment(v, vol)}}
	case k < 58:
		c.Kind = &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{VolumeId: vol, Node: g.one("n1", "n2", "n3"), Process: g.one("p1", "p2")}}
	case k < 59:
		c.Kind = &metapb.Command_PutConsumer{PutConsumer: &metapb.PutConsumer{Consumer: &metapb.Consumer{Name: g.one("k1", "k2"),
			Rack: g.one("r1", "r2"), MaxVolumes: uint32(g.IntN(4))}}}
	case k < 62:
		c.Kind = &metapb.Command_SetFormat{SetFormat: &metapb.SetFormat{VolumeId: vol, AttachmentId: g.attachment(v, vol),
			Format: metapb.Volume_Format(g.IntN(4))}}
	case k < 64:
		c.Kind = &metapb.Command_RecordEvent{RecordEvent: &metapb.RecordEvent{Event: &metapb.Event{Type: "SomethingHappened", VolumeId: vol}}}
	default:
		c.Kind = &metapb.Command_Fenced{Fenced: g.fenced(v, vol)}
	}
}

// level is mostly the cell's.
func (g *generator) level(v *View) uint32 {
	if g.seldom() {
		return uint32(1 + g.IntN(Level))
	}
	return v.Level()
}

func (g *generator) rack(v *View) string {
	if v.Level() < levelConsumers {
		return ""
	}
	return g.one("", "r1", "r2")
}

func (g *generator) putNode() *metapb.Command_PutNode {
	name := g.one("n1", "n2", "n3")
	c := &metapb.PutNode{Node: &metapb.Node{Name: name, Rack: g.one("r1", "r2"), Process: g.one("p1", "p1", "p2"), FeatureLevel: uint32(1 + g.IntN(Level))}, Disks: g.disks(name)}
	if g.seldom() {
		c.Node.Directory = g.one("e1", "e1", "e2")
	}
	if g.seldom() && len(c.Disks) > 0 {
		c.MovedDisks = []string{c.Disks[0].Id}
	}
	return &metapb.Command_PutNode{PutNode: c}
}

// disks are mostly the node's own two, of 4 to 16 MiB.
func (g *generator) disks(node string) []*metapb.Disk {
	var disks []*metapb.Disk
	for i := range 2 {
		if g.seldom() {
			continue
		}
		number := int(node[1]-'0')*2 + i
		if g.seldom() && i == 0 {
			number = 2 + g.IntN(6)
		}
		if len(disks) > 0 && disks[0].Id == id(fmt.Sprint("d", number)) {
			continue
		}
		d := &metapb.Disk{Id: id(fmt.Sprint("d", number)), Path: "/d", Capacity: 16 << 20, State: metapb.Disk_ONLINE,
			Incarnation: g.incarnation()}
		if g.seldom() {
			d.State = metapb.Disk_State(1 + g.IntN(3))
		}
		d.Available = d.Capacity / int64(1+g.IntN(3))
		disks = append(disks, d)
	}
	return disks
}

func (g *generator) size() int64 { return int64(1+g.IntN(12)) << 20 }

func (g *generator) policy() *metapb.Policy {
	return &metapb.Policy{Replicas: uint32(1 + g.IntN(2)), Spread: metapb.Policy_NODE, Access: metapb.Policy_Access(1 + g.IntN(2)),
		Durability: metapb.Policy_FLUSH, OnFull: metapb.Policy_WAIT, BlockSize: 4096}
}

// volumeID is mostly new, at times one that was drawn before.
func (g *generator) volumeID(v *View) string {
	if g.seldom() {
		return g.volume(v)
	}
	g.ids++
	return id(fmt.Sprint("v", g.ids))
}

// volume is mostly a live one.
func (g *generator) volume(v *View) string {
	if live := v.Volumes(Position{}, 0); len(live) > 0 && !g.seldom() {
		return live[g.IntN(len(live))].Id
	}
	return id(fmt.Sprint("v", 1+g.IntN(g.ids+1)))
}

func (g *generator) attachment(v *View, vol string) string {
	if a := v.Attachments(volumeID(vol)); len(a) > 0 && !g.seldom() {
		return a[g.IntN(len(a))].Id
	}
	return id(fmt.Sprint("a", 1+g.IntN(g.ids+1)))
}

func (g *generator) fenced(v *View, vol string) *metapb.FencedCommand {
	key := volumeID(vol)
	grant, now := v.Grant(key), v.Volume(key)
	f := &metapb.FencedCommand{Fence: &metapb.Fence{VolumeId: vol, Generation: grant.GetGeneration(), Version: now.GetVersion()}}
	if g.seldom() {
		f.Fence.Generation -= uint64(g.IntN(2))
		f.Fence.Version -= uint64(g.IntN(2))
	}
	switch k := g.IntN(10); {
	case k < 3 || k < 9 && !grant.GetOpened():
		f.Kind = &metapb.FencedCommand_Takeover{Takeover: &metapb.Takeover{Members: g.members(v, key, grant.GetGeneration()), RaiseCacheEpoch: g.seldom()}}
	case k < 8:
		f.Kind = &metapb.FencedCommand_CommitRuns{CommitRuns: g.runs(v, now, grant.GetGeneration())}
	case k < 9:
		sizes := []int64{now.GetSize(), now.GetWantedSize(), now.GetWantedSize(), g.size()}
		f.Kind = &metapb.FencedCommand_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: sizes[g.IntN(len(sizes))]}}
	default:
		f.Kind = &metapb.FencedCommand_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: g.attachment(v, vol)}}
	}
	return f
}

func (g *generator) members(v *View, key block.VolumeID, generation uint64) []*metapb.Member {
	var members []*metapb.Member
	for _, m := range v.Members(key) {
		next := g.member(m.DiskId, generation)
		switch g.IntN(6) {
		case 0:
			next.State = metapb.Member_OUT
		case 1:
			next.State, next.AdmittedGeneration = m.State, m.AdmittedGeneration
		}
		if g.IntN(64) > 0 {
			members = append(members, next)
		}
	}
	if g.seldom() {
		members = append(members, g.member(id(fmt.Sprint("d", 2+g.IntN(7))), generation))
	}
	return members
}

func (g *generator) incarnation() *metapb.Incarnation {
	return &metapb.Incarnation{Boot: id("b1"), Process: id("p1"), Instance: id(fmt.Sprint("i", 1+g.IntN(3)))}
}

func (g *generator) member(disk string, generation uint64) *metapb.Member {
	return &metapb.Member{DiskId: disk, State: metapb.Member_IN, AdmittedGeneration: generation,
		Incarnation: g.incarnation()}
}

func (g *generator) runs(v *View, vol *metapb.Volume, generation uint64) *metapb.CommitRuns {
	c := &metapb.CommitRuns{}
	disks := v.Disks()
	for range g.IntN(4) {
		run := &metapb.Run{Index: uint32(g.IntN(4))}
		for range vol.GetPolicy().GetReplicas() {
			if len(disks) > 0 {
				run.Disks = append(run.Disks, disks[g.IntN(len(disks))].Id)
			}
		}
		if old := v.Run(volumeID(vol.GetId()), block.RunIndex(run.Index)); old != nil && !g.seldom() {
			run.Disks = old.Disks
		}
		c.Runs = append(c.Runs, run)
		if g.seldom() && len(run.Disks) > 0 {
			c.Members = append(c.Members, g.member(run.Disks[0], generation))
		}
	}
	return c
}
