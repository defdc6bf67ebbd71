package primary

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

var rewrite = flag.Bool("rewrite", false, "write the scripts' output into testdata; look at the diff")

// TestScripts runs testdata/*.txt against a core. A line is a verb with its
// arguments; the indented lines below it are what came out. The verbs are in
// script.verb.
//
// Calls to disks and to the metadata service are answered at once unless their
// kind is on hold ("hold sync"); requests that were started wait for "finish".
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if got == string(want) {
				return
			}
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			w, g := strings.Split(string(want), "\n"), strings.Split(got, "\n")
			for i := range min(len(w), len(g)) {
				if w[i] != g[i] {
					t.Fatalf("%s:%d:\nwant %s\ngot  %s\n(go test ./server/primary -run TestScripts -rewrite)", file, i+1, w[i], g[i])
				}
			}
			t.Fatalf("%s: %d lines wanted, %d came", file, len(w), len(g))
		})
	}
}

func runScript(t *testing.T, text string) string {
	s := &script{
		t: t, conns: map[string]*Conn{}, reqs: map[string]*block.Request{}, ops: map[*block.Request]*Op{},
		held: map[string]bool{}, names: map[*block.Request]string{}, fails: map[string][]string{},
	}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "\t") {
			continue
		}
		s.out.WriteString(line + "\n")
		if f := strings.Fields(line); len(f) > 0 && f[0] != "#" {
			s.verb(f[0], f[1:])
		}
	}
	return s.out.String()
}

type script struct {
	t     *testing.T
	out   strings.Builder
	core  *Core
	meta  *memMetadata
	disks memDisks
	now   time.Duration

	conns map[string]*Conn
	reqs  map[string]*block.Request
	names map[*block.Request]string
	ops   map[*block.Request]*Op // running
	held  map[string]bool
	wait  []Action // on hold
	fails map[string][]string
}

const (
	scriptExtent = 1 << 20
	scriptRun    = block.ExtentsPerRun * scriptExtent
)

func (s *script) printf(format string, args ...any) {
	s.out.WriteString("\t" + fmt.Sprintf(format, args...) + "\n")
}

// option finds key=value or a bare key among the arguments.
func option(args []string, key string) (string, bool) {
	for _, a := range args {
		if k, v, _ := strings.Cut(a, "="); k == key {
			return v, true
		}
	}
	return "", false
}

func number(args []string, key string, otherwise int64) int64 {
	v, ok := option(args, key)
	if !ok {
		return otherwise
	}
	unit := int64(1)
	for suffix, u := range map[string]int64{"k": 1 << 10, "M": 1 << 20, "run": scriptRun} {
		if t, ok := strings.CutSuffix(v, suffix); ok {
			v, unit = t, u
		}
	}
	n, err := strconv.ParseFloat(v, 64)
	if err != nil {
		panic(err)
	}
	return int64(n * float64(unit))
}

func has(args []string, key string) bool { _, ok := option(args, key); return ok }

// scriptErrors are the errors that scripts name.
var scriptErrors = map[string]error{
	"io": block.ErrIO, "corrupt": block.ErrCorrupt, "nospace": block.ErrNoSpace, "stale": block.ErrStale, "unknown": block.ErrUnknown,
	"unavailable": block.ErrUnavailable, "invalid": block.ErrInvalid, "notfound": block.ErrNotFound, "permission": block.ErrPermission,
	"cachelost": block.ErrCacheLost, "inuse": block.ErrInUse, "shutdown": block.ErrShutdown, "readonly": block.ErrReadOnly,
}

func errorName(err error) string {
	if err == nil {
		return "ok"
	}
	var names []string
	for n, e := range scriptErrors {
		if errors.Is(err, e) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return strings.Join(names, "+")
}

func diskID(name string) block.DiskID { return block.DiskID{UUID: id(name[0])} }

func diskName(d block.DiskID) string { return string(d.UUID[:1]) }

// verb does one line of a script.
func (s *script) verb(verb string, args []string) {
	switch verb {
	case "volume": // [write-through] [on-full=error] [runs=0:A,2:A] [disks=A,B]: the state of the metadata
		s.volume(args)
		return
	case "disk": // A [boot=N] [process=N] [instance=N] [unflushed[=false]] [lost=N] [away[=false]]
		s.disk(args[0], args[1:])
		return
	case "place": // A,B: where births go
		disks := strings.Split(args[0], ",")
		s.meta.place = func(r block.RunIndex) []block.DiskID { return []block.DiskID{diskID(disks[int(r)%len(disks)])} }
		return
	case "fail": // call error...: what the next calls of this kind are answered without being done; "lose": done, but
		s.fails[args[0]] = append(s.fails[args[0]], args[1:]...)
		return
	case "hold":
		for _, a := range args {
			s.held[a] = true
		}
		return
	case "grant":
		m, err := s.meta.Grant(context.Background(), s.meta.m.Volume.ID)
		if err != nil {
			s.t.Fatal(err)
		}
		s.core = NewCore(block.Geometry{ExtentSize: scriptExtent}, m)
	case "usurp": // somebody else gets the grant
		if _, err := s.meta.Grant(context.Background(), s.meta.m.Volume.ID); err != nil {
			s.t.Fatal(err)
		}
		return
	case "go": // [kind]: answers what was on hold
		s.letGo(args)
	case "connect": // name [attachment=1] [epoch=1] [session=0]
		cn := &Conn{Attachment: block.AttachmentID{UUID: id(byte(number(args, "attachment", 1)))},
			Epoch: block.CacheEpoch(number(args, "epoch", 1)), Number: block.SessionNumber(number(args, "session", 0)), Tag: args[0]}
		s.conns[args[0]] = cn
		s.core.Connect(cn)
	case "disconnect":
		s.core.Disconnect(s.conns[args[0]])
	case "write", "read", "trim", "zero", "flush": // conn request [at=0] [len=4k] [fua] [nohole]
		s.submit(verb, args)
	case "finish": // request [part=N] [error]
		s.finish(args)
	case "attach", "detach": // attachment
		s.attach(verb, byte(number(args, "id", 1)))
	case "resize":
		s.meta.edit(func(m *Map) { m.Volume.WantedSize = number(args, "to", 0) })
	case "touch": // an administrator's command that changes nothing of interest
		s.meta.edit(func(*Map) {})
		return
	case "delete":
		s.meta.deleted = true
	case "changed":
		s.core.Changed()
	case "tick": // [30s]
		d, err := time.ParseDuration(args[0])
		if err != nil {
			s.t.Fatal(err)
		}
		s.now += d
		s.core.Tick(s.now)
	case "space":
		s.core.SpaceChanged()
	case "back": // A: the disk is there again
		s.core.DiskChanged(diskID(args[0]))
	case "stop":
		s.core.Stop()
	case "status":
		st := s.core.Status()
		s.printf("sessions %d, in flight %d, queued %d, blocked %d, births %d, space %d, syncing %d, epoch %d, size %dM",
			st.Sessions, st.InFlight, st.Queued, st.Blocked, st.Births, st.Space, st.Syncing, st.CacheEpoch, st.Size>>20)
		if st.Problem != "" {
			s.printf("%s %s", st.Problem, st.Remedy)
		}
		return
	default:
		s.t.Fatalf("no such verb: %s", verb)
	}
	s.settle()
}

func (s *script) volume(args []string) {
	s.meta, s.disks = &memMetadata{}, memDisks{}
	s.meta.fail = func(call string) error { return s.next("fail " + call) }
	s.meta.lose = func(call string) error { return s.next("lose " + call) }
	onFull, _ := option(args, "on-full")
	size := number(args, "size", 4*scriptRun)
	s.meta.m = Map{Volume: VolumeInfo{
		ID: block.VolumeID{UUID: id(0xee)}, Name: "v", Size: size, WantedSize: size, WriteThrough: has(args, "write-through"),
		WaitWhenFull: onFull != "error", BlockSize: 4096, Replicas: 1, Version: 1, CacheEpoch: 1,
	}}
	s.attachment(1)
	list, _ := option(args, "disks")
	for _, d := range strings.Split(list, ",") {
		if d != "" {
			m := newMember(diskID(d), block.Geometry{ExtentSize: scriptExtent}, 0)
			s.disks.members = append(s.disks.members, m)
		}
	}
	runs, _ := option(args, "runs")
	for _, r := range strings.Split(runs, ",") {
		if r == "" {
			continue
		}
		index, disk, _ := strings.Cut(r, ":")
		n, _ := strconv.Atoi(index)
		d := diskID(disk)
		s.meta.m.Runs = append(s.meta.m.Runs, Run{Index: block.RunIndex(n), Disks: []block.DiskID{d}})
		if !slices.ContainsFunc(s.meta.m.Members, func(m Membership) bool { return m.Disk == d }) {
			s.meta.m.Members = append(s.meta.m.Members, Membership{Disk: d, In: true, Incarnation: s.member(disk).incarnation})
		}
	}
	s.meta.place = func(block.RunIndex) []block.DiskID { return []block.DiskID{diskID("A")} }
}

func (s *script) attachment(n byte) {
	s.meta.m.Attachments = append(s.meta.m.Attachments,
		Attachment{ID: block.AttachmentID{UUID: id(n)}, Node: fmt.Sprintf("c%d", n), TokenDigest: sha256.Sum256([]byte{n})})
}

func (s *script) member(name string) *memMember {
	for _, m := range s.disks.members {
		if m.disk == diskID(name) {
			return m
		}
	}
	s.t.Fatalf("no disk %s", name)
	return nil
}

func (s *script) disk(name string, args []string) {
	m := s.member(name)
	if has(args, "boot") {
		m.incarnation.Boot = id(byte(number(args, "boot", 0)))
	}
	if has(args, "process") {
		m.incarnation.Process = id(byte(number(args, "process", 0)))
	}
	if has(args, "instance") {
		m.incarnation.Instance = id(byte(number(args, "instance", 0)))
	}
	if v, ok := option(args, "unflushed"); ok {
		m.unflushed = v != "false"
	}
	if has(args, "lost") {
		m.lost = []block.ExtentIndex{block.ExtentIndex(number(args, "lost", 0))}
	}
	if v, ok := option(args, "away"); ok {
		m.available = v == "false"
	}
}

// next is the next planned failure of a call, nil if there is none.
func (s *script) next(call string) error {
	kind, name, _ := strings.Cut(call, " ")
	list := s.fails[name]
	if len(list) == 0 {
		return nil
	}
	lose := strings.HasPrefix(list[0], "lost-")
	if lose != (kind == "lose") {
		return nil
	}
	s.fails[name] = list[1:]
	return scriptErrors[strings.TrimPrefix(list[0], "lost-")]
}

func (s *script) attach(verb string, n byte) {
	s.meta.edit(func(m *Map) {
		if verb == "attach" {
			s.attachment(n)
			return
		}
		for i := range m.Attachments {
			if m.Attachments[i].ID.UUID == id(n) {
				m.Attachments[i].Revoking = true
			}
		}
	})
}

func (s *script) submit(verb string, args []string) {
	cn, name := s.conns[args[0]], args[1]
	op := map[string]block.Op{"write": block.OpWrite, "read": block.OpRead, "trim": block.OpTrim, "zero": block.OpZero, "flush": block.OpFlush}[verb]
	r := &block.Request{Op: op, Offset: number(args, "at", 0), Length: number(args, "len", 4096), FUA: has(args, "fua"), NoHole: has(args, "nohole")}
	switch op {
	case block.OpFlush:
		r.Length = 0
	case block.OpWrite:
		r.Data = make([]byte, r.Length)
	}
	s.reqs[name], s.names[r] = r, name
	s.core.Submit(cn, r)
}

func (s *script) finish(args []string) {
	op := s.ops[s.reqs[args[0]]]
	if op == nil {
		s.t.Fatalf("%s is not running", args[0])
	}
	var err error
	for _, a := range args[1:] {
		if e, ok := scriptErrors[a]; ok {
			err = e
		}
	}
	n := len(op.IOs)
	one := int(number(args, "part", -1))
	for i := range n {
		if one < 0 || i == one {
			op.IOs[i].Err = err
			s.core.Finished(&op.IOs[i])
		}
	}
}

// settle lets the core go on, answering everything that is not on hold.
func (s *script) settle() {
	for {
		var o Output
		s.core.Take(&o)
		if len(o.Start)+len(o.Done)+len(o.Actions) == 0 {
			return
		}
		for _, a := range o.Actions {
			s.action(a)
		}
		for _, op := range o.Start {
			s.ops[op.Req] = op
			s.printf("start %s%s", s.names[op.Req], describeIOs(op))
		}
		for _, r := range o.Done {
			delete(s.ops, r)
			s.printf("reply %s %s", s.names[r], errorName(r.Err))
		}
	}
}

func describeIOs(op *Op) string {
	var b strings.Builder
	for _, io := range op.IOs {
		if io.Copy == nil {
			fmt.Fprintf(&b, " zeros[%dk+%dk]", io.Offset>>10, io.Length>>10)
			continue
		}
		fmt.Fprintf(&b, " %s[%dk+%dk]", diskName(io.Copy.Disk), io.Offset>>10, io.Length>>10)
		if io.Sequence > 0 {
			fmt.Fprintf(&b, "#%d", io.Sequence)
		}
	}
	return b.String()
}

// kind is an action's name for hold and go.
func kind(a Action) string {
	switch a := a.(type) {
	case SealCopy:
		return "seal"
	case SyncCopy:
		return "sync"
	case BirthRuns:
		return "birth"
	case GrowCopy:
		return "grow"
	case ClearMarks:
		return "clear"
	case Place:
		return "place"
	case Send:
		return strings.TrimPrefix(fmt.Sprintf("%T", a.Command), "primary.")
	case ReadMap:
		return "read"
	}
	return ""
}

func (s *script) action(a Action) {
	if k := kind(a); k != "" && s.held[k] {
		s.printf("hold %s", k)
		s.wait = append(s.wait, a)
		return
	}
	s.answer(a)
}

func (s *script) letGo(kinds []string) {
	waiting := s.wait
	s.wait = nil
	for _, a := range waiting {
		if slices.Contains(kinds, kind(a)) {
			s.answer(a)
		} else {
			s.wait = append(s.wait, a)
		}
	}
	for _, k := range kinds {
		delete(s.held, k)
	}
}

// answer makes the call of an action.
func (s *script) answer(a Action) {
	ctx, c := context.Background(), s.core
	switch a := a.(type) {
	case SealCopy:
		m, err := s.disks.Member(ctx, a.Volume, a.Copy.Disk)
		var sealed Sealed
		if err == nil {
			if err = s.next("fail seal"); err == nil {
				sealed, err = m.Seal(ctx, c.Generation(), a.Size, a.Born)
			}
		}
		s.printf("seal %s born %v: %s", diskName(a.Copy.Disk), a.Born, errorName(err))
		c.Sealed(a.Copy, m, sealed, err)
	case SyncCopy:
		err := s.next("fail sync")
		s.printf("sync %s: %s", diskName(a.Copy.Disk), errorName(err))
		c.Synced(a.Copy, err)
	case BirthRuns:
		err := s.next("fail birth")
		s.printf("birth %s %v: %s", diskName(a.Copy.Disk), a.Runs, errorName(err))
		c.Born(a.Copy, err)
	case GrowCopy:
		err := s.next("fail grow")
		s.printf("grow %s to %dM: %s", diskName(a.Copy.Disk), a.Size>>20, errorName(err))
		c.Grown(a.Copy, err)
	case ClearMarks:
		s.printf("clear %s up to %d", diskName(a.Copy.Disk), a.Upto)
		c.Cleared(a.Copy, nil)
	case Place:
		runs, err := s.meta.PlaceRuns(ctx, s.meta.m.Volume.ID, c.Generation(), a.Runs)
		s.printf("place %v: %s", a.Runs, errorName(err))
		c.Placed(runs, err)
	case Send:
		v, err := s.meta.Propose(ctx, a.Fence, a.Command)
		s.printf("send %s at %d: %s", describeCommand(a.Command), a.Fence.Version, errorName(err))
		c.Proposed(v, err)
	case ReadMap:
		m, err := s.meta.ReadMap(ctx, s.meta.m.Volume.ID)
		s.printf("read map: version %d %s", m.Volume.Version, errorName(err))
		c.MapRead(m, err)
	case Answer:
		s.printf("answer %s: %s", a.Conn.Tag, errorName(a.Err))
	case CloseConn:
		s.printf("close %s: %s", a.Conn.Tag, errorName(a.Reason))
	case Report:
		s.printf("event %s", a.Event.Type)
	case Retire:
		s.printf("retire: %s", errorName(a.Reason))
	}
}

func describeCommand(c Command) string {
	switch c := c.(type) {
	case Takeover:
		var b strings.Builder
		for _, m := range c.Members {
			fmt.Fprintf(&b, " %s@%d", diskName(m.Disk), m.Admitted)
		}
		if c.RaiseCacheEpoch {
			b.WriteString(" raise")
		}
		return "takeover" + b.String()
	case CommitRuns:
		var b strings.Builder
		for _, r := range c.Runs {
			fmt.Fprintf(&b, " %d:%s", r.Index, diskName(r.Disks[0]))
		}
		for _, m := range c.Members {
			fmt.Fprintf(&b, " new %s", diskName(m.Disk))
		}
		return "commit" + b.String()
	case ConfirmSize:
		return fmt.Sprintf("confirm %dM", c.Size>>20)
	case ConfirmDetach:
		return fmt.Sprintf("confirm detach %d", c.Attachment.UUID[0])
	}
	return "?"
}
