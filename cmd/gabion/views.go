package main

import (
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
)

// The objects as -o json shows them; see app.print for the rules.
type (
	volumeView struct {
		ID         string    `json:"id"`
		Name       string    `json:"name"`
		Size       int64     `json:"size"`
		WantedSize int64     `json:"wanted_size,omitempty"` // while it grows
		Replicas   uint32    `json:"replicas"`
		Spread     string    `json:"spread"`
		Access     string    `json:"access"`
		Durability string    `json:"durability"`
		OnFull     string    `json:"on_full"`
		BlockSize  uint32    `json:"block_size"`
		Rack       string    `json:"rack,omitempty"`   // access rack: of all copies; else where the first should lie
		Format     string    `json:"format,omitempty"` // what consumers said of the file system on it: started, done
		Version    uint64    `json:"version"`
		CacheEpoch uint64    `json:"cache_epoch"`
		CreatedAt  time.Time `json:"created_at,omitzero"`
	}
	volumeDetails struct {
		volumeView
		BornExtents int64            `json:"born_extents"`
		Attachments []attachmentView `json:"attachments"`
		Primary     *primaryView     `json:"primary,omitempty"`
		Members     []memberView     `json:"members"`
		Conditions  []conditionView  `json:"conditions"`
	}
	attachmentView struct {
		ID        string    `json:"id"`
		Node      string    `json:"node"`
		ReadOnly  bool      `json:"read_only"`
		Detaching bool      `json:"detaching,omitempty"`
		CreatedAt time.Time `json:"created_at,omitzero"`
	}
	primaryView struct {
		Node       string `json:"node"`
		Generation uint64 `json:"generation"`
		Opened     bool   `json:"opened"`
	}
	memberView struct {
		DiskID string `json:"disk_id"`
		State  string `json:"state"`
	}
	nodeView struct {
		Name            string    `json:"name"`
		Rack            string    `json:"rack"`
		Up              bool      `json:"up"`
		Role            string    `json:"role,omitempty"` // in the metadata service
		SeenAt          time.Time `json:"seen_at,omitzero"`
		MetadataAddress string    `json:"metadata_address"`
		RaftAddress     string    `json:"raft_address"`
		ReplicaAddress  string    `json:"replica_address"`
		NBDAddress      string    `json:"nbd_address"`
		NBDSocket       string    `json:"nbd_socket,omitempty"`
		FeatureLevel    uint32    `json:"feature_level"`
		Version         string    `json:"version"`
	}
	diskView struct {
		ID        string `json:"id"`
		Node      string `json:"node"`
		Path      string `json:"path"`
		State     string `json:"state"`
		Problem   string `json:"problem,omitempty"`
		Capacity  int64  `json:"capacity"`
		Available int64  `json:"available"`
		IOMode    string `json:"io_mode"`
		Reflink   bool   `json:"reflink"`
	}
	eventView struct {
		Index      uint64    `json:"index"`
		Ordinal    uint32    `json:"ordinal,omitempty"`
		Time       time.Time `json:"time"`
		Type       string    `json:"type"`
		VolumeID   string    `json:"volume_id,omitempty"`
		VolumeName string    `json:"volume_name,omitempty"`
		Node       string    `json:"node,omitempty"`
		DiskID     string    `json:"disk_id,omitempty"`
		Message    string    `json:"message"`
	}
	conditionView struct {
		Severity string `json:"severity"`
		Object   string `json:"object"`
		Problem  string `json:"problem"`
		Remedy   string `json:"remedy"`
	}
)

// The words of the policy, as flags take them and views show them.
var (
	spreads      = words[metapb.Policy_Spread]{metapb.Policy_RACK: "rack", metapb.Policy_NODE: "node"}
	accesses     = words[metapb.Policy_Access]{metapb.Policy_CLUSTER: "cluster", metapb.Policy_SAME_RACK: "rack"}
	durabilities = words[metapb.Policy_Durability]{metapb.Policy_FLUSH: "flush", metapb.Policy_WRITE_THROUGH: "write-through"}
	onFulls      = words[metapb.Policy_OnFull]{metapb.Policy_WAIT: "wait", metapb.Policy_ERROR: "error"}
	diskStates   = words[metapb.Disk_State]{metapb.Disk_ONLINE: "online", metapb.Disk_FAILED: "failed", metapb.Disk_FULL: "full"}
	memberStates = words[metapb.Member_State]{metapb.Member_IN: "in", metapb.Member_OUT: "out"}
	formats      = words[metapb.Volume_Format]{metapb.Volume_STARTED: "started", metapb.Volume_DONE: "done"}
	roles        = words[metapb.Node_Role]{metapb.Node_LEADER: "leader", metapb.Node_VOTER: "voter", metapb.Node_LEARNER: "learner"}
	severities   = words[metapb.Condition_Severity]{metapb.Condition_WARNING: "warning", metapb.Condition_ERROR: "error"}
)

type words[E comparable] map[E]string

// value is the enum of a word; the absent word is the unspecified value.
func (w words[E]) value(word string) (e E) {
	for k, v := range w {
		if v == word {
			return k
		}
	}
	return e
}

func viewVolume(v *metapb.Volume) volumeView {
	p := v.GetPolicy()
	view := volumeView{
		ID: v.GetId(), Name: v.GetName(), Size: v.GetSize(),
		Replicas: p.GetReplicas(), Spread: spreads[p.GetSpread()], Access: accesses[p.GetAccess()],
		Durability: durabilities[p.GetDurability()], OnFull: onFulls[p.GetOnFull()], BlockSize: p.GetBlockSize(),
		Rack: v.GetRack(), Format: formats[v.GetFormat()],
		Version: v.GetVersion(), CacheEpoch: v.GetCacheEpoch(), CreatedAt: unixTime(v.GetCreatedAt()),
	}
	if v.GetWantedSize() > v.GetSize() {
		view.WantedSize = v.GetWantedSize()
	}
	return view
}

func viewDetails(r *metapb.GetVolumeResponse) volumeDetails {
	d := volumeDetails{
		volumeView: viewVolume(r.GetVolume()), BornExtents: r.GetBornExtents(),
		Attachments: []attachmentView{}, Members: []memberView{}, Conditions: viewAll(viewCondition, r.GetConditions()),
	}
	for _, t := range r.GetAttachments() {
		d.Attachments = append(d.Attachments, attachmentView{t.GetId(), t.GetNode(), t.GetReadOnly(), t.GetRevoking(), unixTime(t.GetCreatedAt())})
	}
	if g := r.GetGrant(); g.GetNode() != "" {
		d.Primary = &primaryView{g.GetNode(), g.GetGeneration(), g.GetOpened()}
	}
	for _, m := range r.GetMembers() {
		d.Members = append(d.Members, memberView{m.GetDiskId(), memberStates[m.GetState()]})
	}
	return d
}

func viewCondition(c *metapb.Condition) conditionView {
	return conditionView{severities[c.GetSeverity()], c.GetObject(), c.GetProblem(), c.GetRemedy()}
}

func viewNode(n *metapb.Node) nodeView {
	return nodeView{
		Name: n.GetName(), Rack: n.GetRack(), Up: n.GetUp(), Role: roles[n.GetRole()], SeenAt: unixTime(n.GetSeenAt()),
		MetadataAddress: n.GetMetadataAddress(), RaftAddress: n.GetRaftAddress(), ReplicaAddress: n.GetReplicaAddress(),
		NBDAddress: n.GetNbdAddress(), NBDSocket: n.GetNbdSocket(), FeatureLevel: n.GetFeatureLevel(), Version: n.GetVersion(),
	}
}

func viewDisk(d *metapb.Disk) diskView {
	return diskView{
		ID: d.GetId(), Node: d.GetNode(), Path: d.GetPath(), State: diskStates[d.GetState()], Problem: d.GetProblem(),
		Capacity: d.GetCapacity(), Available: d.GetAvailable(), IOMode: d.GetIoMode(), Reflink: d.GetReflink(),
	}
}

func viewEvent(e *metapb.Event) eventView {
	return eventView{
		Index: e.GetIndex(), Ordinal: e.GetOrdinal(), Time: unixTime(e.GetTime()), Type: e.GetType(),
		VolumeID: e.GetVolumeId(), VolumeName: e.GetVolumeName(), Node: e.GetNode(), DiskID: e.GetDiskId(), Message: e.GetMessage(),
	}
}

// viewAll is never null in JSON.
func viewAll[P, V any](view func(P) V, list []P) []V {
	views := make([]V, len(list))
	for i, p := range list {
		views[i] = view(p)
	}
	return views
}
