package kerneltest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	noticeDelay = time.Millisecond // from a socket's end to the driver's knowing it
	goingDown   = 5 * time.Millisecond
	nbdMajor    = 43
)

// Fake is a machine: a kernel.Kernel and the kernel.Dialer that goes with it.
// Its methods may be called from any goroutine.
type Fake struct {
	// CPUs bounds a device's queues. Set before use, as the next ones.
	CPUs int
	// NoFreeze is Linux 6.1: a size change waits for nobody.
	NoFreeze bool
	// Busy is a machine on which every index is taken.
	Busy bool
	// Curious is a device manager that has a new device's node open just when it is to be connected,
	// so many times; it lets go in a moment.
	Curious int
	// Deaf is a driver that receives, so many times when it is given sockets, from the first of them only, as
	// it does before Linux 7.0 where threads are made slowly.
	Deaf int
	// OpenHangs is a machine on which opening a device does not end, as it does when partitions are looked for.
	OpenHangs bool
	// NoBackend is a kernel that is older than backend identifiers.
	NoBackend bool

	genl chan struct{} // cap 1: the lock of all netlink calls

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when anything changes
	closed   bool
	devices  map[int]*device
	goneAt   map[int]time.Time
	servers  map[string]*Server
	sockets  map[uint64]*socket // by cookie, while they are established
	cookies  uint64
	watchers map[chan int]bool
	mute     bool
	before   map[string]func()        // by call, once
	stuck    map[string]chan struct{} // by call: until when it hangs
	calls    map[string]int
	running  sync.WaitGroup
}

// New returns a machine without devices and servers.
func New() *Fake {
	return &Fake{
		CPUs: 4, genl: make(chan struct{}, 1), changed: make(chan struct{}),
		devices: make(map[int]*device), goneAt: make(map[int]time.Time), servers: make(map[string]*Server),
		sockets: make(map[uint64]*socket), watchers: make(map[chan int]bool),
		stuck: make(map[string]chan struct{}), calls: make(map[string]int), before: make(map[string]func()),
	}
}

// Close ends all devices and waits for what runs.
func (f *Fake) Close() {
	f.mu.Lock()
	f.closed = true
	for call, c := range f.stuck {
		close(c)
		delete(f.stuck, call)
	}
	f.change()
	f.mu.Unlock()
	f.running.Wait()
}

// device is an nbd device that exists. Its fields are under Fake.mu.
type device struct {
	kernel.Connect
	slots        []*slot
	disconnected bool // a zombie, or another's
	foreign      bool
	blank        bool // made and not connected
	frozen       bool
	inflight     int
	served       int
	mounts       []string
	hidden       int // users in other namespaces
	unseen       int // openers that nobody sees
	openers      []string
}

// slot is one of the places for sockets that a device has for all its life.
type slot struct {
	socket *socket
	dead   bool // as far as the driver knows
}

func (d *device) users() int { return len(d.mounts) + d.hidden + d.unseen + len(d.openers) }

// change wakes all who wait for something. f.mu is held.
func (f *Fake) change() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// enter takes the netlink lock for a call. It hangs like the real one.
func (f *Fake) enter(call string) (leave func()) {
	f.genl <- struct{}{}
	f.mu.Lock()
	f.calls[call]++
	c := f.stuck[call]
	f.mu.Unlock()
	if c != nil {
		<-c
	}
	f.happen(call)
	return func() { <-f.genl }
}

// Stick makes calls of one kind ("connect", "reconfigure", "disconnect") hang, with all that come after, until release.
func (f *Fake) Stick(call string) (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := make(chan struct{})
	f.stuck[call] = c
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.stuck[call] == c {
			close(c)
			delete(f.stuck, call)
		}
	}
}

// Before runs something when the next call of one kind ("connect", "reconfigure", "disconnect", "resize") has begun.
func (f *Fake) Before(call string, do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before[call] = do
}

// happen runs what is to be run before a call.
func (f *Fake) happen(call string) {
	f.mu.Lock()
	do := f.before[call]
	delete(f.before, call)
	f.mu.Unlock()
	if do != nil {
		do()
		time.Sleep(noticeDelay)
	}
}

// Calls counts the calls of one kind.
func (f *Fake) Calls(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[call]
}

// Connect implements kernel.Kernel.
func (f *Fake) Connect(c kernel.Connect) error {
	defer f.enter("connect")()
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.devices[c.Index]; f.Busy || d != nil && !d.blank || time.Since(f.goneAt[c.Index]) < goingDown {
		return fmt.Errorf("%w: nbd%d", block.ErrInUse, c.Index)
	}
	if f.NoBackend {
		return fmt.Errorf("%w: this kernel keeps no backends", block.ErrPrecondition)
	}
	if f.Curious > 0 {
		f.Curious--
		f.devices[c.Index] = &device{Connect: kernel.Connect{Index: c.Index}, blank: true}
		return fmt.Errorf("%w: nbd%d", block.ErrInUse, c.Index)
	}
	if len(c.Sockets) > 1 && c.Flags&0x100 == 0 || c.Size <= 0 || len(c.Backend) >= 200 {
		return fmt.Errorf("%w: EINVAL", block.ErrInUse)
	}
	d := &device{Connect: c}
	f.deafen(c.Sockets)
	for _, k := range c.Sockets {
		s := k.(*socket)
		s.refs++
		s.device = d
		d.slots = append(d.slots, &slot{socket: s})
		if !s.established {
			f.notice(d, s)
		}
	}
	f.devices[c.Index] = d
	f.change()
	return nil
}

// Reconfigure implements kernel.Kernel.
func (f *Fake) Reconfigure(index int, backend string, c kernel.Change) error {
	defer f.enter("reconfigure")()
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.devices[index]
	if d == nil || d.disconnected || d.Backend != backend {
		return fmt.Errorf("%w: EINVAL", block.ErrNotFound)
	}
	if c.Size > 0 && len(c.Sockets) > 0 {
		panic("kerneltest: a size with sockets")
	}
	if c.DeadTimeout > 0 {
		d.DeadTimeout = c.DeadTimeout
	}
	if c.Size > 0 {
		f.resize(d, c.Size)
	}
	f.deafen(c.Sockets)
	for _, k := range c.Sockets {
		s := k.(*socket)
		i := slices.IndexFunc(d.slots, func(p *slot) bool { return p.dead })
		if i < 0 { // not needed: closed, and success
			continue
		}
		f.unref(d.slots[i].socket)
		s.refs++
		s.device = d
		d.slots[i] = &slot{socket: s}
		if !s.established {
			f.notice(d, s)
		}
	}
	f.change()
	return nil
}

// deafen makes the driver deaf to sockets that it is given, if it is to be. f.mu is held.
func (f *Fake) deafen(sockets []kernel.Socket) {
	if f.Deaf == 0 || len(sockets) < 2 {
		return
	}
	f.Deaf--
	for _, k := range sockets[1:] {
		k.(*socket).deaf = true
	}
}

// resize waits until nothing is in flight, with the netlink lock held. f.mu is held, but not meanwhile.
func (f *Fake) resize(d *device, size int64) {
	f.mu.Unlock()
	f.happen("resize")
	f.mu.Lock()
	if !f.NoFreeze && size != d.Size {
		d.frozen = true
		for d.inflight > 0 && !f.closed {
			f.await(nil)
		}
		d.frozen = false
	}
	d.Size = size
}

// await waits for a change, or for stop. f.mu is held, but not meanwhile.
func (f *Fake) await(stop <-chan time.Time) {
	c := f.changed
	f.mu.Unlock()
	select {
	case <-c:
	case <-stop:
	}
	f.mu.Lock()
}

// Disconnect implements kernel.Kernel.
func (f *Fake) Disconnect(index int) error {
	defer f.enter("disconnect")()
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.devices[index]
	if d == nil || d.disconnected {
		return nil
	}
	begin, limit := time.Now(), d.Timeout*time.Duration(len(d.slots)) // each socket's send timeout
	t := time.NewTimer(limit)
	defer t.Stop()
	for f.fullBuffers(d) && time.Since(begin) < limit && !f.closed {
		f.await(t.C)
	}
	d.disconnected = true
	for _, p := range d.slots {
		f.unref(p.socket)
		p.dead = true
	}
	f.settle(index)
	f.change()
	return nil
}

// fullBuffers: a socket takes no byte more.
func (f *Fake) fullBuffers(d *device) bool {
	return slices.ContainsFunc(d.slots, func(p *slot) bool { return p.socket.established && p.socket.unsent() > 0 })
}

// settle removes a device that has ended and that nobody uses. f.mu is held.
func (f *Fake) settle(index int) {
	if d := f.devices[index]; d != nil && d.disconnected && !d.foreign && d.users() == 0 {
		delete(f.devices, index)
		f.goneAt[index] = time.Now()
		f.change()
	}
}

// Watch implements kernel.Kernel.
func (f *Fake) Watch(ctx context.Context, dead func(index int)) error {
	select { // it asks netlink for the family
	case f.genl <- struct{}{}:
		<-f.genl
	case <-ctx.Done():
		return nil
	}
	c := make(chan int, 64)
	f.mu.Lock()
	f.watchers[c] = true
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.watchers, c)
	}()
	dead(-1)
	for {
		select {
		case i := <-c:
			dead(i)
		case <-ctx.Done():
			return nil
		}
	}
}

// Mute loses all events, while it is set.
func (f *Fake) Mute(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mute = on
}

// notice makes the driver learn of a socket's end, a moment later. f.mu is held.
func (f *Fake) notice(d *device, s *socket) {
	f.running.Add(1)
	time.AfterFunc(noticeDelay, func() {
		defer f.running.Done()
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, p := range d.slots {
			if p.socket == s && !p.dead {
				f.die(d, p)
			}
		}
	})
}

// die marks a slot dead and says so. f.mu is held.
func (f *Fake) die(d *device, p *slot) {
	p.dead = true
	f.endSocket(p.socket)
	for c := range f.watchers {
		if f.mute {
			break
		}
		select {
		case c <- d.Index:
		default:
		}
	}
	f.change()
}

// Places implements kernel.Kernel.
func (f *Fake) Places() ([]kernel.Place, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []kernel.Place
	for _, index := range slices.Sorted(maps.Keys(f.devices)) {
		all = append(all, f.devices[index].node().Place)
	}
	return all, nil
}

// Node implements kernel.Kernel.
func (f *Fake) Node(index int) (kernel.Node, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.devices[index]; d != nil {
		return d.node(), nil
	}
	return kernel.Node{}, fmt.Errorf("%w: nbd%d", block.ErrNotFound, index)
}

// InFlight implements kernel.Kernel.
func (f *Fake) InFlight(index int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.devices[index]; d != nil {
		return d.inflight
	}
	return 0
}

func (d *device) node() kernel.Node {
	return kernel.Node{
		Place: kernel.Place{Index: d.Index, Backend: d.Backend, Configured: !d.blank},
		Size:  d.Size, BlockSize: d.BlockSize,
		ReadOnly: d.Flags&wire.TransReadOnly != 0, Major: nbdMajor, Minor: uint32(d.Index),
		InFlight: d.inflight, Queues: len(d.slots),
	}
}

// Users implements kernel.Kernel.
func (f *Fake) Users(index int) (kernel.Users, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.devices[index]
	if d == nil {
		return kernel.Users{}, nil
	}
	return kernel.Users{Mounts: slices.Clone(d.mounts), Openers: slices.Clone(d.openers)}, nil
}

// Claim implements kernel.Kernel.
func (f *Fake) Claim(ctx context.Context, index int) (release func(), err error) {
	if f.OpenHangs {
		<-ctx.Done()
		return nil, fmt.Errorf("%w: opening nbd%d: %w", block.ErrUnavailable, index, ctx.Err())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.devices[index]
	if d == nil {
		return nil, fmt.Errorf("%w: no nbd%d", block.ErrPrecondition, index)
	}
	if len(d.mounts)+d.hidden > 0 {
		return nil, fmt.Errorf("%w: nbd%d", block.ErrInUse, index)
	}
	return f.use(index, func(d *device, by int) { d.hidden += by }), nil
}

// use adds a user to a device; leave takes it away. f.mu is held, not by leave.
func (f *Fake) use(index int, count func(d *device, by int)) (leave func()) {
	d := f.devices[index]
	if d == nil { // opening it fails
		return func() {}
	}
	count(d, 1)
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		count(d, -1)
		if f.devices[index] == d {
			f.settle(index)
		}
	})
}

// Mount mounts a device at a place in this mount namespace, or in another one if where is empty.
func (f *Fake) Mount(index int, where string) (unmount func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.use(index, func(d *device, by int) {
		switch {
		case where == "":
			d.hidden += by
		case by > 0:
			d.mounts = append(d.mounts, where)
		default:
			d.mounts = slices.DeleteFunc(d.mounts, func(m string) bool { return m == where })
		}
	})
}

// Open opens a device as a process that can be seen.
func (f *Fake) Open(index int, process string) (closeIt func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.use(index, func(d *device, by int) {
		if by > 0 {
			d.openers = append(d.openers, process)
		} else {
			d.openers = slices.DeleteFunc(d.openers, func(p string) bool { return p == process })
		}
	})
}

// Foreign makes a device of another program, which must not be touched.
func (f *Fake) Foreign(index int, backend string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.devices[index] = &device{Connect: kernel.Connect{Index: index, Backend: backend, Size: 1 << 20, BlockSize: 4096}, foreign: true}
}

// Blank makes a device that another program has left behind without a connection.
func (f *Fake) Blank(index int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.devices[index] = &device{Connect: kernel.Connect{Index: index}, blank: true}
}

// Touched reports whether a foreign device is not as it was made.
func (f *Fake) Touched(index int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.devices[index]
	return d == nil || d.disconnected || !d.foreign || d.Size != 1<<20 || len(d.slots) > 0
}

// OpenUnseen opens a device as a process that cannot be seen.
func (f *Fake) OpenUnseen(index int) { f.countUnseen(index, 1) }

// CloseUnseen undoes OpenUnseen.
func (f *Fake) CloseUnseen(index int) { f.countUnseen(index, -1) }

func (f *Fake) countUnseen(index, by int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.devices[index]; d != nil {
		d.unseen += by
		f.settle(index)
	}
}

// Orphan ends the process that uses the machine: its connections end, those of devices stay, and its claims are given up.
func (f *Fake) Orphan() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.sockets {
		if s.refs = 1; s.device == nil {
			f.endSocket(s)
		}
	}
	for index, d := range f.devices {
		d.hidden = 0
		f.settle(index)
	}
}

// DeadTimeout is how long a device's requests would wait now without sockets.
func (f *Fake) DeadTimeout(index int) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.devices[index].DeadTimeout
}

// Tune implements kernel.Kernel.
func (f *Fake) Tune(int) error { return nil }

// Check implements kernel.Kernel.
func (f *Fake) Check() ([]string, error) { return nil, nil }
