package metadata

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// TestAgainstModel applies random commands to the state machine and to a model
// that is written another way: plain maps, changed in place, no versions of
// anything. After every command both must say the same, and all invariants hold.
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		g := &generator{source: drawn{rt}}
		s := newChecked(rt)
		m := &model{nodes: map[string]modelNode{}, disks: map[string]modelDisk{}, volumes: map[string]*modelVolume{}, dead: map[string]bool{},
			consumers: map[string]modelConsumer{}}
		for range rapid.IntRange(1, 80).Draw(rt, "commands") {
			c := g.command(s.View())
			want := m.apply(c)
			r := s.apply(c)
			if !errors.Is(r.Err, want) || want == nil && r.Err != nil {
				rt.Fatalf("%v\nthe state machine says %v, the model %v", c, r.Err, want)
			}
			if got, want := describe(s.View()), m.describe(); got != want {
				rt.Fatalf("after %v (%v)\nstate machine:\n%s\nmodel:\n%s", c, r.Err, got, want)
			}
		}
	})
}

type drawn struct{ t *rapid.T }

func (d drawn) IntN(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "") }

type model struct {
	nodes     map[string]modelNode
	disks     map[string]modelDisk
	volumes   map[string]*modelVolume // by id
	dead      map[string]bool         // ids of deleted volumes
	consumers map[string]modelConsumer
}

type modelNode struct{ process, rack, directory string }

type modelConsumer struct {
	rack string
	most uint32
}

type modelDisk struct {
	node, instance string
	state          metapb.Disk_State
	capacity       int64
}

type modelVolume struct {
	name         string
	size, wanted int64
	replicas     uint32
	version      uint64
	epoch        uint64
	generation   uint64
	primary      string // empty: none, or it was removed
	opened       bool
	members      map[string]modelMember
	runs         map[uint32]string          // disks, joined
	attached     map[string]modelAttachment // by node
	format       metapb.Volume_Format
	oneRack      bool
	rack         string
}

type modelAttachment struct {
	id                            string
	readOnly, end, foreign, alone bool
}

type modelMember struct {
	in       bool
	admitted uint64
	instance string
}

func (m *model) apply(c *metapb.Command) error {
	if c.Level < 4 && (c.GetRemoveNode() != nil || c.GetPutNode().GetNode().GetDirectory() != "") {
		return block.ErrUnavailable
	}
	if a := c.GetAttachVolume().GetAttachment(); c.Level < 3 && (a.GetForeign() || a.GetAlone()) {
		return block.ErrUnavailable
	}
	if c.Level < 2 && (c.GetSetFormat() != nil || c.GetPutConsumer() != nil || c.GetCreateVolume().GetRack() != "") {
		return block.ErrUnavailable
	}
	switch k := c.Kind.(type) {
	case *metapb.Command_InitCluster, *metapb.Command_RecordEvent:
		return nil
	case *metapb.Command_PutConsumer:
		m.consumers[k.PutConsumer.Consumer.Name] = modelConsumer{k.PutConsumer.Consumer.Rack, k.PutConsumer.Consumer.MaxVolumes}
		return nil
	case *metapb.Command_SetFormat:
		return m.setFormat(k.SetFormat)
	case *metapb.Command_PutNode:
		return m.putNode(k.PutNode, c.Level)
	case *metapb.Command_RemoveNode:
		return m.removeNode(k.RemoveNode.Name)
	case *metapb.Command_PutDisks:
		if _, ok := m.nodes[k.PutDisks.Node]; !ok {
			return block.ErrNotFound
		}
		return m.putDisks(k.PutDisks.Node, k.PutDisks.Disks, nil)
	case *metapb.Command_CreateVolume:
		return m.create(k.CreateVolume)
	case *metapb.Command_ResizeVolume:
		return m.resize(k.ResizeVolume)
	case *metapb.Command_DeleteVolume:
		v := m.volumes[k.DeleteVolume.Id]
		if v != nil && len(v.attached) > 0 {
			return block.ErrInUse
		}
		if v != nil {
			delete(m.volumes, k.DeleteVolume.Id)
			m.dead[k.DeleteVolume.Id] = true
		}
		return nil
	case *metapb.Command_AttachVolume:
		return m.attach(k.AttachVolume, c.Level)
	case *metapb.Command_DetachVolume:
		m.detach(k.DetachVolume)
		return nil
	case *metapb.Command_GrantPrimary:
		return m.grant(k.GrantPrimary)
	case *metapb.Command_Fenced:
		return m.fenced(k.Fenced)
	}
	panic("unknown command")
}

func (m *model) removeNode(name string) error {
	for _, v := range m.volumes {
		for id := range v.members {
			if m.disks[id].node == name {
				return block.ErrInUse
			}
		}
	}
	delete(m.nodes, name)
	for _, v := range m.volumes {
		if v.primary == name && len(v.members) == 0 {
			v.generation++
			v.version++
			v.primary, v.opened, v.size = "", false, v.wanted
			maps.DeleteFunc(v.attached, func(_ string, a modelAttachment) bool { return a.end })
		}
	}
	for id, d := range m.disks {
		if d.node == name {
			d.node, d.state = "", metapb.Disk_FAILED
			m.disks[id] = d
		}
	}
	return nil
}

func (m *model) putNode(c *metapb.PutNode, level uint32) error {
	directory := c.Node.Directory
	if old := m.nodes[c.Node.Name].directory; old != "" && directory != old {
		if level >= 4 {
			return block.ErrInUse
		}
		directory = old
	}
	if err := m.putDisks(c.Node.Name, c.Disks, c.MovedDisks); err != nil {
		return err
	}
	m.nodes[c.Node.Name] = modelNode{c.Node.Process, c.Node.Rack, directory}
	for id, d := range m.disks {
		if d.node == c.Node.Name && !slices.ContainsFunc(c.Disks, func(l *metapb.Disk) bool { return l.Id == id }) {
			d.node, d.state = "", metapb.Disk_FAILED
			m.disks[id] = d
		}
	}
	return nil
}

func (m *model) putDisks(node string, disks []*metapb.Disk, moved []string) error {
	for _, d := range disks {
		if old, ok := m.disks[d.Id]; ok && old.node != node && old.node != "" && !slices.Contains(moved, d.Id) {
			return block.ErrInUse
		}
	}
	for _, d := range disks {
		m.disks[d.Id] = modelDisk{node, d.Incarnation.Instance, d.State, d.Capacity}
	}
	return nil
}

func (m *model) create(c *metapb.CreateVolume) error {
	oneRack := c.Policy.Access == metapb.Policy_SAME_RACK
	for _, v := range m.volumes {
		if v.name == c.Name {
			if v.wanted == c.Size && v.replicas == c.Policy.Replicas && v.oneRack == oneRack && (!oneRack || c.Rack == "" || c.Rack == v.rack) {
				return nil
			}
			return block.ErrExists
		}
	}
	if m.volumes[c.Id] != nil || m.dead[c.Id] {
		return block.ErrExists
	}
	v := &modelVolume{name: c.Name, size: c.Size, wanted: c.Size, replicas: c.Policy.Replicas, version: 1, epoch: 1,
		members: map[string]modelMember{}, runs: map[uint32]string{}, attached: map[string]modelAttachment{},
		format: metapb.Volume_NONE, oneRack: oneRack, rack: c.Rack}
	var usable, online int
	racks := []string{""}
	switch {
	case v.pin() != "":
		racks = []string{v.pin()}
	case oneRack:
		racks = []string{"r1", "r2"}
	}
	for _, rack := range racks {
		u, o := m.count(rack)
		usable, online = max(usable, u), max(online, o)
	}
	switch {
	case usable < int(v.replicas) && v.pin() == "":
		return block.ErrPrecondition
	case online < int(v.replicas) || !m.fits(v, v.wanted):
		return block.ErrNoSpace
	}
	m.volumes[c.Id] = v
	return nil
}

// pin is the rack that a volume must lie in.
func (v *modelVolume) pin() string {
	if v.oneRack {
		return v.rack
	}
	return ""
}

// count counts the nodes of a rack that have a disk, and one that is not full.
func (m *model) count(rack string) (usable, online int) {
	for name, node := range m.nodes {
		if rack != "" && node.rack != rack {
			continue
		}
		has, open := false, false
		for _, d := range m.disks {
			has = has || d.node == name && d.state != metapb.Disk_FAILED
			open = open || d.node == name && d.state == metapb.Disk_ONLINE
		}
		if has {
			usable++
		}
		if open {
			online++
		}
	}
	return usable, online
}

// fits looks at every set of nodes: what must lie in it may not exceed what it can take.
func (m *model) fits(extra *modelVolume, bytes int64) bool {
	capacity := map[string]int64{}
	for _, d := range m.disks {
		if d.node != "" && d.state != metapb.Disk_FAILED {
			capacity[d.node] += d.capacity
		}
	}
	names := slices.Sorted(maps.Keys(capacity))
	all := m.left(capacity, map[string]bool{})
	for set := range 1 << len(names) {
		absent := map[string]bool{}
		out := map[string]int64{}
		for i, n := range names {
			if set>>i&1 == 0 {
				absent[n] = true
				out[m.nodes[n].rack]++
				out[""]++
			}
		}
		// Only the volume that grows is judged: others may be over after a disk failed.
		needs := bytes * max(int64(extra.replicas)-out[extra.pin()], 0)
		if needs == 0 {
			continue
		}
		left := m.left(capacity, absent)
		free, part := needs, needs // beside all other volumes, and beside those a rack is expected to carry
		for _, v := range m.volumes {
			if v.pin() == "" {
				free += v.wanted * max(int64(v.replicas)-out[""], 0)
			}
		}
		if rack := extra.pin(); rack != "" {
			for replicas := range int64(4) {
				var wanted int64
				for _, v := range m.volumes {
					if v.pin() == "" && int64(v.replicas) == replicas {
						wanted += v.wanted
					}
				}
				if sum := all["r1"] + all["r2"]; sum > 0 {
					part += (wanted*all[rack] + sum - 1) / sum * max(replicas-out[rack], 0)
				}
			}
			if part > left[rack] {
				return false
			}
		}
		if free > left["r1"]+left["r2"] {
			return false
		}
	}
	return true
}

// left is what each rack can take beside the volumes that must lie in it, without some nodes.
func (m *model) left(capacity map[string]int64, absent map[string]bool) map[string]int64 {
	left, out := map[string]int64{}, map[string]int64{}
	for n, bytes := range capacity {
		if absent[n] {
			out[m.nodes[n].rack]++
		} else {
			left[m.nodes[n].rack] += bytes
		}
	}
	for _, v := range m.volumes {
		if rack := v.pin(); rack != "" {
			left[rack] -= v.wanted * max(int64(v.replicas)-out[rack], 0)
		}
	}
	for rack := range left {
		left[rack] = max(left[rack], 0)
	}
	return left
}

func (m *model) resize(c *metapb.ResizeVolume) error {
	v := m.volumes[c.Id]
	switch {
	case v == nil:
		return block.ErrNotFound
	case c.Size < v.wanted:
		return block.ErrInvalid
	case c.Size == v.wanted:
		return nil
	case !m.fits(v, c.Size-v.wanted):
		return block.ErrNoSpace
	}
	v.wanted = c.Size
	v.version++
	if v.primary == "" {
		v.size = c.Size
	}
	return nil
}

func (m *model) attach(c *metapb.AttachVolume, level uint32) error {
	v, a := m.volumes[c.Attachment.VolumeId], c.Attachment
	if v == nil {
		return block.ErrNotFound
	}
	if has, ok := v.attached[a.Node]; ok {
		switch {
		case has.end:
			return block.ErrInUse
		case has.readOnly != a.ReadOnly:
			return block.ErrExists
		case (has.foreign || !a.Foreign) && (has.alone || !a.Alone):
			return nil
		case a.Alone && len(v.attached) > 1:
			return block.ErrInUse
		case c.Version != 0 && c.Version != v.version:
			return block.ErrStale
		}
		has.foreign, has.alone = has.foreign || a.Foreign, has.alone || a.Alone
		v.attach(a.Node, has)
		return nil
	}
	for _, other := range v.attached {
		if level < 2 || !other.readOnly || !a.ReadOnly || other.alone || a.Alone {
			return block.ErrInUse
		}
	}
	load, most := 0, 250
	for _, w := range m.volumes {
		if _, ok := w.attached[a.Node]; ok {
			load++
		}
	}
	if n := m.consumers[a.Node].most; n > 0 {
		most = int(n)
	}
	switch {
	case level >= 2 && load >= most:
		return block.ErrNoSpace
	case c.Version != 0 && c.Version != v.version:
		return block.ErrStale
	}
	v.attach(a.Node, modelAttachment{id: a.Id, readOnly: a.ReadOnly, foreign: a.Foreign, alone: a.Alone})
	return nil
}

func (v *modelVolume) attach(node string, a modelAttachment) {
	v.attached[node] = a
	v.version++
	if a.foreign && !a.readOnly && v.format == metapb.Volume_STARTED {
		v.format = metapb.Volume_DONE
	}
}

func (v *modelVolume) attachment(id string) (node string, a modelAttachment) {
	for node, a := range v.attached {
		if a.id == id {
			return node, a
		}
	}
	return "", modelAttachment{}
}

func (m *model) detach(c *metapb.DetachVolume) {
	v := m.volumes[c.VolumeId]
	if v == nil {
		return
	}
	node, a := v.attachment(c.AttachmentId)
	if node == "" || a.end {
		return
	}
	v.version++
	if v.primary == "" {
		delete(v.attached, node)
	} else {
		a.end = true
		v.attached[node] = a
	}
}

func (m *model) setFormat(c *metapb.SetFormat) error {
	v := m.volumes[c.VolumeId]
	if v == nil {
		return block.ErrNotFound
	}
	node, a := v.attachment(c.AttachmentId)
	switch {
	case node == "":
		return block.ErrNotFound
	case a.end:
		return block.ErrPrecondition
	case a.readOnly:
		return block.ErrReadOnly
	case c.Format != metapb.Volume_STARTED && c.Format != metapb.Volume_DONE:
		return block.ErrInvalid
	case c.Format == v.format:
		return nil
	case c.Format == metapb.Volume_STARTED && (v.format == metapb.Volume_DONE || a.foreign || len(v.runs) > 0):
		return block.ErrPrecondition
	}
	v.format = c.Format
	v.version++
	return nil
}

func (m *model) grant(c *metapb.GrantPrimary) error {
	v := m.volumes[c.VolumeId]
	node, known := m.nodes[c.Node]
	switch {
	case v == nil || !known:
		return block.ErrNotFound
	case node.process != c.Process:
		return block.ErrStale
	}
	v.generation++
	v.version++
	v.opened, v.primary = false, c.Node
	return nil
}

func (m *model) fenced(c *metapb.FencedCommand) error {
	v := m.volumes[c.Fence.VolumeId]
	switch {
	case v == nil:
		return block.ErrNotFound
	case v.primary == "" || c.Fence.Generation != v.generation || c.Fence.Version != v.version:
		return block.ErrStale
	case c.GetTakeover() == nil && !v.opened:
		return block.ErrPrecondition
	}
	var err error
	switch k := c.Kind.(type) {
	case *metapb.FencedCommand_Takeover:
		err = m.takeover(v, k.Takeover)
	case *metapb.FencedCommand_CommitRuns:
		err = m.commit(v, k.CommitRuns)
	case *metapb.FencedCommand_ConfirmSize:
		if k.ConfirmSize.Size < v.size || k.ConfirmSize.Size > v.wanted {
			return block.ErrInvalid
		}
		v.size = k.ConfirmSize.Size
	case *metapb.FencedCommand_ConfirmDetach:
		if node, a := v.attachment(k.ConfirmDetach.AttachmentId); node != "" {
			if !a.end {
				return block.ErrPrecondition
			}
			delete(v.attached, node)
		}
	}
	if err == nil {
		v.version++
	}
	return err
}

func (m *model) takeover(v *modelVolume, c *metapb.Takeover) error {
	next := map[string]modelMember{}
	for _, mem := range c.Members {
		if _, ok := m.disks[mem.DiskId]; !ok {
			return block.ErrNotFound
		}
		old, known := v.members[mem.DiskId]
		now, in := mem.AdmittedGeneration == v.generation, mem.State == metapb.Member_IN
		used := slices.ContainsFunc(slices.Collect(maps.Values(v.runs)), func(d string) bool { return strings.Contains(d, mem.DiskId) })
		switch {
		case in && now && known && !old.in && used:
			return block.ErrPrecondition
		case in && now:
			next[mem.DiskId] = modelMember{true, v.generation, mem.Incarnation.Instance}
		case !known, in && (!old.in || mem.AdmittedGeneration != old.admitted):
			return block.ErrInvalid
		default:
			next[mem.DiskId] = modelMember{in, old.admitted, old.instance}
		}
	}
	if len(next) != len(c.Members) { // one twice
		return block.ErrInvalid
	}
	for id := range v.members {
		if _, ok := next[id]; !ok {
			return block.ErrInvalid
		}
	}
	for _, disks := range v.runs {
		if !slices.ContainsFunc(strings.Fields(disks), func(d string) bool { return next[d].in }) {
			return block.ErrPrecondition
		}
	}
	v.members, v.opened = next, true
	if c.RaiseCacheEpoch {
		v.epoch++
	}
	return nil
}

func (m *model) commit(v *modelVolume, c *metapb.CommitRuns) error {
	runs, members := maps.Clone(v.runs), maps.Clone(v.members)
	sealed := map[string]string{}
	for _, mem := range c.Members {
		sealed[mem.DiskId] = mem.Incarnation.Instance
	}
	for _, r := range c.Runs {
		last := (v.wanted - 1) / (16 * generatedExtent)
		nodes := map[string]bool{}
		for _, d := range r.Disks {
			nodes[m.disks[d].node] = true
		}
		disks := strings.Join(r.Disks, " ")
		switch {
		case int64(r.Index) > last || len(r.Disks) != int(v.replicas):
			return block.ErrInvalid
		case nodes[""]:
			// Either error is right; which comes first is not worth a rule.
			if len(nodes) < len(r.Disks) {
				return m.firstFault(r)
			}
			return block.ErrNotFound
		case len(nodes) < len(r.Disks):
			return block.ErrInvalid
		case runs[r.Index] == disks:
			continue
		case runs[r.Index] != "":
			return block.ErrStale
		}
		for _, d := range r.Disks {
			old, known := members[d]
			if known && (!old.in || old.admitted != v.generation) {
				return block.ErrPrecondition
			}
			if !known {
				instance, ok := sealed[d]
				if !ok {
					instance = m.disks[d].instance
				}
				members[d] = modelMember{true, v.generation, instance}
			}
		}
		runs[r.Index] = disks
	}
	v.runs, v.members = runs, members
	return nil
}

// firstFault is for a run with both a disk of no node and two on one node.
func (m *model) firstFault(r *metapb.Run) error {
	seen := map[string]bool{}
	for _, d := range r.Disks {
		node := m.disks[d].node
		if node == "" {
			return block.ErrNotFound
		}
		if seen[node] {
			return block.ErrInvalid
		}
		seen[node] = true
	}
	return nil
}

func (m *model) describe() string {
	var lines []string
	for id, v := range m.volumes {
		var parts []string
		for d, mem := range v.members {
			parts = append(parts, fmt.Sprintf("member %s %t %d %s", d, mem.in, mem.admitted, mem.instance))
		}
		for i, disks := range v.runs {
			parts = append(parts, fmt.Sprintf("run %d %s", i, disks))
		}
		for node, a := range v.attached {
			parts = append(parts, fmt.Sprintf("attached %q %q %t %t %t %t", a.id, node, a.readOnly, a.end, a.foreign, a.alone))
		}
		sort.Strings(parts)
		lines = append(lines, fmt.Sprintf("%s %s %d %d %d v%d e%d g%d %t %s %q\n  %s", id, v.name, v.size, v.wanted, v.replicas, v.version, v.epoch,
			v.generation, v.opened, v.format, v.rack, strings.Join(parts, "\n  ")))
	}
	for name, c := range m.consumers {
		lines = append(lines, fmt.Sprintf("consumer %s %s %d", name, c.rack, c.most))
	}
	for id := range m.dead {
		lines = append(lines, "dead "+id)
	}
	for id, d := range m.disks {
		lines = append(lines, fmt.Sprintf("disk %s %s %s", id, d.node, d.state))
	}
	sort.Strings(lines)
	return named(strings.Join(lines, "\n"))
}

func describe(view *View) string {
	var lines []string
	for _, v := range view.Volumes(Position{}, 0) {
		var parts []string
		id := volumeID(v.Id)
		m := view.Map(id)
		for _, mem := range m.Members {
			parts = append(parts, fmt.Sprintf("member %s %t %d %s", mem.DiskId, mem.State == metapb.Member_IN, mem.AdmittedGeneration, mem.Incarnation.GetInstance()))
		}
		for _, r := range m.Runs {
			parts = append(parts, fmt.Sprintf("run %d %s", r.Index, strings.Join(r.Disks, " ")))
		}
		for _, a := range m.Attachments {
			parts = append(parts, fmt.Sprintf("attached %q %q %t %t %t %t", a.Id, a.Node, a.ReadOnly, a.Revoking, a.Foreign, a.Alone))
		}
		sort.Strings(parts)
		lines = append(lines, fmt.Sprintf("%s %s %d %d %d v%d e%d g%d %t %s %q\n  %s", v.Id, v.Name, v.Size, v.WantedSize, v.Policy.Replicas, v.Version,
			v.CacheEpoch, m.Grant.GetGeneration(), m.Grant.GetOpened(), v.Format, v.Rack, strings.Join(parts, "\n  ")))
	}
	for _, c := range view.Consumers() {
		lines = append(lines, fmt.Sprintf("consumer %s %s %d", c.Name, c.Rack, c.MaxVolumes))
	}
	for id := range entries(view.tombstones) {
		lines = append(lines, "dead "+id.String())
	}
	for _, d := range view.Disks() {
		lines = append(lines, fmt.Sprintf("disk %s %s %s", d.Id, d.Node, d.State))
	}
	sort.Strings(lines)
	return named(strings.Join(lines, "\n"))
}
