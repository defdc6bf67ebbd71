package sim

import (
	"time"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// server is the server of one node: a process that comes and goes on a host.
// What primary.Manager does with goroutines is done here with events.
type server struct {
	*world
	cell     *cell
	host     *host
	node     string
	cluster  block.ClusterID
	geometry block.Geometry
	switches *switches

	up      bool
	life    int // of the process; events for an older one come to nothing
	process block.UUID
	frozen  bool
	thaw    []func() // what came while it was stopped

	volumes []*volume // open, or on their way
	conns   []*conn   // that it knows
}

const nodeName = "storage-1"

func newServer(c *cell, h *host, cluster block.ClusterID, g block.Geometry) *server {
	s := &server{world: c.world, cell: c, host: h, node: nodeName, cluster: cluster, geometry: g}
	c.watch = append(c.watch, func(id block.VolumeID) {
		delay := c.between(time.Millisecond, 50*time.Millisecond)
		if c.chance(c.trouble) {
			delay = c.between(0, 5*time.Second)
		}
		life := s.life
		c.after(delay, func() { s.post(life, func() { s.changed(id) }) })
	})
	return s
}

// post delivers something to the process that ran in life, unless it is gone; a stopped one gets it later.
func (s *server) post(life int, f func()) {
	switch {
	case life != s.life || !s.up:
	case s.frozen:
		s.thaw = append(s.thaw, func() { s.post(life, f) })
	default:
		f()
	}
}

// later is an event of the server's own.
func (s *server) later(d time.Duration, f func()) {
	life := s.life
	s.after(d, func() { s.post(life, f) })
}

// start starts a process: it opens the disks and registers; then it serves.
func (s *server) start() {
	if s.up {
		return
	}
	s.up, s.process = true, block.NewUUID()
	s.tracef("server: start, life %d", s.life)
	for _, d := range s.host.disks {
		if err := d.open(s.cluster, s.geometry, s.process); err != nil {
			s.tracef("disk %d: cannot be opened: %s", d.n, outcome(err))
			s.reopen(d)
		}
		if s.host.dead { // struck while it started
			return
		}
	}
	s.register()
	s.later(reportEvery, s.report)
	s.tick()
}

// reportEvery is the pause between two reports of a node.
const reportEvery = 5 * time.Second

// report is the heartbeat. It registers anew what a late registration of an
// older process has replaced: until then nothing is granted to this one.
func (s *server) report() {
	if n := s.cell.state.View().Node(s.node); n != nil && n.Process != s.process.String() {
		s.register()
	}
	s.later(reportEvery, s.report)
}

func (s *server) register() {
	cmd := &metapb.PutNode{Node: &metapb.Node{Name: s.node, Rack: "rack-1", Process: s.process.String(), FeatureLevel: metadata.Level}}
	for _, d := range s.host.disks {
		if d.store == nil {
			continue
		}
		r := d.store.Reports()[0]
		state := metapb.Disk_ONLINE
		switch {
		case !r.Online:
			state = metapb.Disk_FAILED
		case r.Full:
			state = metapb.Disk_FULL
		}
		cmd.Disks = append(cmd.Disks, &metapb.Disk{
			Id: r.ID.String(), Path: r.Path, Capacity: r.Capacity, Available: r.Available, State: state, Incarnation: incarnationTo(r.Incarnation),
		})
	}
	life := s.life
	s.cell.submit("register", &metapb.Command{Kind: &metapb.Command_PutNode{PutNode: cmd}}, func(_ metadata.Result, err error) {
		s.post(life, func() {
			if err != nil {
				s.later(200*time.Millisecond, s.register)
				return
			}
			for _, v := range s.cell.state.View().Volumes(metadata.Position{}, 0) {
				s.changed(block.VolumeID{UUID: mustUUID(v.Id)})
			}
		})
	})
}

// tick is the manager's ticker.
func (s *server) tick() {
	s.allCores(func(c *primary.Core) { c.Tick(s.now) })
	s.later(200*time.Millisecond, s.tick)
}

// reopen tries until an ended instance has a successor.
func (s *server) reopen(d *disk) {
	s.later(reopenAfter, func() {
		d.close()
		if err := d.open(s.cluster, s.geometry, s.process); err != nil {
			s.tracef("disk %d: cannot be opened again: %s", d.n, outcome(err))
			if !s.host.dead {
				s.reopen(d)
			}
			return
		}
		s.register()
		s.allCores(func(c *primary.Core) { c.DiskChanged(d.id) })
	})
}

// kill ends the process at once. The kernel keeps what it wrote and closes its connections.
func (s *server) kill() {
	s.end("kill")
	s.host.endProcess()
}

// cutPower ends the process and the host.
func (s *server) cutPower() {
	s.end("power")
	s.host.powerOff()
}

func (s *server) end(how string) {
	if s.up {
		s.tracef("server: %s, life %d", how, s.life)
	}
	s.up, s.frozen, s.thaw, s.volumes = false, false, nil, nil
	s.life++
	for _, c := range s.conns {
		c.serverGone(how == "kill")
	}
	s.conns = nil
}

// stop halts the process for d (SIGSTOP), while the kernel goes on. Whoever
// reads connections closes them unparsed after a stall of more than a second.
func (s *server) stop(d time.Duration) {
	if !s.up || s.frozen {
		return
	}
	s.tracef("server: stopped for %v", d)
	s.frozen = true
	life, began := s.life, s.now
	s.after(d, func() {
		if s.life != life || !s.frozen {
			return
		}
		s.frozen = false
		s.tracef("server: goes on")
		if s.now-began > stallLimit {
			for _, c := range append([]*conn(nil), s.conns...) {
				c.serverClose()
			}
		}
		list := s.thaw
		s.thaw = nil
		for _, f := range list {
			f()
		}
	})
}

// find is the open volume, or nil.
func (s *server) find(id block.VolumeID) *volume {
	for _, v := range s.volumes {
		if v.id == id {
			return v
		}
	}
	return nil
}

// allCores feeds an event to every open volume.
func (s *server) allCores(f func(*primary.Core)) {
	for _, v := range s.volumes {
		v.event(f)
	}
}

// changed follows the watch, as Manager.Changed does.
func (s *server) changed(id block.VolumeID) {
	if v := s.find(id); v != nil {
		v.changed()
		return
	}
	life := s.life
	s.cell.read("confirm", id, func(m primary.Map, err error) {
		s.post(life, func() {
			switch {
			case outcome(err) == block.ErrNotFound.Error():
				return
			case err != nil:
				s.later(200*time.Millisecond, func() { s.changed(id) })
				return
			}
			intent := m.Volume.WantedSize > m.Volume.Size
			for _, a := range m.Attachments {
				intent = intent || a.Revoking
			}
			if intent && m.Node == s.node {
				s.open(id, func(v *volume, err error) {
					if err != nil {
						s.later(200*time.Millisecond, func() { s.changed(id) })
						return
					}
					v.event(func(c *primary.Core) { c.Learn(m) })
				})
			}
		})
	})
}

// open calls back with the open volume: granted once, however many ask.
func (s *server) open(id block.VolumeID, done func(*volume, error)) {
	v := s.find(id)
	if v == nil {
		v = &volume{server: s, id: id}
		s.volumes = append(s.volumes, v)
		s.grant(v)
	}
	if v.core != nil {
		done(v, nil)
		return
	}
	v.waiting = append(v.waiting, done)
}

func (s *server) grant(v *volume) {
	life := s.life
	cmd := &metapb.GrantPrimary{VolumeId: v.id.String(), Node: s.node, Process: s.process.String()}
	s.cell.submit("grant", &metapb.Command{Kind: &metapb.Command_GrantPrimary{GrantPrimary: cmd}}, func(r metadata.Result, err error) {
		if err == nil {
			err = r.Err
		}
		if err != nil {
			s.post(life, func() { v.opened(primary.Map{}, err) })
			return
		}
		s.cell.read("granted", v.id, func(m primary.Map, err error) { s.post(life, func() { v.opened(m, err) }) })
	})
}

// handshake resolves what a connection names, as Manager.Open does: before it
// refuses it reads the map once.
func (s *server) handshake(c *conn) {
	if v := s.find(c.name.volume); v != nil && v.core != nil {
		if id, ok := v.core.Authorize(c.name.digest); ok {
			v.connect(c, id)
			return
		}
	}
	life := s.life
	s.cell.read("lookup", c.name.volume, func(m primary.Map, err error) {
		s.post(life, func() { s.lookedUp(c, m, err) })
	})
}

func (s *server) lookedUp(c *conn, m primary.Map, err error) {
	known := false
	for _, a := range m.Attachments {
		known = known || a.TokenDigest == c.name.digest && !a.Revoking
	}
	switch {
	case outcome(err) == block.ErrNotFound.Error(), err == nil && !known:
		c.refuse(block.ErrPermission)
		return
	case err != nil:
		c.refuse(block.ErrUnavailable)
		return
	}
	s.open(c.name.volume, func(v *volume, err error) {
		if err != nil {
			c.refuse(block.ErrUnavailable)
			return
		}
		v.event(func(core *primary.Core) { core.Learn(m) })
		id, ok := v.core.Authorize(c.name.digest)
		if !ok {
			c.refuse(block.ErrPermission)
			return
		}
		v.connect(c, id)
	})
}
