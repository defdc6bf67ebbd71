package metadata

import (
	"fmt"
	"slices"
	"strings"

	"github.com/benbjohnson/immutable"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Check returns an error that names the first invariant of DESIGN.md that a
// state breaks. Tests call it after every Apply, Decode before it answers. It
// takes time in proportion to the state.
func Check(v *View) error {
	if v.cluster == nil {
		if v.nodes.Len()+v.disks.Len()+v.volumes.Len()+v.tombstones.Len()+len(v.events.kept) > 0 {
			return broken("there is state before the cluster was initialised")
		}
		return nil
	}
	for _, check := range []func(*View) error{checkCluster, checkDisks, checkVolumes, checkTombstones, checkConsumers, checkEvents} {
		if err := check(v); err != nil {
			return err
		}
	}
	return nil
}

func broken(format string, args ...any) error {
	return fmt.Errorf("broken invariant: %s", fmt.Sprintf(format, args...))
}

func checkCluster(v *View) error {
	d := draft{View: *emptyView()}
	if err := d.initCluster(v.cluster); err != nil {
		return broken("cluster: %v", err)
	}
	for name, n := range entries(v.nodes) {
		if n.Directory != "" && v.level < LevelServers {
			return broken("node %q has a directory at level %d", name, v.level)
		}
		if err := checkNode(n); err != nil || n.Name != name || n.Up || n.SeenAt != 0 || n.Role != metapb.Node_ROLE_UNSPECIFIED {
			return broken("node %q is stored as %q, up %t, seen at %d: %v", n.Name, name, n.Up, n.SeenAt, err)
		}
	}
	return nil
}

func checkDisks(v *View) error {
	if len(v.numbered) != v.disks.Len() {
		return broken("%d disks have %d numbers", v.disks.Len(), len(v.numbered))
	}
	for i, id := range v.numbered {
		d, ok := v.disks.Get(id)
		if !ok || d.number != diskNumber(i+1) || d.Id != id.String() {
			return broken("disk %s does not have number %d", id, i+1)
		}
		if err := checkDisk(d.Disk); err != nil {
			return broken("%v", err)
		}
		if v.Node(d.Node) == nil && (d.Node != "" || d.State != metapb.Disk_FAILED) {
			return broken("disk %s is on node %q, which is not there", id, d.Node)
		}
	}
	return nil
}

func checkVolumes(v *View) error {
	if v.names.Len() != v.volumes.Len() {
		return broken("%d volumes have %d names", v.volumes.Len(), v.names.Len())
	}
	sums := draft{View: *emptyView()}
	for id, vol := range entries(v.volumes) {
		if named, ok := v.names.Get(vol.Name); !ok || named != id || vol.id != id || vol.Id != id.String() {
			return broken("volume %s is not the one called %q", id, vol.Name)
		}
		if _, dead := v.Tombstone(id); dead {
			return broken("volume %q lives under the deleted id %s", vol.Name, id)
		}
		for _, check := range []func(*View, *volume) error{checkVolume, checkAttachments, checkMembers, checkRuns} {
			if err := check(v, vol); err != nil {
				return err
			}
		}
		sums.promise(vol.Volume, vol.WantedSize)
		for _, a := range vol.attachments {
			sums.countAttachment(a.Node, 1)
		}
	}
	switch {
	case sums.demand != v.demand || !sameTree(sums.pinned, v.pinned):
		return broken("promised is %v and not %v", v.Promises(), sums.Promises())
	case sums.attachments != v.attachments || !sameTree(sums.loads, v.loads):
		return broken("attachments are %d and not %d, or not of these nodes", v.attachments, sums.attachments)
	}
	return nil
}

func checkVolume(v *View, vol *volume) error {
	if err := ValidateName(vol.Name); err != nil {
		return broken("%v", err)
	}
	if err := ValidatePolicy(vol.Policy); err != nil {
		return broken("volume %q: %v", vol.Name, err)
	}
	for _, size := range []int64{vol.Size, vol.WantedSize} {
		if err := block.ValidateSize(size); err != nil {
			return broken("volume %q: %v", vol.Name, err)
		}
	}
	if vol.Rack != "" {
		if err := ValidateRack(vol.Rack); err != nil {
			return broken("volume %q: %v", vol.Name, err)
		}
	}
	g := vol.grant
	switch {
	case vol.Format == metapb.Volume_FORMAT_UNSPECIFIED:
		return broken("volume %q has no format", vol.Name)
	case v.level < levelConsumers && (vol.Format != metapb.Volume_NONE || vol.Rack != ""):
		return broken("volume %q has format %s and rack %q at level %d", vol.Name, vol.Format, vol.Rack, v.level)
	case v.level < LevelTerms && strings.ContainsAny(vol.Name, space):
		return broken("volume %q has its name at level %d", vol.Name, v.level)
	case vol.Size > vol.WantedSize:
		return broken("volume %q has %d bytes and wants only %d", vol.Name, vol.Size, vol.WantedSize)
	case vol.Version == 0 || vol.CacheEpoch == 0:
		return broken("volume %q has version %d and cache epoch %d", vol.Name, vol.Version, vol.CacheEpoch)
	case vol.unserved() && vol.Size != vol.WantedSize:
		return broken("volume %q has no primary and waits for its growth", vol.Name)
	case g != nil && (g.Generation == 0 || g.Generation >= vol.Version || v.Node(g.Node) == nil && v.level < LevelServers),
		g != nil && g.Node == "" && (g.Opened || g.Process != "" || len(vol.members) > 0):
		return broken("volume %q at version %d has generation %d on node %q", vol.Name, vol.Version, g.Generation, g.Node)
	}
	return nil
}

func checkAttachments(v *View, vol *volume) error {
	for i, a := range vol.attachments {
		if err := checkAttachment(a); err != nil {
			return broken("%v", err)
		}
		switch {
		case i > 0 && vol.attachments[i-1].Node >= a.Node:
			return broken("the attachments of volume %q are not in order at node %q", vol.Name, a.Node)
		case len(vol.attachments) > 1 && (!a.ReadOnly || v.level < levelConsumers):
			return broken("volume %q has %d attachments, and node %q writes", vol.Name, len(vol.attachments), a.Node)
		case slices.ContainsFunc(vol.attachments[:i], func(o *metapb.Attachment) bool { return o.Id == a.Id }):
			return broken("attachment %s of volume %q is there twice", a.Id, vol.Name)
		case a.Alone && (v.level < LevelTerms || len(vol.attachments) > 1):
			return broken("attachment %s of volume %q is alone at level %d beside %d", a.Id, vol.Name, v.level, len(vol.attachments)-1)
		case a.Foreign && (v.level < LevelTerms || !a.ReadOnly && vol.Format == metapb.Volume_STARTED):
			return broken("attachment %s of volume %q is foreign at level %d and format %s", a.Id, vol.Name, v.level, vol.Format)
		case a.VolumeId != vol.Id:
			return broken("attachment %s is of volume %s, stored with %s", a.Id, a.VolumeId, vol.Id)
		case !digestMatches(a):
			return broken("attachment %s has a digest of another token", a.Id)
		case a.Revoking && vol.unserved():
			return broken("attachment %s is being revoked by no primary", a.Id)
		}
	}
	return nil
}

func checkMembers(v *View, vol *volume) error {
	for i, m := range vol.members {
		id, err := parseDisk(m.DiskId)
		if err != nil {
			return broken("%v", err)
		}
		switch {
		case i > 0 && vol.members[i-1].DiskId >= m.DiskId:
			return broken("the members of volume %q are not in order at %s", vol.Name, id)
		case v.Disk(id) == nil:
			return broken("member %s of volume %q is no disk", id, vol.Name)
		case m.State != metapb.Member_IN && m.State != metapb.Member_OUT:
			return broken("member %s of volume %q is %s", id, vol.Name, m.State)
		case m.AdmittedGeneration == 0 || m.AdmittedGeneration > vol.grant.GetGeneration():
			return broken("member %s of volume %q was admitted in generation %d of %d",
				id, vol.Name, m.AdmittedGeneration, vol.grant.GetGeneration())
		}
	}
	return nil
}

func checkRuns(v *View, vol *volume) error {
	members := make(map[diskNumber]bool, len(vol.members)) // true: in
	for _, m := range vol.members {
		id, _ := parseDisk(m.DiskId)
		d, _ := v.disks.Get(id)
		members[d.number] = m.State == metapb.Member_IN
	}
	all := v.Geometry().Runs(vol.WantedSize)
	for index, r := range entries(vol.runs) {
		if int64(index) >= all {
			return broken("volume %q has run %d of %d", vol.Name, index, all)
		}
		if r.count() != int(vol.Policy.Replicas) || slices.ContainsFunc(r[r.count():], func(n diskNumber) bool { return n != 0 }) {
			return broken("run %d of volume %q has %d replicas", index, vol.Name, r.count())
		}
		someIn := false
		for i, n := range r[:r.count()] {
			in, known := members[n]
			if !known || slices.Contains(r[:i], n) {
				return broken("run %d of volume %q lies on %d, which is no member or there twice", index, vol.Name, n)
			}
			someIn = someIn || in
		}
		if !someIn {
			return broken("run %d of volume %q has no member that is in", index, vol.Name)
		}
	}
	return nil
}

func checkTombstones(v *View) error {
	for id, index := range entries(v.tombstones) {
		if index == 0 || index > v.index {
			return broken("volume %s was deleted at index %d of %d", id, index, v.index)
		}
	}
	return nil
}

func checkConsumers(v *View) error {
	if v.level < levelFirst || v.level > Level || v.level < levelConsumers && v.consumers.Len() > 0 {
		return broken("the state is at level %d, with %d consumers", v.level, v.consumers.Len())
	}
	for name, c := range entries(v.consumers) {
		if err := checkConsumer(c); err != nil || c.Name != name {
			return broken("consumer %q is stored as %q: %v", c.Name, name, err)
		}
	}
	return nil
}

// sameTree reports whether two trees have the same entries.
func sameTree[V comparable](a, b *immutable.SortedMap[string, V]) bool {
	for k, v := range entries(a) {
		if w, ok := b.Get(k); !ok || w != v {
			return false
		}
	}
	return a.Len() == b.Len()
}

func checkEvents(v *View) error {
	if len(v.events.kept) > EventsKept {
		return broken("%d events are kept", len(v.events.kept))
	}
	index, ordinal := v.events.forgotten, int64(-1) // the ring may have cut one command's events in two
	for _, e := range v.events.kept {
		if e.Index < index || e.Index > v.index || e.Index == index && int64(e.Ordinal) <= ordinal {
			return broken("event %d of index %d comes after index %d, ordinal %d", e.Ordinal, e.Index, index, ordinal)
		}
		if !eventType(e.Type) {
			return broken("event of index %d has type %q", e.Index, e.Type)
		}
		index, ordinal = e.Index, int64(e.Ordinal)
	}
	return nil
}

// CheckTransition returns an error that names the first rule which the way from
// one state to a later one breaks, among them what may only grow. It is for
// tests and takes time in proportion to the states.
func CheckTransition(from, to *View) error {
	if to.index < from.index {
		return broken("index went from %d to %d", from.index, to.index)
	}
	if from.cluster != nil && !proto.Equal(from.cluster, to.cluster) {
		return broken("the cluster changed")
	}
	if len(to.numbered) < len(from.numbered) || !slices.Equal(to.numbered[:len(from.numbered)], from.numbered) {
		return broken("disks changed their numbers")
	}
	if to.level < from.level {
		return broken("the level went from %d to %d", from.level, to.level)
	}
	for name := range entries(from.consumers) {
		if to.Consumer(name) == nil {
			return broken("consumer %q is gone", name)
		}
	}
	for id, index := range entries(from.tombstones) {
		if now, ok := to.Tombstone(id); !ok || now != index {
			return broken("the tombstone of %s changed", id)
		}
	}
	for id, old := range entries(from.volumes) {
		now, alive := to.volumes.Get(id)
		if _, dead := to.Tombstone(id); !alive && !dead {
			return broken("volume %q is gone without a tombstone", old.Name)
		}
		if alive {
			if err := checkVolumeTransition(old, now); err != nil {
				return err
			}
		}
	}
	return checkBirths(from, to)
}

func checkVolumeTransition(old, now *volume) error {
	switch {
	case now.Name != old.Name || !proto.Equal(now.Policy, old.Policy) || now.CreatedAt != old.CreatedAt || now.Rack != old.Rack:
		return broken("volume %q became %q or got another policy or rack", old.Name, now.Name)
	case now.Format < old.Format, now.Format != old.Format && now.Format == metapb.Volume_STARTED && old.runs.Len() > 0:
		return broken("the format of volume %q went from %s to %s with %d runs", old.Name, old.Format, now.Format, old.runs.Len())
	case now.Version < old.Version, now.CacheEpoch < old.CacheEpoch, now.Size < old.Size, now.WantedSize < old.WantedSize,
		now.grant.GetGeneration() < old.grant.GetGeneration():
		return broken("volume %q went backwards: %v to %v", old.Name, old.Volume, now.Volume)
	case now.Version == old.Version && !old.same(now):
		return broken("volume %q changed at version %d", old.Name, old.Version)
	case now.grant.GetGeneration() == old.grant.GetGeneration() && old.grant.GetOpened() && !now.grant.GetOpened():
		return broken("volume %q was closed in generation %d", old.Name, old.grant.Generation)
	}
	for _, a := range old.attachments {
		if i := now.attachment(a.Id); i >= 0 && (a.Foreign && !now.attachments[i].Foreign || a.Alone && !now.attachments[i].Alone) {
			return broken("attachment %s of volume %q is no more foreign or alone", a.Id, old.Name)
		}
	}
	for index, r := range entries(old.runs) {
		if moved, ok := now.runs.Get(index); !ok || moved != r {
			return broken("run %d of volume %q moved or is unborn again", index, old.Name)
		}
	}
	return nil
}

// same reports whether two states of a volume are equal.
func (v *volume) same(o *volume) bool {
	return proto.Equal(v.Volume, o.Volume) && proto.Equal(v.grant, o.grant) && v.runs.Len() == o.runs.Len() &&
		slices.EqualFunc(v.members, o.members, func(a, b *metapb.Member) bool { return proto.Equal(a, b) }) &&
		slices.EqualFunc(v.attachments, o.attachments, func(a, b *metapb.Attachment) bool { return proto.Equal(a, b) })
}

// checkBirths looks at the runs that are new: later a disk may move to a node that has another replica.
func checkBirths(from, to *View) error {
	for id, vol := range entries(to.volumes) {
		var born *runs
		if old, ok := from.volumes.Get(id); ok {
			born = old.runs
		} else {
			born = newRuns()
		}
		if born.Len() == vol.runs.Len() {
			continue
		}
		for index, r := range entries(vol.runs) {
			if _, ok := born.Get(index); ok {
				continue
			}
			nodes := map[string]bool{}
			for _, n := range r[:r.count()] {
				node := to.Disk(to.numbered[n-1]).Node
				if node == "" || nodes[node] {
					return broken("run %d of volume %q was born on node %q twice", index, vol.Name, node)
				}
				nodes[node] = true
			}
		}
	}
	return nil
}
