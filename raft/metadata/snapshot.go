package metadata

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	snapshotMagic  = "GABIONMS"
	snapshotFormat = 1
	headerSize     = len(snapshotMagic) + 4 + 4

	runsPerRecord = 4096    // in one SnapshotRuns
	maxRecord     = 8 << 20 // bytes; a record's parts are bounded far below
	maxWindow     = 8 << 20 // bytes of zstd history that a reader is willing to keep
)

// Encode writes a state as a snapshot. It only reads v and may take as long as
// it likes: nothing waits for it. It holds tokens, so what it is written to is
// for the server's eyes only. The error is the writer's.
func Encode(w io.Writer, v *View) error {
	header := binary.BigEndian.AppendUint32([]byte(snapshotMagic), snapshotFormat)
	header = binary.BigEndian.AppendUint32(header, v.level)
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("snapshot header: %w", err)
	}
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(1<<20))
	if err != nil {
		return fmt.Errorf("snapshot compression: %w", err)
	}
	defer z.Close()
	buffered := bufio.NewWriterSize(z, 1<<16)
	e := &encoder{w: buffered, digest: sha256.New()}
	e.state(v)
	e.tail()
	if e.err != nil {
		return fmt.Errorf("snapshot records: %w", e.err)
	}
	if err := buffered.Flush(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	if err := z.Close(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

// Hash is the digest of a state: equal states have equal hashes. Two servers
// that applied the same log have the same.
func Hash(v *View) [sha256.Size]byte {
	e := &encoder{w: io.Discard, digest: sha256.New()}
	e.state(v)
	return [sha256.Size]byte(e.digest.Sum(nil))
}

// encoder writes records, each after its length, and stops at the first error.
type encoder struct {
	w       io.Writer
	digest  hash.Hash // of what was written
	records uint64
	buf     []byte
	err     error
}

func (e *encoder) put(r *metapb.SnapshotRecord) {
	if e.err != nil {
		return
	}
	size := proto.Size(r)
	e.buf = binary.AppendUvarint(e.buf[:0], uint64(size))
	if e.buf, e.err = (proto.MarshalOptions{Deterministic: true}).MarshalAppend(e.buf, r); e.err != nil {
		return
	}
	e.digest.Write(e.buf)
	e.records++
	_, e.err = e.w.Write(e.buf)
}

func (e *encoder) state(v *View) {
	e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Head{Head: &metapb.SnapshotHead{
		Index: v.index, Cluster: v.cluster, ForgottenEvents: v.events.forgotten}}})
	for n := range values(v.nodes) {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Node{Node: n}})
	}
	for _, id := range v.numbered {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Disk{Disk: v.Disk(id)}})
	}
	for vol := range values(v.volumes) {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Volume{Volume: &metapb.SnapshotVolume{
			Volume: atLevel(vol.Volume, v.level), Grant: vol.grant, Members: vol.members, Attachments: vol.attachments}}})
		e.runs(vol.runs)
	}
	for id, index := range entries(v.tombstones) {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Tombstone{Tombstone: &metapb.SnapshotTombstone{
			VolumeId: id.String(), Index: index}}})
	}
	for _, event := range v.events.kept {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Event{Event: event}})
	}
	for c := range values(v.consumers) {
		e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Consumer{Consumer: c}})
	}
}

// atLevel is a volume without what the state's level does not know, so that a
// server which is not upgraded yet can read the snapshot. The loader fills it in.
func atLevel(v *metapb.Volume, level uint32) *metapb.Volume {
	if level < levelConsumers {
		v = proto.CloneOf(v)
		v.Format = metapb.Volume_FORMAT_UNSPECIFIED
	}
	return v
}

// runs writes runs in chunks of one number of disks.
func (e *encoder) runs(m *runs) {
	chunk, width := &metapb.SnapshotRuns{}, 0
	flush := func() {
		if len(chunk.Index) > 0 {
			e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Runs{Runs: chunk}})
		}
		chunk.Index, chunk.Disk = chunk.Index[:0], chunk.Disk[:0]
	}
	for index, r := range entries(m) {
		if n := r.count(); n != width || len(chunk.Index) == runsPerRecord {
			flush()
			width = n
		}
		chunk.Index = append(chunk.Index, uint32(index))
		for _, number := range r[:width] {
			chunk.Disk = append(chunk.Disk, uint32(number))
		}
	}
	flush()
}

// count is how many disks a run has; they come first.
func (r replicas) count() int {
	n := 0
	for n < len(r) && r[n] != 0 {
		n++
	}
	return n
}

func (e *encoder) tail() {
	e.put(&metapb.SnapshotRecord{Kind: &metapb.SnapshotRecord_Tail{Tail: &metapb.SnapshotTail{
		Records: e.records, Digest: e.digest.Sum(nil)}}})
}

// Decode reads a snapshot to its end. ErrNewer: written by a newer release, and
// nothing of it was read. ErrCorrupt: not a snapshot, or a damaged one. Else
// the whole state, which holds all invariants. Memory is bounded by the state
// that the snapshot holds, whatever its bytes say.
func Decode(r io.Reader) (*View, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, corrupt("its header is cut short: %v", err)
	}
	if string(header[:len(snapshotMagic)]) != snapshotMagic {
		return nil, corrupt("it does not begin with %q", snapshotMagic)
	}
	format, level := binary.BigEndian.Uint32(header[8:]), binary.BigEndian.Uint32(header[12:])
	if format > snapshotFormat || level > Level {
		return nil, fmt.Errorf("%w: the state snapshot has format %d and feature level %d, this binary reads %d and %d: upgrade this server",
			ErrNewer, format, level, snapshotFormat, Level)
	}
	if format == 0 || level == 0 {
		return nil, corrupt("it has format %d and level %d", format, level)
	}
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, corrupt("%v", err)
	}
	defer z.Close()
	d := &decoder{r: bufio.NewReaderSize(z, 1<<16), digest: sha256.New(), load: newLoader(level)}
	if err := d.all(); err != nil {
		return nil, err
	}
	return d.load.finish()
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: the state snapshot is not usable: %s", block.ErrCorrupt, fmt.Sprintf(format, args...))
}

type decoder struct {
	r       *bufio.Reader
	digest  hash.Hash
	records uint64
	buf     []byte
	load    *loader
}

// all reads up to the tail, compares it and insists on the end.
func (d *decoder) all() error {
	for {
		before := d.digest.Sum(nil)
		record, err := d.next()
		if err != nil {
			return err
		}
		if tail := record.GetTail(); tail != nil {
			if tail.Records != d.records || !bytes.Equal(tail.Digest, before) {
				return corrupt("its records are not the ones its tail was written for")
			}
			if _, err := d.r.ReadByte(); !errors.Is(err, io.EOF) {
				return corrupt("something follows its tail")
			}
			return nil
		}
		d.records++
		if err := d.load.add(record); err != nil {
			return err
		}
	}
}

func (d *decoder) next() (*metapb.SnapshotRecord, error) {
	size, err := binary.ReadUvarint(d.r)
	switch {
	case err != nil:
		return nil, corrupt("it ends after %d records: %v", d.records, err)
	case size > maxRecord:
		return nil, corrupt("record %d claims %d bytes", d.records, size)
	}
	prefix := binary.AppendUvarint(nil, size)
	if d.buf, err = readN(d.r, d.buf[:0], int(size)); err != nil {
		return nil, corrupt("it ends in record %d: %v", d.records, err)
	}
	d.digest.Write(prefix)
	d.digest.Write(d.buf)
	record := &metapb.SnapshotRecord{}
	if err := proto.Unmarshal(d.buf, record); err != nil {
		return nil, corrupt("record %d: %v", d.records, err)
	}
	if name := unknownIn(record.ProtoReflect()); name != "" {
		return nil, corrupt("record %d has something unknown in %s", d.records, name)
	}
	return record, nil
}

// readN appends n bytes of r to buf, growing with what arrives and not with what was claimed.
func readN(r io.Reader, buf []byte, n int) ([]byte, error) {
	for n > 0 {
		step := min(n, 1<<16)
		at := len(buf)
		buf = append(buf, make([]byte, step)...)
		if _, err := io.ReadFull(r, buf[at:]); err != nil {
			return nil, err
		}
		n -= step
	}
	return buf, nil
}
