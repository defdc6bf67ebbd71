package metadata

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// TestScripts runs testdata/*.txt, one file per verb. Rewrite the answers with
//
//	go test ./raft/metadata -run TestScripts -rewrite
//
// Ids are written v1, d2, a3, c1. Every command is applied to a state that is
// checked after it; a fence defaults to the volume's generation and version.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if filepath.Ext(path) != ".txt" {
			t.Skip("not a script")
		}
		s := &script{newChecked(t)}
		datadriven.RunTest(t, path, s.run)
	})
}

type script struct {
	*checked
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	a := args{t, d}
	switch d.Cmd {
	case "show":
		return named(s.show(a.id(0)))
	case "list":
		var b strings.Builder
		after := Position{Name: a.str("after", "")}
		for _, v := range s.View().Volumes(after, a.num("limit", 0)) {
			fmt.Fprintf(&b, "%q %s\n", v.Name, v.Id)
		}
		return named(b.String())
	case "consumers":
		return s.showConsumers()
	case "nodes":
		return named(s.showNodes())
	case "capacity":
		c := s.View().Capacity(a.str("rack", ""), a.num("replicas", 1))
		if a.flag("of-racks") {
			c = s.View().CapacityOfRacks(a.num("replicas", 1))
		}
		return fmt.Sprintf("available %s, maximum %s\n", size(c.Available), size(c.MaximumVolumeSize))
	case "history":
		events, ok := s.View().Events(uint64(a.num("after", 0)))
		return named(fmt.Sprintf("complete %t\n%s", ok, showEvents(events)))
	case "snapshot":
		return s.snapshot()
	}
	return named(s.answer(s.apply(s.command(d.Cmd, a))))
}

// snapshot goes on with a decoded copy of the state.
func (s *script) snapshot() string {
	before := Hash(s.View())
	var b bytes.Buffer
	if err := Encode(&b, s.View()); err != nil {
		s.t.Fatalf("%v", err)
	}
	v, err := Decode(&b)
	if err != nil {
		s.t.Fatalf("%v", err)
	}
	s.Restore(v)
	return fmt.Sprintf("same %t\n", Hash(s.View()) == before)
}

func (s *script) answer(r Result) string {
	var b strings.Builder
	if r.Err != nil {
		fmt.Fprintf(&b, "refused: %v\n", r.Err)
	}
	switch v := r.Value.(type) {
	case *metapb.Volume:
		fmt.Fprintf(&b, "ok, %s\n", showVolume(v))
	case *metapb.Attachment:
		fmt.Fprintf(&b, "ok, %s\n", showAttachment(v))
	case *metapb.Grant:
		fmt.Fprintf(&b, "ok, generation %d\n", v.Generation)
	case nil:
		if r.Err == nil {
			b.WriteString("ok\n")
		}
	}
	return b.String() + showEvents(r.Events)
}

func (s *script) show(id string) string {
	v, err := parseVolume(id)
	if err != nil {
		return err.Error() + "\n"
	}
	vol := s.View().Volume(v)
	if vol == nil {
		at, deleted := s.View().Tombstone(v)
		return fmt.Sprintf("no volume, deleted %t at %d\n", deleted, at)
	}
	var b strings.Builder
	p := vol.Policy
	fmt.Fprintf(&b, "%q %s\n", vol.Name, showVolume(vol))
	if vol.Rack != "" || vol.Format != metapb.Volume_NONE {
		fmt.Fprintf(&b, "rack %q, format %s\n", vol.Rack, vol.Format)
	}
	fmt.Fprintf(&b, "policy %d %s %s %s %s %d\n", p.Replicas, p.Spread, p.Access, p.Durability, p.OnFull, p.BlockSize)
	if g := s.View().Grant(v); g != nil {
		fmt.Fprintf(&b, "grant %d to %s of %s, opened %t\n", g.Generation, g.Node, g.Process, g.Opened)
	}
	for _, m := range s.View().Members(v) {
		i := m.Incarnation
		fmt.Fprintf(&b, "member %s %s, admitted in %d as %s/%s/%s\n", m.DiskId, m.State, m.AdmittedGeneration, i.GetBoot(), i.GetProcess(), i.GetInstance())
	}
	for run := range s.View().Runs(v) {
		fmt.Fprintf(&b, "run %d on %s\n", run.Index, strings.Join(run.Disks, " "))
	}
	if n := s.View().BornExtents(v); n > 0 {
		fmt.Fprintf(&b, "%d extents born\n", n)
	}
	for _, a := range s.View().Attachments(v) {
		fmt.Fprintf(&b, "attached %s\n", showAttachment(a))
	}
	return b.String()
}

func (s *script) showNodes() string {
	var b strings.Builder
	for _, n := range s.View().Nodes() {
		fmt.Fprintf(&b, "node %s in rack %q, process %s, level %d\n", n.Name, n.Rack, n.Process, n.FeatureLevel)
	}
	for _, d := range s.View().Disks() {
		fmt.Fprintf(&b, "disk %s at %s:%s %s, %s of %s, problem %q\n", d.Id, d.Node, d.Path, d.State, size(d.Available), size(d.Capacity), d.Problem)
	}
	return b.String()
}

func (s *script) showConsumers() string {
	var b strings.Builder
	for _, c := range s.View().Consumers() {
		fmt.Fprintf(&b, "%s in rack %q takes %d, has %d, registered at %d\n", c.Name, c.Rack, maxVolumes(c), s.View().Load(c.Name), c.RegisteredAt)
	}
	return b.String()
}

func showVolume(v *metapb.Volume) string {
	return fmt.Sprintf("%s size %s wanted %s version %d epoch %d", v.Id, size(v.Size), size(v.WantedSize), v.Version, v.CacheEpoch)
}

func showAttachment(a *metapb.Attachment) string {
	text := fmt.Sprintf("%s to %s, read-only %t, revoking %t", a.Id, a.Node, a.ReadOnly, a.Revoking)
	if a.Foreign {
		text += ", foreign"
	}
	if a.Alone {
		text += ", alone"
	}
	return text
}

func showEvents(events []*metapb.Event) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "event %d.%d %s: %s\n", e.Index, e.Ordinal, e.Type, e.Message)
	}
	return b.String()
}

// checked is a State whose every step is checked.
type checked struct {
	*State
	t    failer
	next uint64
}

// failer is what tests and properties have in common.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

func newChecked(t failer) *checked { return &checked{State: New(), t: t} }

func (s *checked) apply(c *metapb.Command) Result {
	s.t.Helper()
	s.next++
	before := s.View()
	hash := Hash(before)
	tried := before.Try(c)
	r := s.Apply(s.next, c)
	if fmt.Sprint(tried.Err, len(tried.Events)) != fmt.Sprint(r.Err, len(r.Events)) {
		s.t.Fatalf("%v was tried with %v and applied with %v", c, tried.Err, r.Err)
	}
	after := s.View()
	if err := errors.Join(Check(after), CheckTransition(before, after)); err != nil {
		s.t.Fatalf("after %v: %v", c, err)
	}
	if Hash(before) != hash {
		s.t.Fatalf("%v modified the view from before it", c)
	}
	unchanged := *after
	unchanged.index = before.index
	if changed := Hash(&unchanged) != hash; changed != r.Changed || tried.Changed != changed {
		s.t.Fatalf("%v changed something: %t, and says %t, %t", c, changed, tried.Changed, r.Changed)
	}
	if r.Err != nil {
		if r.Changed || len(r.Events) != 0 || r.Value != nil {
			s.t.Fatalf("%v was refused (%v) and changed something", c, r.Err)
		}
		if errors.Is(r.Err, ErrNewer) != (after == before) {
			s.t.Fatalf("%v: halting and not applying do not agree: %v", c, r.Err)
		}
	}
	return r
}

var uuidText = regexp.MustCompile(`000000([0-9a-f]{2})-0000-4000-8000-0*([0-9]+)`)

// named puts the script's short names for ids.
func named(s string) string {
	return uuidText.ReplaceAllStringFunc(s, func(m string) string {
		parts := uuidText.FindStringSubmatch(m)
		letter, _ := strconv.ParseUint(parts[1], 16, 8)
		return string(rune(letter)) + parts[2]
	})
}

// id is the UUID of a short name like v1; anything else is taken as it stands.
func id(name string) string {
	if len(name) < 2 || strings.Trim(name[1:], "0123456789") != "" {
		return name
	}
	n, _ := strconv.Atoi(name[1:])
	return fmt.Sprintf("%08x-0000-4000-8000-%012d", name[0], n)
}

func volumeID(name string) block.VolumeID {
	v, err := parseVolume(id(name))
	if err != nil {
		panic(err)
	}
	return v
}

func size(n int64) string {
	for _, u := range units {
		if n != 0 && n%u.bytes == 0 {
			return fmt.Sprintf("%d%s", n/u.bytes, u.name)
		}
	}
	return strconv.FormatInt(n, 10)
}

var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

func parseSize(t testing.TB, s string) int64 {
	scale := int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(s, u.name); ok {
			s, scale = rest, u.bytes
		}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatalf("size %q: %v", s, err)
	}
	return n * scale
}
