package metadata

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

var seed = flag.Uint64("seed", 1, "of the random logs; printed when one fails")

// H43, H66, H74 and H92 as far as the state machine goes are scripts: see
// takeover.txt, commit.txt, attach.txt and delete.txt. The tests here need more than a script.

// prepared is a state with a node, a disk and, for each name, a volume v1, v2, ...
func prepared(t failer, names ...string) *checked {
	s := newChecked(t)
	s.must(&metapb.Command{Kind: &metapb.Command_InitCluster{InitCluster: &metapb.InitCluster{
		ClusterId: id("c1"), ExtentSize: block.DefaultExtentSize, DefaultReplicas: 1}}})
	s.must(&metapb.Command{Kind: &metapb.Command_PutNode{PutNode: &metapb.PutNode{
		Node:  &metapb.Node{Name: "n1", Rack: "r1", Process: "p1", FeatureLevel: 1},
		Disks: []*metapb.Disk{{Id: id("d1"), Capacity: 10 << 40, Available: 10 << 40, State: metapb.Disk_ONLINE}}}}})
	for i, name := range names {
		s.must(create(fmt.Sprint("v", i+1), name, 1<<30))
	}
	return s
}

func (s *checked) must(c *metapb.Command) Result {
	s.t.Helper()
	r := s.apply(c)
	if r.Err != nil {
		s.t.Fatalf("%v: %v", c, r.Err)
	}
	return r
}

func create(short, name string, size int64) *metapb.Command {
	return &metapb.Command{Level: 1, Kind: &metapb.Command_CreateVolume{CreateVolume: &metapb.CreateVolume{Id: id(short), Name: name, Size: size,
		Policy: &metapb.Policy{Replicas: 1, Spread: metapb.Policy_RACK, Access: metapb.Policy_CLUSTER,
			Durability: metapb.Policy_FLUSH, OnFull: metapb.Policy_WAIT, BlockSize: 4096}}}}
}

func remove(short string) *metapb.Command {
	return &metapb.Command{Kind: &metapb.Command_DeleteVolume{DeleteVolume: &metapb.DeleteVolume{Id: id(short)}}}
}

func fenced(v *View, short string, f *metapb.FencedCommand) *metapb.Command {
	key := volumeID(short)
	f.Fence = &metapb.Fence{VolumeId: key.String(), Generation: v.Grant(key).GetGeneration(), Version: v.Volume(key).GetVersion()}
	return &metapb.Command{Kind: &metapb.Command_Fenced{Fenced: f}}
}

// open grants a volume to n1 and takes it over with d1.
func (s *checked) open(short string) {
	s.t.Helper()
	s.must(&metapb.Command{Kind: &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{VolumeId: id(short), Node: "n1", Process: "p1"}}})
	s.must(fenced(s.View(), short, &metapb.FencedCommand{Kind: &metapb.FencedCommand_Takeover{Takeover: &metapb.Takeover{
		Members: []*metapb.Member{{DiskId: id("d1"), State: metapb.Member_IN, AdmittedGeneration: s.View().Grant(volumeID(short)).Generation,
			Incarnation: &metapb.Incarnation{Boot: id("b1"), Process: id("p1"), Instance: id("i1")}}}}}}))
}

func birth(v *View, short string, from, count int) *metapb.Command {
	c := &metapb.CommitRuns{}
	for i := range count {
		c.Runs = append(c.Runs, &metapb.Run{Index: uint32(from + i), Disks: []string{id("d1")}})
	}
	return fenced(v, short, &metapb.FencedCommand{Kind: &metapb.FencedCommand_CommitRuns{CommitRuns: c}})
}

// TestB126StateDependsOnTheLogOnly replays one log of 10,000 entries on three
// machines: as it is, from its bytes, and with half of it through a snapshot.
func TestB126StateDependsOnTheLogOnly(t *testing.T) {
	const entries = 10_000
	g := &generator{source: rand.New(rand.NewPCG(*seed, 126))}
	first := New()
	var log [][]byte
	refused := 0
	for i := range uint64(entries) {
		c := g.command(first.View())
		raw, err := proto.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		log = append(log, raw)
		if first.Apply(2*i+1, c).Err != nil {
			refused++
		}
	}
	if refused < entries/20 || refused > entries*4/5 {
		t.Errorf("%d of %d commands were refused: the log says little", refused, entries)
	}
	second, third := New(), New()
	for i, raw := range log {
		if i == entries/2 {
			third = throughSnapshot(t, third)
		}
		for _, s := range []*State{second, third} {
			c := &metapb.Command{}
			if err := proto.Unmarshal(raw, c); err != nil {
				t.Fatal(err)
			}
			s.Apply(uint64(2*i+1), c)
		}
	}
	for name, s := range map[string]*State{"first": first, "second": second, "third": third, "written again": throughSnapshot(t, third)} {
		if Hash(s.View()) != Hash(first.View()) {
			t.Errorf("%s differs; again with: go test ./raft/metadata -run B126 -seed %d", name, *seed)
		}
		if err := Check(s.View()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := first.View().VolumeCount(); n == 0 {
		t.Error("no volume is left")
	}
}

func throughSnapshot(t *testing.T, s *State) *State {
	t.Helper()
	var b bytes.Buffer
	if err := Encode(&b, s.View()); err != nil {
		t.Fatal(err)
	}
	v, err := Decode(&b)
	if err != nil {
		t.Fatal(err)
	}
	restored := New()
	restored.Restore(v)
	return restored
}

// TestH81NewerCommandOlderVoter (and B127): whatever this binary does not
// know stops it before it applied anything.
func TestH81NewerCommandOlderVoter(t *testing.T) {
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 250, protowire.VarintType), 1)
	withUnknown := func(c *metapb.Command, in proto.Message) *metapb.Command {
		in.ProtoReflect().SetUnknown(unknown)
		return c
	}
	plain := func() *metapb.Command { return create("v1", "alpha", 1<<30) }
	higher, entry250, policy, enum, nested := plain(), &metapb.Command{}, plain(), plain(), birth(New().View(), "v1", 0, 2)
	higher.Level = Level + 1
	if err := proto.Unmarshal(protowire.AppendBytes(protowire.AppendTag(nil, 250, protowire.BytesType), []byte("new")), entry250); err != nil {
		t.Fatal(err)
	}
	enum.GetCreateVolume().Policy.Spread = 77
	top, inside := plain(), plain()
	for name, c := range map[string]*metapb.Command{
		"higher level":              higher,
		"entry type 250":            entry250,
		"no kind":                   {Level: 1},
		"no kind of fenced command": {Kind: &metapb.Command_Fenced{Fenced: &metapb.FencedCommand{}}},
		"extra field at the top":    withUnknown(top, top),
		"extra field in the kind":   withUnknown(inside, inside.GetCreateVolume()),
		"extra field in an object":  withUnknown(policy, policy.GetCreateVolume().Policy),
		"extra field in a list":     withUnknown(nested, nested.GetFenced().GetCommitRuns().Runs[1]),
		"unknown enum value":        enum,
		"nil":                       nil,
	} {
		t.Run(name, func(t *testing.T) {
			s := prepared(t)
			before := s.View()
			r := s.apply(c)
			if !errors.Is(r.Err, ErrNewer) || !errors.Is(r.Err, block.ErrFormat) || s.View() != before {
				t.Fatalf("applied: %+v", r)
			}
			if !errors.Is(Validate(c), ErrNewer) {
				t.Error("a proposer is not warned")
			}
			if !strings.Contains(r.Err.Error(), "upgrade this server") {
				t.Errorf("%q names no remedy", r.Err)
			}
		})
	}
	if err := Validate(plain()); err != nil {
		t.Error(err)
	}
}

// TestCommonLevel is the other half of H81: the level all nodes have announced.
func TestCommonLevel(t *testing.T) {
	s := newChecked(t)
	if got := s.View().CommonLevel(); got != 0 {
		t.Errorf("an empty cell has level %d", got)
	}
	s = prepared(t)
	for i, level := range []uint32{3, 2, 5, 0} {
		s.must(&metapb.Command{Kind: &metapb.Command_PutNode{PutNode: &metapb.PutNode{Node: &metapb.Node{Name: fmt.Sprint("m", i), Rack: "r", FeatureLevel: level}}}})
		if got, want := s.View().CommonLevel(), min(level, 1); got != want || s.View().Level() != 1 {
			t.Errorf("level is %d after %d, want %d", got, level, want)
		}
	}
}

// TestConsumers are refused what no node could be called.
func TestConsumers(t *testing.T) {
	s := prepared(t)
	put := func(c *metapb.Consumer) error {
		return s.apply(&metapb.Command{Level: Level, Kind: &metapb.Command_PutConsumer{PutConsumer: &metapb.PutConsumer{Consumer: c}}}).Err
	}
	for name, c := range map[string]*metapb.Consumer{
		"none": nil, "no name": {Rack: "r"}, "no rack": {Name: "k"}, "a control character": {Name: "k\n", Rack: "r"},
		"a long name": {Name: strings.Repeat("k", 254), Rack: "r"}, "a long rack": {Name: "k", Rack: strings.Repeat("r", 129)},
	} {
		if err := put(c); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s.View().Consumers() != nil || s.View().KnowsRack("far") || !s.View().KnowsRack("r1") {
		t.Error("something was registered")
	}
	if err := put(&metapb.Consumer{Name: "k", Rack: "far"}); err != nil || !s.View().KnowsRack("far") {
		t.Error(err)
	}
	bad := create("v1", "a", 1<<30)
	bad.Level, bad.GetCreateVolume().Rack = Level, "a\x00b"
	if err := s.apply(bad).Err; !errors.Is(err, block.ErrInvalid) {
		t.Errorf("rack: %v", err)
	}
}

// TestH80RefusalIsNotSuccess: the refusal is in the result, and the entry counts as applied.
func TestH80RefusalIsNotSuccess(t *testing.T) {
	s := prepared(t, "alpha")
	r := s.apply(create("v2", "alpha", 2<<30))
	if !errors.Is(r.Err, block.ErrExists) || r.Value != nil || r.Events != nil {
		t.Errorf("%+v", r)
	}
	if s.View().Index() != s.next || s.View().VolumeCount() != 1 {
		t.Errorf("index %d of %d, %d volumes", s.View().Index(), s.next, s.View().VolumeCount())
	}
}

// TestH66BirthNotCommitted: the commit of an older generation lands after the run was placed elsewhere.
func TestH66BirthNotCommitted(t *testing.T) {
	s := prepared(t, "alpha")
	s.must(&metapb.Command{Kind: &metapb.Command_PutDisks{PutDisks: &metapb.PutDisks{Node: "n1", Disks: []*metapb.Disk{
		{Id: id("d2"), Capacity: 1 << 40, Available: 1 << 40, State: metapb.Disk_ONLINE}}}}})
	s.open("v1")
	late := birth(s.View(), "v1", 0, 1)
	s.open("v1")
	elsewhere := birth(s.View(), "v1", 0, 1)
	elsewhere.GetFenced().GetCommitRuns().Runs[0].Disks = []string{id("d2")}
	for _, first := range []bool{true, false} {
		if r := s.apply(proto.CloneOf(late)); !errors.Is(r.Err, block.ErrStale) {
			t.Fatalf("the late commit: %+v", r)
		}
		if first {
			s.must(elsewhere)
		}
	}
	if got := s.View().Run(volumeID("v1"), 0).Disks[0]; got != id("d2") {
		t.Errorf("the run is on %s", named(got))
	}
}

// TestB140FiftyCreatesAtOnce: each is judged against what the ones before left.
func TestB140FiftyCreatesAtOnce(t *testing.T) {
	s := prepared(t)
	const room = (100 << 40) / 10 // ten times 10 TiB of capacity
	volumes := func(from, count int) (done int) {
		for i := range count {
			switch r := s.apply(create(fmt.Sprint("v", from+i), fmt.Sprint("pvc", from+i), room)); {
			case r.Err == nil:
				done++
			case !errors.Is(r.Err, block.ErrNoSpace):
				t.Fatal(r.Err)
			}
		}
		return done
	}
	if got := volumes(1, 50); got != 10 || s.View().VolumeCount() != 10 {
		t.Fatalf("%d of 50 were created, %d are there", got, s.View().VolumeCount())
	}
	for i := range 5 {
		s.must(remove(fmt.Sprint("v", i+1)))
	}
	if got := volumes(100, 50); got != 5 {
		t.Fatalf("after deleting 5, %d more were created", got)
	}
	if s.View().Provisioned() != 100<<40 || s.View().Capacity("", 1).Available != 0 {
		t.Errorf("provisioned %d, capacity %+v", s.View().Provisioned(), s.View().Capacity("", 1))
	}
}

// TestB062Names: bounds, encodings and twins.
func TestB062Names(t *testing.T) {
	long := strings.Repeat("x", 127)
	good := []string{long + "a", long + "b", "😀", "مرحبا", "e\u0301", "\u00e9", "with space", "a/b", "..", "-n", "\u2028", strings.Repeat("é", 64)}
	s := prepared(t, good...)
	for i, name := range good {
		if v := s.View().VolumeByName(name); v.GetId() != id(fmt.Sprint("v", i+1)) {
			t.Errorf("%q is %v", name, v)
		}
	}
	bad := []string{"", long + "ab", "\xff\xfe", "a\u0080", "a\u009f", "\x7f", strings.Repeat("é", 64) + "x"}
	at := func(level uint32, short, name string) error {
		c := create(short, name, 1<<30)
		c.Level = level
		return s.apply(c).Err
	}
	for c := range rune(0x20) {
		if c != '\t' && c != '\n' && c != '\r' {
			bad = append(bad, "a"+string(c))
			continue
		}
		for i, name := range []string{"a" + string(c), string(c), string(c) + long} {
			if err := at(levelConsumers, "v98", name); !errors.Is(err, block.ErrUnavailable) { // H81: servers of before refuse it
				t.Errorf("%q at level %d: %v", name, levelConsumers, err)
			}
			if err := at(Level, fmt.Sprint("v", 100+10*int(c)+i), name); err != nil || s.View().VolumeByName(name) == nil {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
	for _, name := range bad {
		for _, level := range []uint32{levelFirst, Level} {
			if err := at(level, "v99", name); !errors.Is(err, block.ErrInvalid) {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
}

// TestB063Paging: volumes come and go between pages; those that stay are seen once.
func TestB063Paging(t *testing.T) {
	random := rand.New(rand.NewPCG(*seed, 63))
	var names []string
	for i := range 250 {
		names = append(names, fmt.Sprintf("pvc-%06d", random.IntN(1_000_000)*1000+i))
	}
	s := prepared(t)
	apply := func(c *metapb.Command) { // checked at the end only
		s.next++
		if r := s.Apply(s.next, c); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	for i, name := range names {
		apply(create(fmt.Sprint("v", i+1), name, 1<<30))
	}
	seen := map[string]int{}
	var after Position
	for page := 0; page <= len(names); page++ {
		volumes := s.View().Volumes(after, 10)
		if len(volumes) == 0 {
			break
		}
		for _, v := range volumes {
			seen[v.Id]++
			after = Position{v.Name, volumeID(v.Id)}
		}
		// One goes, and the next one takes its name, which was seen already.
		apply(&metapb.Command{Kind: &metapb.Command_DeleteVolume{DeleteVolume: &metapb.DeleteVolume{Id: volumes[0].Id}}})
		apply(create(fmt.Sprint("v", 1000+page), volumes[0].Name, 1<<30))
	}
	if err := Check(s.View()); err != nil {
		t.Fatal(err)
	}
	for i := range names {
		if v := id(fmt.Sprint("v", i+1)); seen[v] != 1 {
			t.Errorf("%s was seen %d times (seed %d)", named(v), seen[v], *seed)
		}
	}
	if all := s.View().Volumes(Position{}, 0); len(all) != 250 {
		t.Errorf("%d volumes in the end", len(all))
	}
	if huge := s.View().Volumes(Position{}, 1<<31-1); len(huge) != 250 {
		t.Errorf("%d volumes on a huge page", len(huge))
	}
}

// TestVolumesBehindATwin: a volume that took the name of the last one seen is behind it if its id is.
func TestVolumesBehindATwin(t *testing.T) {
	s := prepared(t, "a", "b")
	after := Position{"a", volumeID("v1")}
	s.must(remove("v1"))
	s.must(create("v3", "a", 1<<30))
	if got := s.View().Volumes(after, 0); len(got) != 2 || got[0].Id != id("v3") {
		t.Errorf("got %v", got)
	}
}

// TestB055LargestVolume uses nothing until it is written.
func TestB055LargestVolume(t *testing.T) {
	s := prepared(t)
	s.must(create("v1", "huge", block.MaxVolumeSize))
	var b bytes.Buffer
	if err := Encode(&b, s.View()); err != nil || b.Len() > 4096 {
		t.Errorf("a snapshot of it takes %d bytes: %v", b.Len(), err)
	}
	if s.View().BornExtents(volumeID("v1")) != 0 {
		t.Error("something is born")
	}
}

// TestTokensStayInAttachments: not in events, errors or maps.
func TestTokensStayInAttachments(t *testing.T) {
	s := prepared(t, "alpha")
	attach := func(node string) *metapb.Command {
		return &metapb.Command{Kind: &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{Attachment: &metapb.Attachment{
			Id: id("a1"), VolumeId: id("v1"), Node: node, Token: []byte("very-secret-token")}}}}
	}
	r := s.must(attach("k1"))
	if a := r.Value.(*metapb.Attachment); string(a.Token) != "very-secret-token" || len(a.TokenDigest) != 32 {
		t.Errorf("the attachment is %v", a)
	}
	events, _ := s.View().Events(0)
	told := fmt.Sprint(s.View().Map(volumeID("v1")), events, s.apply(attach("k2")).Err)
	if strings.Contains(told, "very-secret-token") {
		t.Errorf("the token is told: %s", told)
	}
	if m := s.View().Map(volumeID("v1")); !bytes.Equal(m.Attachments[0].TokenDigest, r.Value.(*metapb.Attachment).TokenDigest) {
		t.Error("the map has no digest")
	}
}

// TestEventsAreForgottenInOrder: a reader never misses one without being told.
func TestEventsAreForgottenInOrder(t *testing.T) {
	s := prepared(t, "alpha")
	record := &metapb.Command{Kind: &metapb.Command_RecordEvent{RecordEvent: &metapb.RecordEvent{Event: &metapb.Event{Type: "Happened"}}}}
	for range EventsKept + 10 {
		s.next++
		s.Apply(s.next, record)
	}
	if err := Check(s.View()); err != nil {
		t.Fatal(err)
	}
	oldest := s.next - EventsKept + 1
	for after, complete := range map[uint64]bool{0: false, oldest - 2: false, oldest - 1: true, oldest: true, s.next: true} {
		events, ok := s.View().Events(after)
		if ok != complete {
			t.Errorf("after %d: complete %t", after, ok)
		}
		if ok && uint64(len(events)) != s.next-max(after, oldest-1) {
			t.Errorf("after %d: %d events", after, len(events))
		}
	}
	restored := throughSnapshot(t, s.State)
	for after := range s.next + 1 {
		want, wantOK := s.View().Events(after)
		got, ok := restored.View().Events(after)
		if ok != wantOK || len(got) != len(want) {
			t.Fatalf("after %d the restored state has %d events (%t), not %d (%t)", after, len(got), ok, len(want), wantOK)
		}
	}
}

// TestRestoredViewsGoSeparateWays: two machines that start from one View share nothing that grows.
func TestRestoredViewsGoSeparateWays(t *testing.T) {
	s := prepared(t, "alpha")
	put := func(short string) *metapb.Command {
		return &metapb.Command{Kind: &metapb.Command_PutDisks{PutDisks: &metapb.PutDisks{Node: "n1", Disks: []*metapb.Disk{
			{Id: id(short), Capacity: 1, State: metapb.Disk_ONLINE}}}}}
	}
	s.must(put("d2"))
	s.must(put("d3")) // now the arrays have room behind their ends
	one, two := New(), New()
	one.Restore(s.View())
	two.Restore(s.View())
	one.Apply(100, put("d7"))
	two.Apply(100, put("d8"))
	s.next = 99
	s.must(put("d9"))
	for i, v := range []*View{one.View(), two.View(), s.View()} {
		if err := Check(v); err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// TestTryChangesNothing: neither a View nor what grows behind it.
func TestTryChangesNothing(t *testing.T) {
	s := prepared(t, "alpha")
	v := s.View()
	before := Hash(v)
	if r := v.Try(create("v2", "beta", 1<<30)); r.Err != nil || len(r.Events) != 1 {
		t.Fatalf("%+v", r)
	}
	s.must(create("v3", "gamma", 1<<30))
	if r := v.Try(create("v4", "delta", 1<<30)); r.Err != nil {
		t.Fatal(r.Err)
	}
	events, _ := s.View().Events(v.Index())
	if Hash(v) != before || len(events) != 1 || events[0].VolumeName != "gamma" {
		t.Errorf("events are %v", events)
	}
	// B161: what was done already changes nothing, so it needs no entry.
	if r := s.View().Try(create("v5", "alpha", 1<<30)); r.Err != nil || r.Changed || r.Value == nil {
		t.Errorf("%+v", r)
	}
}

// TestApplyPanicsOnABrokenLog: an index that does not rise is nothing to go on from.
func TestApplyPanicsOnABrokenLog(t *testing.T) {
	s := prepared(t)
	defer func() {
		if recover() == nil {
			t.Error("it went on")
		}
	}()
	s.Apply(s.next, remove("v1"))
}
