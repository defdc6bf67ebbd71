package sim

import (
	"encoding/binary"
	"flag"
	"os"
	"testing"
	"testing/cryptotest"
	"time"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/test/checker"
)

var traceFlag = flag.Bool("tell", false, "print the whole trace")

// switches break a rule of what the simulator stands in for, to see a run fail.
type switches struct {
	parseLate bool // a reader that was held up parses all the same
}

// setup is what a run is made of.
type setup struct {
	disks        int
	size         int64 // of the volume, bytes
	writeThrough bool
	errorOnFull  bool
	direct       bool // O_DIRECT disks
	sockets      int
	timeout      time.Duration
}

// The smallest geometry: a mark is one block, an extent 256 KiB, a run 4 MiB.
var geometry = block.Geometry{ExtentSize: block.MinExtentSize}

const (
	blockSize = 4096
	runSize   = block.MinExtentSize * block.ExtentsPerRun
	grain     = 512 // of the log: a power cut tears blocks into sectors
)

// sim is a cell of one node, a volume on it, and the truth about the volume.
type sim struct {
	*world
	setup
	cell   *cell
	host   *host
	server *server
	id     block.VolumeID
	log    *checker.Log

	epochKnown block.CacheEpoch // to the clients
	switches   *switches
}

// start makes a cell with a running server and a volume.
func start(t *testing.T, seed uint64, c setup) *sim {
	t.Helper()
	cryptotest.SetGlobalRandom(t, seed)
	w := newWorld(t, seed)
	w.aloud = *traceFlag
	s := &sim{world: w, setup: c, cell: newCell(w), epochKnown: 1, switches: &switches{}}
	s.disks = max(s.disks, 1)
	if s.sockets == 0 {
		s.sockets = 4
	}
	if s.timeout == 0 {
		s.timeout = 3 * time.Second
	}
	if s.size == 0 {
		s.size = 2 * runSize
	}
	cluster := block.ClusterID{UUID: block.NewUUID()}
	s.host = newHost(w, s.disks, func() string { return stateDir(t) })
	if s.direct {
		s.host.mode = image.Direct
	}
	s.server = newServer(s.cell, s.host, cluster, geometry)
	s.server.switches = s.switches
	s.must("init", &metapb.Command{Kind: &metapb.Command_InitCluster{InitCluster: &metapb.InitCluster{
		ClusterId: cluster.String(), ExtentSize: geometry.ExtentSize, DefaultReplicas: 1,
	}}})
	s.server.start()
	s.until("the server is registered", func() bool { return s.cell.state.View().Node(nodeName) != nil })
	return s.another("data")
}

// stateDir is for what a store keeps beside its disks: in memory if possible, since it is synced for real.
func stateDir(t *testing.T) string {
	const shm = "/dev/shm"
	if _, err := os.Stat(shm); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "gabion-sim-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// another is the same cell with the eyes on a volume of its own.
func (s *sim) another(name string) *sim {
	s.t.Helper()
	o := *s
	o.id, o.epochKnown = s.create(name), 1
	o.log = checker.New(o.id, grain, s.writeThrough)
	return &o
}

// must applies a command at once.
func (s *sim) must(kind string, cmd *metapb.Command) metadata.Result {
	s.t.Helper()
	r := s.cell.apply(kind, cmd)
	if r.Err != nil {
		s.failf("%s: %v", kind, r.Err)
	}
	return r
}

func (s *sim) create(name string) block.VolumeID {
	s.t.Helper()
	p := &metapb.Policy{
		Replicas: 1, Spread: metapb.Policy_RACK, Access: metapb.Policy_CLUSTER, BlockSize: blockSize,
		Durability: metapb.Policy_FLUSH, OnFull: metapb.Policy_WAIT,
	}
	if s.writeThrough {
		p.Durability = metapb.Policy_WRITE_THROUGH
	}
	if s.errorOnFull {
		p.OnFull = metapb.Policy_ERROR
	}
	id := block.VolumeID{UUID: block.NewUUID()}
	s.must("create", &metapb.Command{Kind: &metapb.Command_CreateVolume{CreateVolume: &metapb.CreateVolume{
		Id: id.String(), Name: name, Size: s.size, Policy: p,
	}}})
	return id
}

func (s *sim) view() *metadata.View    { return s.cell.state.View() }
func (s *sim) volume() *metapb.Volume  { return s.view().Volume(s.id) }
func (s *sim) epoch() block.CacheEpoch { return block.CacheEpoch(s.volume().GetCacheEpoch()) }
func (s *sim) disk(n int) *disk        { return s.host.disks[n] }

// learn is a client hearing of the cache epoch: what a rise may have cost is lost.
func (s *sim) learn() {
	if e := s.epoch(); e > s.epochKnown {
		s.tracef("clients know of cache epoch %d", e)
		s.epochKnown = e
		s.log.Lost()
	}
}

// attach gives a consumer its right; the error is the state machine's refusal.
func (s *sim) attach(node string) (*metapb.Attachment, error) {
	token := make([]byte, 32)
	binary.LittleEndian.PutUint64(token, s.rand.Uint64())
	r := s.cell.apply("attach", &metapb.Command{Kind: &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{
		Attachment: &metapb.Attachment{Id: block.NewUUID().String(), VolumeId: s.id.String(), Node: node, Token: token},
	}}})
	a, _ := r.Value.(*metapb.Attachment)
	return a, r.Err
}

// stage makes a device of an attachment, as the node plugin does: it learns the cache epoch first.
func (s *sim) stage(a *metapb.Attachment) *device {
	s.learn()
	d := &device{
		world: s.world, server: s.server, log: s.log, node: a.Node, want: s.sockets, timeout: s.timeout,
		name: name{volume: s.id, digest: digestOf(a.Token), epoch: s.epoch()},
	}
	d.connect()
	return d
}

// device attaches a consumer and waits for its session.
func (s *sim) device(node string) *device {
	s.t.Helper()
	a, err := s.attach(node)
	if err != nil {
		s.failf("attach: %v", err)
	}
	d := s.stage(a)
	s.connected(d)
	return d
}

// connected waits until all of a device's sockets are ready.
func (s *sim) connected(d *device) {
	s.t.Helper()
	s.until("the device is connected", func() bool {
		for _, c := range d.socks {
			if !c.ready {
				return false
			}
		}
		return len(d.socks) > 0
	})
}

// detach asks for a detach and does not wait.
func (s *sim) detach(attachment string) metadata.Result {
	return s.cell.apply("detach", &metapb.Command{Kind: &metapb.Command_DetachVolume{DetachVolume: &metapb.DetachVolume{
		VolumeId: s.id.String(), AttachmentId: attachment,
	}}})
}

func (s *sim) attached(attachment string) bool {
	for _, a := range s.view().Attachments(s.id) {
		if a.Id == attachment {
			return true
		}
	}
	return false
}

// resize asks for a growth and does not wait.
func (s *sim) resize(size int64) error {
	return s.cell.apply("resize", &metapb.Command{Kind: &metapb.Command_ResizeVolume{ResizeVolume: &metapb.ResizeVolume{
		Id: s.id.String(), Size: size,
	}}}).Err
}
