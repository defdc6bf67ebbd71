package sim

import (
	"fmt"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// The words of the metadata state and those of the primary; what cmd/gabion
// does over the wire, here without one. Identities in the state were checked
// when they were applied, so a bad one is a defect.

func mustUUID(s string) block.UUID {
	u, err := block.ParseUUID(s)
	if err != nil {
		panic(fmt.Sprintf("sim: %v", err))
	}
	return u
}

func mapOf(v *metadata.View, id block.VolumeID) (primary.Map, error) {
	m := v.Map(id)
	if m == nil {
		return primary.Map{}, block.ErrNotFound
	}
	vol, p := m.Volume, m.Volume.Policy
	out := primary.Map{
		Index: m.Index,
		Volume: primary.VolumeInfo{
			ID: id, Name: vol.Name, Size: vol.Size, WantedSize: vol.WantedSize,
			WriteThrough: p.Durability == metapb.Policy_WRITE_THROUGH, WaitWhenFull: p.OnFull != metapb.Policy_ERROR,
			BlockSize: int64(p.BlockSize), Replicas: int(p.Replicas),
			Version: block.Version(vol.Version), CacheEpoch: block.CacheEpoch(vol.CacheEpoch),
		},
		Generation: block.Generation(m.Grant.GetGeneration()),
		Node:       m.Grant.GetNode(), Process: m.Grant.GetProcess(), Opened: m.Grant.GetOpened(),
		Runs: runsOf(m.Runs),
	}
	for _, mb := range m.Members {
		out.Members = append(out.Members, primary.Membership{
			Disk: block.DiskID{UUID: mustUUID(mb.DiskId)}, In: mb.State == metapb.Member_IN,
			Incarnation: incarnationOf(mb.Incarnation), Admitted: block.Generation(mb.AdmittedGeneration),
		})
	}
	for _, a := range m.Attachments {
		x := primary.Attachment{ID: block.AttachmentID{UUID: mustUUID(a.Id)}, Node: a.Node, ReadOnly: a.ReadOnly, Revoking: a.Revoking}
		copy(x.TokenDigest[:], a.TokenDigest)
		out.Attachments = append(out.Attachments, x)
	}
	return out, nil
}

func runsOf(runs []*metapb.Run) []primary.Run {
	var out []primary.Run
	for _, r := range runs {
		x := primary.Run{Index: block.RunIndex(r.Index)}
		for _, d := range r.Disks {
			x.Disks = append(x.Disks, block.DiskID{UUID: mustUUID(d)})
		}
		out = append(out, x)
	}
	return out
}

func incarnationOf(i *metapb.Incarnation) block.Incarnation {
	if i == nil {
		return block.Incarnation{}
	}
	return block.Incarnation{Boot: mustUUID(i.Boot), Process: mustUUID(i.Process), Instance: mustUUID(i.Instance)}
}

func incarnationTo(i block.Incarnation) *metapb.Incarnation {
	return &metapb.Incarnation{Boot: i.Boot.String(), Process: i.Process.String(), Instance: i.Instance.String()}
}

func membersTo(list []primary.Membership) []*metapb.Member {
	var out []*metapb.Member
	for _, m := range list {
		state := metapb.Member_OUT
		if m.In {
			state = metapb.Member_IN
		}
		out = append(out, &metapb.Member{
			DiskId: m.Disk.String(), State: state, Incarnation: incarnationTo(m.Incarnation), AdmittedGeneration: uint64(m.Admitted),
		})
	}
	return out
}

// fenced is a primary's command as the log carries it, and its kind for the model log.
func fenced(f primary.Fence, cmd primary.Command) (string, *metapb.Command) {
	p := &metapb.FencedCommand{Fence: &metapb.Fence{
		VolumeId: f.Volume.String(), Generation: uint64(f.Generation), Version: uint64(f.Version),
	}}
	var kind string
	switch cmd := cmd.(type) {
	case primary.Takeover:
		kind = "takeover"
		p.Kind = &metapb.FencedCommand_Takeover{Takeover: &metapb.Takeover{Members: membersTo(cmd.Members), RaiseCacheEpoch: cmd.RaiseCacheEpoch}}
	case primary.CommitRuns:
		kind = "commit"
		c := &metapb.CommitRuns{Members: membersTo(cmd.Members)}
		for _, r := range cmd.Runs {
			x := &metapb.Run{Index: uint32(r.Index)}
			for _, d := range r.Disks {
				x.Disks = append(x.Disks, d.String())
			}
			c.Runs = append(c.Runs, x)
		}
		p.Kind = &metapb.FencedCommand_CommitRuns{CommitRuns: c}
	case primary.ConfirmSize:
		kind = "confirm-size"
		p.Kind = &metapb.FencedCommand_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: cmd.Size}}
	case primary.ConfirmDetach:
		kind = "confirm-detach"
		p.Kind = &metapb.FencedCommand_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: cmd.Attachment.String()}}
	default:
		panic(fmt.Sprintf("sim: no form for %T in the log", cmd))
	}
	return kind, &metapb.Command{Kind: &metapb.Command_Fenced{Fenced: p}}
}
