package metadata

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// busy is a state with something of everything.
func busy(t failer, commands int) *State {
	g := &generator{source: rand.New(rand.NewPCG(*seed, 99))}
	s := New()
	for i := range uint64(commands) {
		s.Apply(i+1, g.command(s.View()))
	}
	if err := Check(s.View()); err != nil {
		t.Fatalf("seed %d: %v", *seed, err)
	}
	return s
}

func encoded(t testing.TB, v *View) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Encode(&b, v); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestSnapshotRoundTrip(t *testing.T) {
	for name, s := range map[string]*State{"empty": New(), "prepared": prepared(t, "a", "b").State, "busy": busy(t, 2000)} {
		t.Run(name, func(t *testing.T) {
			raw := encoded(t, s.View())
			v, err := Decode(iotest.OneByteReader(bytes.NewReader(raw)))
			if err != nil {
				t.Fatal(err)
			}
			if Hash(v) != Hash(s.View()) || describe(v) != describe(s.View()) {
				t.Error("another state came back")
			}
			if !bytes.Equal(encoded(t, v), raw) {
				t.Error("it is written differently the second time")
			}
		})
	}
}

// TestDamagedSnapshots: cut at, and changed in, every byte: an error, never another state.
func TestDamagedSnapshots(t *testing.T) {
	s := busy(t, 60)
	raw := encoded(t, s.View())
	for i := range raw {
		if _, err := Decode(bytes.NewReader(raw[:i])); !errors.Is(err, block.ErrCorrupt) {
			t.Fatalf("cut to %d of %d bytes: %v", i, len(raw), err)
		}
		for _, bit := range []byte{1, 0x80} {
			damaged := bytes.Clone(raw)
			damaged[i] ^= bit
			v, err := Decode(bytes.NewReader(damaged))
			switch {
			case errors.Is(err, block.ErrCorrupt), errors.Is(err, ErrNewer) && i >= 8 && i < headerSize:
			case err == nil && Hash(v) == Hash(s.View()): // a bit of the header or of the frame that says nothing
			default:
				t.Fatalf("bit %#x of byte %d: %v", bit, i, err)
			}
		}
	}
	if _, err := Decode(bytes.NewReader(append(bytes.Clone(raw), 0))); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("with a byte behind: %v", err)
	}
	if _, err := Decode(iotest.ErrReader(errors.New("the disk is gone"))); err == nil {
		t.Error("no state was read from nothing")
	}
}

// TestH81NewerSnapshotOlderVoter (and B127).
func TestH81NewerSnapshotOlderVoter(t *testing.T) {
	raw := encoded(t, prepared(t, "a").View())
	for name, at := range map[string]int{"format": 8, "level": 12} {
		newer := bytes.Clone(raw)
		binary.BigEndian.PutUint32(newer[at:], 250)
		if _, err := Decode(bytes.NewReader(newer)); !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "250") {
			t.Errorf("%s 250: %v", name, err)
		}
	}
}

// TestH81SnapshotsDuringAnUpgrade: as long as no command of the newer level was
// applied, a server that is not upgraded yet can read what the others write.
func TestH81SnapshotsDuringAnUpgrade(t *testing.T) {
	s := prepared(t, "a")
	consumer := &metapb.Command{Level: levelConsumers, Kind: &metapb.Command_PutConsumer{PutConsumer: &metapb.PutConsumer{
		Consumer: &metapb.Consumer{Name: "k1", Rack: "r1"}}}}
	for _, level := range []uint32{levelFirst, levelConsumers} {
		raw := encoded(t, s.View())
		if got := binary.BigEndian.Uint32(raw[12:]); got != level {
			t.Errorf("the snapshot has level %d, want %d", got, level)
		}
		format := metapb.Volume_FORMAT_UNSPECIFIED
		if level > levelFirst {
			format = metapb.Volume_NONE
		}
		if got := atLevel(s.View().VolumeByName("a"), s.View().level).Format; got != format {
			t.Errorf("at level %d the volume is written with format %s", level, got)
		}
		v, err := Decode(bytes.NewReader(raw))
		if err != nil || Hash(v) != Hash(s.View()) || v.level != level || v.VolumeByName("a").Format != metapb.Volume_NONE {
			t.Errorf("read back: %v, %v", v.VolumeByName("a"), err)
		}
		s.must(consumer)
	}
	if s.View().Level() != levelConsumers {
		t.Error("the level sank with a server that came back older")
	}
}

// TestRecordsOfNoState: well-formed, with the right digest, and still no state.
func TestRecordsOfNoState(t *testing.T) {
	head := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Head{Head: &metapb.SnapshotHead{Index: 9, Cluster: &metapb.InitCluster{
		ClusterId: id("c1"), ExtentSize: block.DefaultExtentSize, DefaultReplicas: 1}}}}
	node := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Node{Node: &metapb.Node{Name: "n1", Rack: "r1"}}}
	disk := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Disk{Disk: &metapb.Disk{Id: id("d1"), Node: "n1", State: metapb.Disk_ONLINE}}}
	v := create("v1", "a", 1<<30).GetCreateVolume()
	volume := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Volume{Volume: &metapb.SnapshotVolume{Volume: &metapb.Volume{
		Id: v.Id, Name: v.Name, Size: v.Size, WantedSize: v.Size, Policy: v.Policy, Version: 1, CacheEpoch: 1}}}}
	runs := func(index, disk []uint32) *metapb.SnapshotRecord {
		return &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Runs{Runs: &metapb.SnapshotRuns{Index: index, Disk: disk}}}
	}
	tombstone := func(short string) *metapb.SnapshotRecord {
		return &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Tombstone{Tombstone: &metapb.SnapshotTombstone{VolumeId: id(short), Index: 3}}}
	}
	event := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Event{Event: &metapb.Event{Index: 4, Type: "Happened"}}}
	twin := proto.CloneOf(volume)
	twin.GetVolume().Volume.Id = id("v2")
	consumer := &metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Consumer{Consumer: &metapb.Consumer{Name: "k1", Rack: "r1"}}}
	reader := func(short, node string, readOnly bool) *metapb.Attachment {
		a := &metapb.Attachment{Id: id(short), VolumeId: v.Id, Node: node, ReadOnly: readOnly, Token: make([]byte, 32)}
		digest := sha256.Sum256(a.Token)
		a.TokenDigest = digest[:]
		return a
	}
	attached := func(list ...*metapb.Attachment) *metapb.SnapshotRecord {
		r := proto.CloneOf(volume)
		r.GetVolume().Attachments = list
		return r
	}
	type records = []*metapb.SnapshotRecord
	readers := attached(reader("a1", "k1", true), reader("a2", "k2", true))
	if _, err := Decode(bytes.NewReader(snapshotOf(t, records{head, node, disk, readers, tombstone("v5"), event, consumer}))); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]records{
		"nothing":                   {},
		"no head":                   {node},
		"two heads":                 {head, head},
		"an empty record":           {head, {}},
		"a consumer twice":          {head, consumer, consumer},
		"a consumer too early":      {head, consumer, node},
		"a consumer of no rack":     {head, {Kind: &metapb.SnapshotRecord_Consumer{Consumer: &metapb.Consumer{Name: "k1"}}}},
		"two writers":               {head, node, disk, attached(reader("a1", "k1", false), reader("a2", "k2", false))},
		"a writer beside a reader":  {head, node, disk, attached(reader("a1", "k1", true), reader("a2", "k2", false))},
		"two of one node":           {head, node, disk, attached(reader("a1", "k1", true), reader("a2", "k1", true))},
		"an attachment twice":       {head, node, disk, attached(reader("a1", "k1", true), reader("a1", "k2", true))},
		"a node twice":              {head, node, node},
		"a disk twice":              {head, node, disk, disk},
		"a disk of no node":         {head, disk},
		"a node too late":           {head, node, disk, node},
		"a volume twice":            {head, node, disk, volume, volume},
		"a name twice":              {head, node, disk, volume, twin},
		"runs of no volume":         {head, node, disk, runs([]uint32{0}, []uint32{1})},
		"runs after the volumes":    {head, node, disk, volume, tombstone("v5"), runs([]uint32{0}, []uint32{1})},
		"runs on no member":         {head, node, disk, volume, runs([]uint32{0}, []uint32{1})},
		"runs on no disk":           {head, node, disk, volume, runs([]uint32{0}, []uint32{2})},
		"runs of four":              {head, node, disk, volume, runs([]uint32{0}, []uint32{1, 1, 1, 1})},
		"runs on half a disk":       {head, node, disk, volume, runs([]uint32{0, 1}, []uint32{1})},
		"runs of nothing":           {head, node, disk, volume, runs(nil, nil)},
		"runs out of order":         {head, node, disk, volume, runs([]uint32{1, 1}, []uint32{1, 1})},
		"a tombstone twice":         {head, tombstone("v1"), tombstone("v1")},
		"a tombstone of the living": {head, node, disk, volume, tombstone("v1")},
		"events out of order":       {head, event, event},
		"an id that is none":        {head, node, tombstone("nonsense")},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Decode(bytes.NewReader(snapshotOf(t, r))); !errors.Is(err, block.ErrCorrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestTailOfOtherRecords: the frame is whole, so only the tail can tell.
func TestTailOfOtherRecords(t *testing.T) {
	tailOf := func(v *View) []byte {
		var b bytes.Buffer
		e := &encoder{w: &b, digest: sha256.New()}
		e.state(v)
		records := b.Len()
		e.tail()
		return b.Bytes()[records:]
	}
	recordsOf := func(v *View) []byte {
		var b bytes.Buffer
		(&encoder{w: &b, digest: sha256.New()}).state(v)
		return b.Bytes()
	}
	one, other := prepared(t, "a").View(), prepared(t, "b").View()
	for name, c := range map[string]struct {
		tail []byte
		want error
	}{"its own": {tailOf(one), nil}, "as many others": {tailOf(other), block.ErrCorrupt}, "fewer": {tailOf(New().View()), block.ErrCorrupt}, "none": {nil, block.ErrCorrupt}} {
		if _, err := Decode(bytes.NewReader(framed(t, append(recordsOf(one), c.tail...)))); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("with the tail of %s: %v", name, err)
		}
	}
}

// snapshotOf writes records with a right tail.
func snapshotOf(t testing.TB, records []*metapb.SnapshotRecord) []byte {
	t.Helper()
	var b bytes.Buffer
	e := &encoder{w: &b, digest: sha256.New()}
	for _, r := range records {
		e.put(r)
	}
	e.tail()
	if e.err != nil {
		t.Fatal(e.err)
	}
	return framed(t, b.Bytes())
}

// framed puts record bytes into a header and a zstd frame.
func framed(t testing.TB, records []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	b.WriteString(snapshotMagic)
	b.Write(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, snapshotFormat), Level))
	z, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(1<<16))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := z.Write(records); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestEncodeTellsTheWritersError wherever it strikes.
func TestEncodeTellsTheWritersError(t *testing.T) {
	s := busy(t, 500)
	full := len(encoded(t, s.View()))
	for _, room := range []int{0, 1, headerSize, headerSize + 1, full / 2, full - 1} {
		if err := Encode(&limited{room}, s.View()); !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("with room for %d of %d bytes: %v", room, full, err)
		}
	}
}

type limited struct{ room int }

func (l *limited) Write(p []byte) (int, error) {
	if len(p) > l.room {
		return 0, io.ErrShortWrite
	}
	l.room -= len(p)
	return len(p), nil
}

// FuzzDecode feeds bytes as they are, and as records of a frame whose tail is
// right, so that the fuzzer gets behind the digest.
func FuzzDecode(f *testing.F) {
	s := busy(f, 20) // small, since the fuzzer shrinks what it finds
	f.Add(encoded(f, s.View()))
	var records bytes.Buffer
	e := &encoder{w: &records, digest: sha256.New()}
	e.state(s.View())
	f.Add(records.Bytes())
	f.Add(encoded(f, New().View()))
	f.Fuzz(func(t *testing.T, data []byte) {
		digest := sha256.Sum256(data)
		tail, err := proto.Marshal(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Tail{Tail: &metapb.SnapshotTail{
			Records: countRecords(data), Digest: digest[:]}}})
		if err != nil {
			t.Fatal(err)
		}
		behind := append(binary.AppendUvarint(bytes.Clone(data), uint64(len(tail))), tail...)
		for _, input := range [][]byte{data, framed(t, behind)} {
			v, err := Decode(bytes.NewReader(input))
			if err != nil {
				if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, ErrNewer) {
					t.Fatalf("unexpected class of error: %v", err)
				}
				continue
			}
			again, err := Decode(bytes.NewReader(encoded(t, v)))
			if err != nil || Hash(again) != Hash(v) {
				t.Fatalf("a decoded state is not read again: %v", err)
			}
		}
	})
}

func countRecords(data []byte) (n uint64) {
	for len(data) > 0 {
		size, used := binary.Uvarint(data)
		if used <= 0 || size > uint64(len(data)-used) {
			break
		}
		data = data[used+int(size):]
		n++
	}
	return n
}

// FuzzApply applies whatever unmarshals: no panic, invariants hold, a refusal changes nothing.
func FuzzApply(f *testing.F) {
	g := &generator{source: rand.New(rand.NewPCG(1, 2))}
	s := New()
	for i := range uint64(60) {
		c := g.command(s.View())
		raw, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		s.Apply(i+1, c)
	}
	base := busy(f, 60)
	f.Fuzz(func(t *testing.T, raw []byte) {
		c := &metapb.Command{}
		if proto.Unmarshal(raw, c) != nil {
			return
		}
		fresh := newChecked(t)
		fresh.apply(c)
		s := newChecked(t)
		s.Restore(base.View())
		s.next = base.View().Index()
		s.apply(c)
		if _, err := Decode(bytes.NewReader(encoded(t, s.View()))); err != nil {
			t.Fatalf("after %v the state cannot be written and read: %v", c, err)
		}
	})
}
