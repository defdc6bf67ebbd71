package metadata

import (
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/gabion-storage/gabion/raft/metapb"
)

// args reads the arguments of a script line: those without a value are positional.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) positional() []string {
	var p []string
	for _, arg := range a.d.CmdArgs {
		if len(arg.Vals) == 0 {
			p = append(p, arg.Key)
		}
	}
	return p
}

func (a args) id(i int) string {
	if p := a.positional(); i < len(p) {
		return id(p[i])
	}
	a.d.Fatalf(a.t, "argument %d is missing", i)
	return ""
}

func (a args) flag(name string) bool {
	for _, p := range a.positional() {
		if p == name {
			return true
		}
	}
	return false
}

// list is the values of key=v or key=(v, w).
func (a args) list(key string) []string {
	for _, arg := range a.d.CmdArgs {
		if arg.Key == key {
			return arg.Vals
		}
	}
	return nil
}

func (a args) str(key, otherwise string) string {
	if v := a.list(key); len(v) > 0 {
		return strings.Join(v, ",")
	}
	return otherwise
}

func (a args) num(key string, otherwise int) int {
	n, err := strconv.Atoi(a.str(key, strconv.Itoa(otherwise)))
	if err != nil {
		a.d.Fatalf(a.t, "%s: %v", key, err)
	}
	return n
}

func (a args) size(key, otherwise string) int64 { return parseSize(a.t, a.str(key, otherwise)) }

// command is the command of a script line.
func (s *script) command(verb string, a args) *metapb.Command {
	c := &metapb.Command{Level: uint32(a.num("level", Level)), Time: int64(s.next)}
	switch verb {
	case "init":
		c.Kind = &metapb.Command_InitCluster{InitCluster: &metapb.InitCluster{ClusterId: id(a.str("id", "c1")),
			ExtentSize: a.size("extent", "64MiB"), DefaultReplicas: uint32(a.num("replicas", 1)), Overcommit: uint32(a.num("overcommit", 0))}}
	case "node":
		var moved []string
		for _, m := range a.list("moved") {
			moved = append(moved, id(m))
		}
		c.Kind = &metapb.Command_PutNode{PutNode: &metapb.PutNode{Disks: a.disks(), MovedDisks: moved, Node: &metapb.Node{Name: a.positional()[0],
			Rack: a.str("rack", "r1"), Process: a.str("process", "p1"), FeatureLevel: uint32(a.num("announces", Level)),
			Directory: a.str("directory", ""), Up: true, SeenAt: 7}}}
	case "remove":
		c.Kind = &metapb.Command_RemoveNode{RemoveNode: &metapb.RemoveNode{Name: a.positional()[0]}}
	case "disks":
		c.Kind = &metapb.Command_PutDisks{PutDisks: &metapb.PutDisks{Node: a.positional()[0], Disks: a.disks()}}
	case "create":
		c.Kind = &metapb.Command_CreateVolume{CreateVolume: &metapb.CreateVolume{Id: a.id(0), Name: a.str("name", ""),
			Size: a.size("size", "1GiB"), Policy: a.policy(), Rack: a.str("rack", "")}}
	case "resize":
		c.Kind = &metapb.Command_ResizeVolume{ResizeVolume: &metapb.ResizeVolume{Id: a.id(0), Size: a.size("size", "0")}}
	case "delete":
		c.Kind = &metapb.Command_DeleteVolume{DeleteVolume: &metapb.DeleteVolume{Id: a.id(0)}}
	case "attach":
		c.Kind = &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{Version: uint64(a.num("version", 0)),
			Attachment: &metapb.Attachment{Id: a.id(0), VolumeId: a.id(1), Node: a.str("node", "k1"), ReadOnly: a.flag("read-only"), Foreign: a.flag("foreign"), Alone: a.flag("alone"),
				Token: []byte(a.str("token", "secret-of-"+a.id(0)))}}}
	case "detach":
		c.Kind = &metapb.Command_DetachVolume{DetachVolume: &metapb.DetachVolume{VolumeId: a.id(0), AttachmentId: a.id(1)}}
	case "grant":
		c.Kind = &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{VolumeId: a.id(0), Node: a.str("node", "n1"), Process: a.str("process", "p1")}}
	case "format":
		c.Kind = &metapb.Command_SetFormat{SetFormat: &metapb.SetFormat{VolumeId: a.id(0), AttachmentId: a.id(1),
			Format: metapb.Volume_Format(metapb.Volume_Format_value[strings.ToUpper(a.positional()[2])])}}
	case "consumer":
		c.Kind = &metapb.Command_PutConsumer{PutConsumer: &metapb.PutConsumer{Consumer: &metapb.Consumer{
			Name: a.positional()[0], Rack: a.str("rack", "r1"), MaxVolumes: uint32(a.num("max", 0)), RegisteredAt: 7}}}
	case "record":
		c.Kind = &metapb.Command_RecordEvent{RecordEvent: &metapb.RecordEvent{Event: &metapb.Event{Type: a.str("type", ""),
			Message: a.str("message", ""), VolumeId: id(a.str("volume", ""))}}}
	default:
		c.Kind = &metapb.Command_Fenced{Fenced: s.fenced(verb, a)}
	}
	return c
}

func (s *script) fenced(verb string, a args) *metapb.FencedCommand {
	v := volumeID(a.positional()[0])
	generation := a.num("generation", int(s.View().Grant(v).GetGeneration()))
	f := &metapb.FencedCommand{Fence: &metapb.Fence{VolumeId: v.String(), Generation: uint64(generation),
		Version: uint64(a.num("version", int(s.View().Volume(v).GetVersion())))}}
	switch verb {
	case "takeover":
		f.Kind = &metapb.FencedCommand_Takeover{Takeover: &metapb.Takeover{Members: a.members("members", generation), RaiseCacheEpoch: a.flag("raise")}}
	case "commit":
		c := &metapb.CommitRuns{Members: a.members("sealed", generation)}
		for _, run := range a.list("runs") { // 0:d1:d2
			parts := strings.Split(run, ":")
			index, _ := strconv.Atoi(parts[0])
			r := &metapb.Run{Index: uint32(index)}
			for _, d := range parts[1:] {
				r.Disks = append(r.Disks, id(d))
			}
			c.Runs = append(c.Runs, r)
		}
		f.Kind = &metapb.FencedCommand_CommitRuns{CommitRuns: c}
	case "confirm-size":
		f.Kind = &metapb.FencedCommand_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: a.size("size", "0")}}
	case "confirm-detach":
		f.Kind = &metapb.FencedCommand_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: a.id(1)}}
	default:
		a.d.Fatalf(a.t, "unknown verb %q", verb)
	}
	return f
}

// members are written d1:in:boot/process/instance[:generation it was admitted in], or d1:out.
func (a args) members(key string, generation int) []*metapb.Member {
	var members []*metapb.Member
	for _, text := range a.list(key) {
		parts := strings.Split(text+":::", ":")
		m := &metapb.Member{DiskId: id(parts[0]), AdmittedGeneration: uint64(generation)}
		m.State = metapb.Member_State(metapb.Member_State_value[strings.ToUpper(parts[1])])
		if i := strings.Split(parts[2], "/"); len(i) == 3 {
			m.Incarnation = &metapb.Incarnation{Boot: id(i[0]), Process: id(i[1]), Instance: id(i[2])}
		}
		if parts[3] != "" {
			m.AdmittedGeneration, _ = strconv.ParseUint(parts[3], 10, 64)
		}
		members = append(members, m)
	}
	return members
}

// disks are written d1:capacity[:STATE[:available]].
func (a args) disks() []*metapb.Disk {
	var disks []*metapb.Disk
	for _, text := range a.list("disks") {
		parts := strings.Split(text+":::", ":")
		d := &metapb.Disk{Id: id(parts[0]), Path: "/" + parts[0], Capacity: parseSize(a.t, parts[1]), State: metapb.Disk_ONLINE, IoMode: "direct",
			Incarnation: &metapb.Incarnation{Boot: id("b1"), Process: id(a.str("process", "p1")), Instance: id("i1")}}
		if parts[2] != "" {
			d.State = metapb.Disk_State(metapb.Disk_State_value[parts[2]])
		}
		if d.Available = d.Capacity; parts[3] != "" {
			d.Available = parseSize(a.t, parts[3])
		}
		if d.State == metapb.Disk_FAILED {
			d.Problem = "it broke"
		}
		disks = append(disks, d)
	}
	return disks
}

func (a args) policy() *metapb.Policy {
	enum := func(key, otherwise string, values map[string]int32) int32 {
		return values[strings.ToUpper(a.str(key, otherwise))]
	}
	return &metapb.Policy{
		Replicas:   uint32(a.num("replicas", 1)),
		Spread:     metapb.Policy_Spread(enum("spread", "rack", metapb.Policy_Spread_value)),
		Access:     metapb.Policy_Access(enum("access", "cluster", metapb.Policy_Access_value)),
		Durability: metapb.Policy_Durability(enum("durability", "flush", metapb.Policy_Durability_value)),
		OnFull:     metapb.Policy_OnFull(enum("on-full", "wait", metapb.Policy_OnFull_value)),
		BlockSize:  uint32(a.num("block-size", 4096)),
		FsType:     a.str("fs", ""),
	}
}
