package service

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// statusPatience bounds how long GetStatus tries to prove that its answer is
// current: what is wrong may be that nobody can.
const statusPatience = 2 * time.Second

// GetStatus implements the API. Without a leader it answers from what this
// server knows, and says so.
func (s *Service) GetStatus(ctx context.Context, _ *metapb.GetStatusRequest) (*metapb.GetStatusResponse, error) {
	trial, cancel := context.WithTimeout(ctx, statusPatience)
	v, err := s.read(trial)
	cancel()
	if err != nil {
		v = s.machine.View()
	}
	stats := s.consensus.Stats()
	leader, _ := s.consensus.Leader()
	out := &metapb.GetStatusResponse{
		ClusterId: s.consensus.Cluster().String(), ExtentSize: v.Cluster().GetExtentSize(),
		Leader: leader, Term: stats.Term, AppliedIndex: v.Index(), Voters: stats.Voters,
		Volumes: int64(v.VolumeCount()), Attachments: int64(v.AttachmentCount()),
		Provisioned: v.Provisioned(), FeatureLevel: v.CommonLevel(),
	}
	equipped := nodesWithDisks(v)
	for _, n := range s.nodes.all(v) {
		out.Nodes++
		if n.GetUp() {
			out.NodesUp++
		}
		if !equipped[n.GetName()] {
			out.NodesWithoutDisks++
		}
	}
	disks := s.wantedDisks(v)
	for _, d := range disks {
		out.Disks++
		if d.GetState() == metapb.Disk_ONLINE {
			out.DisksOnline++
		}
		if d.GetState() != metapb.Disk_FAILED {
			out.Capacity += d.GetCapacity()
			out.Used += d.GetCapacity() - d.GetAvailable()
		}
	}
	switch {
	case err != nil: // who is up is the leader's to know
		out.Conditions = append(out.Conditions, condition(metapb.Condition_ERROR, "metadata",
			fmt.Sprintf("No leader confirms this answer, which may be old (%v).", err),
			"See that a majority of the voters run, reach each other and can write; running volumes go on meanwhile."))
		out.Conditions = append(out.Conditions, diskConditions(disks)...)
	case v.Cluster() != nil:
		out.Conditions = s.conditions(v, disks)
		var wrong *metapb.Condition
		if out.Endurance, wrong = endurance(s.electors(v)); wrong != nil {
			out.Conditions = append(out.Conditions, wrong)
		}
	}
	return out, nil
}

// wantedDisks are the disks but for those that nobody has and nobody misses:
// their node was removed or started without them, and they hold nothing.
func (s *Service) wantedDisks(v *metadata.View) []*metapb.Disk {
	return slices.DeleteFunc(s.nodes.disks(v), func(d *metapb.Disk) bool { return d.GetNode() == "" && !v.Holds(d.GetId()) })
}

func condition(severity metapb.Condition_Severity, object, problem, remedy string) *metapb.Condition {
	return &metapb.Condition{Severity: severity, Object: object, Problem: problem, Remedy: remedy}
}

// conditions are what is wrong in the cell: nodes, then disks, then what the
// nodes say of themselves and the volumes they serve.
func (s *Service) conditions(v *metadata.View, disks []*metapb.Disk) []*metapb.Condition {
	list := s.nodeConditions(v)
	list = append(list, diskConditions(disks)...)
	return append(list, s.nodes.complaints(v)...)
}

func (s *Service) nodeConditions(v *metadata.View) (list []*metapb.Condition) {
	serving := map[string]bool{}
	for _, d := range v.Disks() {
		if d.GetNode() != "" && d.GetState() != metapb.Disk_FAILED {
			serving[d.GetNode()] = true
		}
	}
	for _, n := range s.nodes.all(v) {
		if !n.GetUp() {
			list = append(list, condition(metapb.Condition_ERROR, "node "+n.GetName(),
				"The node is down: its server has not been heard of for "+s.ago(n.GetSeenAt())+".",
				"Start `gabion server` on it, or look at its log and network."))
		}
	}
	switch want := int(v.Cluster().GetDefaultReplicas()); {
	case len(serving) > 0 && s.mayHave(&metapb.Policy{Replicas: uint32(want)}) != nil:
		list = append(list, condition(metapb.Condition_WARNING, "cluster",
			fmt.Sprintf("New volumes get %d replicas by default, and this version keeps one.", want),
			"Create volumes with --replicas 1; the default is set once, by --default-replicas beside --bootstrap."))
	case len(serving) == 0:
		list = append(list, condition(metapb.Condition_ERROR, "cluster",
			"No disk is registered, so no volume can be created.", "Start a server with --disk DIR."))
	case len(serving) < want:
		list = append(list, condition(metapb.Condition_WARNING, "cluster",
			fmt.Sprintf("New volumes get %d replicas by default, and %s disks.", want, nodesHave(len(serving))),
			"Create volumes with --replicas 1, or add nodes; the default is set once, by --default-replicas beside --bootstrap."))
	}
	return list
}

func nodesHave(n int) string {
	if n == 1 {
		return "1 node has"
	}
	return fmt.Sprintf("%d nodes have", n)
}

func (s *Service) ago(at int64) string {
	if at == 0 {
		return "as long as this leader leads"
	}
	return s.config.Clock().Sub(time.Unix(0, at)).Round(time.Second).String()
}

func diskConditions(disks []*metapb.Disk) (list []*metapb.Condition) {
	for _, d := range disks {
		object := "disk " + d.GetId()
		where := fmt.Sprintf("%s on node %s", d.GetPath(), d.GetNode())
		if d.GetNode() == "" {
			where = d.GetPath()
		}
		switch d.GetState() {
		case metapb.Disk_FAILED:
			list = append(list, condition(metapb.Condition_ERROR, object,
				fmt.Sprintf("The disk at %s failed: %s.", where, cmp.Or(d.GetProblem(), "no reason was given")),
				"See the kernel's log and the mount; the server takes the disk back when it is well."))
		case metapb.Disk_FULL:
			list = append(list, condition(metapb.Condition_ERROR, object,
				fmt.Sprintf("The disk at %s is full.", where),
				"Delete or trim volumes, or make the file system larger; writes that wait go on by themselves."))
		}
	}
	return list
}

// volumeConditions are what is wrong with a volume, as far as the leader knows.
func (s *Service) volumeConditions(v *metadata.View, vol *metapb.Volume, id block.VolumeID) (list []*metapb.Condition) {
	object, grant, waits := "volume "+vol.GetName(), v.Grant(id), false
	if node := grant.GetNode(); node != "" && !s.nodes.up(node) {
		waits = true
		at, _ := s.nodes.lastSeen(node)
		list = append(list, condition(metapb.Condition_ERROR, object,
			fmt.Sprintf("Its primary, node %s, is down: the node has not been heard of for %s, and reads and writes wait.", node, s.ago(unixNano(at))),
			"Start `gabion server` on that node, or look at its log and network; what waits goes on by itself."))
	}
	list = append(list, s.memberConditions(v, id, grant.GetNode())...)
	list = append(list, slices.DeleteFunc(s.nodes.complaints(v), func(c *metapb.Condition) bool { return c.GetObject() != object })...)
	for _, a := range v.Attachments(id) {
		if a.GetRevoking() {
			list = append(list, condition(metapb.Condition_WARNING, object,
				fmt.Sprintf("It is being detached from node %s: node %s has not confirmed yet that nothing of it is under way.", a.GetNode(), grant.GetNode()),
				confirmation(waits)))
		}
	}
	if vol.GetWantedSize() > vol.GetSize() {
		list = append(list, condition(metapb.Condition_WARNING, object,
			fmt.Sprintf("It is to grow to %d bytes, and node %s has not confirmed that yet.", vol.GetWantedSize(), grant.GetNode()), confirmation(waits)))
	}
	return list
}

// confirmation is what to do about one that is missing.
func confirmation(down bool) string {
	if down {
		return "It is done when that node is back."
	}
	return "This takes a moment; if it lasts, look at that node's log."
}

// memberConditions are what is wrong with the disks that hold a volume, and
// with their nodes but the primary's.
func (s *Service) memberConditions(v *metadata.View, id block.VolumeID, primary string) (list []*metapb.Condition) {
	disks := s.nodes.disks(v)
	for _, m := range v.Members(id) {
		i := slices.IndexFunc(disks, func(d *metapb.Disk) bool { return d.GetId() == m.GetDiskId() })
		if i < 0 {
			continue
		}
		list = append(list, diskConditions(disks[i:i+1])...)
		if node := disks[i].GetNode(); node != "" && node != primary && !s.nodes.up(node) {
			list = append(list, condition(metapb.Condition_ERROR, "node "+node,
				fmt.Sprintf("The node is down, and disk %s, which holds data of the volume, with it.", m.GetDiskId()),
				"Start `gabion server` on it, or look at its log and network."))
		}
	}
	return list
}

func unixNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// GetCapacity implements the API. What it names as the largest volume is
// accepted right away; see raft/placement/DESIGN.md for the formula and for
// what a rack means.
func (s *Service) GetCapacity(ctx context.Context, in *metapb.GetCapacityRequest) (*metapb.GetCapacityResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	if in.GetPolicy() != nil {
		p := fill(in.GetPolicy(), v.Cluster())
		if err := metadata.ValidatePolicy(p); err != nil {
			return nil, err
		}
		if s.mayHave(p) != nil {
			return &metapb.GetCapacityResponse{}, nil
		}
		return capacity(capacityOf(v, p, in.GetRack())), nil
	}
	replicas := in.GetReplicas()
	if replicas == 0 {
		replicas = v.Cluster().GetDefaultReplicas()
	}
	if replicas > placement.MaxReplicas {
		return nil, fmt.Errorf("%w: replicas is %d; it takes 1 to %d, or 0 for the cluster's default", block.ErrInvalid, replicas, placement.MaxReplicas)
	}
	if s.mayHave(&metapb.Policy{Replicas: replicas}) != nil {
		return &metapb.GetCapacityResponse{}, nil
	}
	return capacity(v.Capacity(in.GetRack(), int(replicas))), nil
}

// capacityOf is the room for volumes of a policy that a consumer in a rack can reach.
func capacityOf(v *metadata.View, p *metapb.Policy, rack string) placement.Capacity {
	replicas := int(p.GetReplicas())
	switch oneRack := p.GetAccess() == metapb.Policy_SAME_RACK; {
	case rack != "" && !v.KnowsRack(rack):
		return placement.Capacity{}
	case oneRack && rack == "":
		return v.CapacityOfRacks(replicas)
	case oneRack:
		return v.Capacity(rack, replicas)
	}
	return v.Capacity("", replicas)
}

func capacity(c placement.Capacity) *metapb.GetCapacityResponse {
	return &metapb.GetCapacityResponse{Available: c.Available, MaximumVolumeSize: c.MaximumVolumeSize}
}
