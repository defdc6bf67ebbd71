package cluster_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/test/checker"
	"github.com/gabion-storage/gabion/test/cluster"
)

// kill -9 at random moments under load: every acknowledged byte is there when
// the server is back, since the host stayed up; what was not acknowledged is
// old or new, and nothing is anybody else's.
func TestKillUnderLoad(t *testing.T) {
	random := seeded(t)
	s := start(t)
	var loads []*load
	for i, durability := range []string{"flush", "flush", "write-through"} {
		name := fmt.Sprintf("v%d", i)
		u := volume(t, s, name, "24MiB", "--durability", durability)
		connect(t, s, u).Close() // opens it for the first time
		l := newLoad(t, name, u, durability == "write-through")
		l.epoch = show(t, s, name).CacheEpoch
		loads = append(loads, l)
	}
	slowest := time.Duration(0)
	for round := range scaled(8, 1000) {
		var running sync.WaitGroup
		for _, l := range loads {
			for range 3 {
				seed := random.Uint64()
				r, err := openEither(s, l.uris, seed)
				if err != nil {
					t.Fatal(err)
				}
				running.Go(func() { l.run(r, rand.New(rand.NewPCG(seed, 1))) })
			}
		}
		<-time.After(time.Duration(random.Int64N(int64(300 * time.Millisecond))))
		s.Kill()
		running.Wait()
		slowest = max(slowest, ready(t, s))
		for _, l := range loads {
			l.settle(t, s, round)
		}
		if t.Failed() {
			return
		}
	}
	for _, l := range loads {
		t.Logf("%s: %d requests acknowledged", l.name, l.acked)
		if l.acked == 0 {
			t.Errorf("%s was never written", l.name)
		}
		if epoch := show(t, s, l.name).CacheEpoch; epoch != l.epoch {
			t.Errorf("%s: cache epoch %d became %d, though the host stayed up", l.name, l.epoch, epoch)
		}
	}
	t.Logf("the slowest restart took %v", slowest)
}

func openEither(s *cluster.Server, u cluster.URIs, seed uint64) (*raw, error) {
	if seed%2 == 0 {
		return openTCP(s, u)
	}
	return open(s, u)
}

// load is random requests to one volume and the log that judges them.
type load struct {
	name  string
	uris  cluster.URIs
	log   *checker.Log
	epoch uint64 // the cache epoch, which no kill raises

	mu     sync.Mutex
	acked  int
	unsure []*checker.Write // sent, and the connection ended before the answer
	wrong  []error
}

const (
	loadSize  = 24 << 20
	loadGrain = 4096
	loadDepth = 8
)

func newLoad(t *testing.T, name string, u cluster.URIs, writeThrough bool) *load {
	t.Helper()
	id, err := block.ParseUUID(u.VolumeID())
	if err != nil {
		t.Fatal(err)
	}
	return &load{name: name, uris: u, log: checker.New(block.VolumeID{UUID: id}, loadGrain, writeThrough)}
}

// request is one of a batch that is on its way.
type request struct {
	write *checker.Write
	read  *checker.Read
	flush *checker.Flush
	data  []byte // a read's
}

// run sends batches over one connection until it breaks.
func (l *load) run(r *raw, random *rand.Rand) {
	defer r.Close()
	for l.batch(r, random) == nil {
	}
}

func (l *load) batch(r *raw, random *rand.Rand) (err error) {
	_ = r.SetDeadline(time.Now().Add(time.Minute))
	pending := map[uint64]request{}
	defer func() { l.giveUp(pending) }()
	for range 1 + random.IntN(loadDepth) {
		q, cookie, err := l.send(r, random)
		if pending[cookie] = q; err != nil {
			return err
		}
	}
	for len(pending) > 0 {
		cookie, err := r.receiveAny(func(cookie uint64) []byte { return pending[cookie].data })
		var refused errno
		switch {
		case errors.As(err, &refused):
			l.note(fmt.Errorf("%s: a request was answered with %w", l.name, err))
			return err
		case err != nil:
			return err
		}
		q, ok := pending[cookie]
		if !ok {
			l.note(fmt.Errorf("%s: an answer to request %d, which is not open", l.name, cookie))
			return errors.New("unknown cookie")
		}
		delete(pending, cookie)
		l.answered(q)
	}
	return nil
}

// send makes up one request.
func (l *load) send(r *raw, random *rand.Rand) (q request, cookie uint64, err error) {
	length := int64(1+random.IntN(16)) * loadGrain
	off := random.Int64N((loadSize-length)/loadGrain) * loadGrain
	fua := uint16(0)
	if random.IntN(8) == 0 {
		fua = flagFUA
	}
	switch n := random.IntN(20); {
	case n < 12:
		q.write = l.log.Write(off, length, fua != 0)
		p := make([]byte, length)
		q.write.Fill(p)
		cookie, err = r.send(cmdWrite, fua, off, int(length), p)
	case n < 14:
		q.write = l.log.Zero(off, length, fua != 0)
		command := []uint16{cmdTrim, cmdZeroes}[n-12]
		cookie, err = r.send(command, fua, off, int(length), nil)
	case n < 19:
		q.read, q.data = l.log.Read(off), make([]byte, length)
		cookie, err = r.send(cmdRead, 0, off, int(length), nil)
	default:
		q.flush = l.log.Flush()
		cookie, err = r.send(cmdFlush, 0, 0, 0, nil)
	}
	return q, cookie, err
}

func (l *load) answered(q request) {
	switch {
	case q.write != nil:
		q.write.Acked()
	case q.flush != nil:
		q.flush.Acked()
	default:
		if err := q.read.Returned(q.data); err != nil {
			l.note(err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked++
}

// giveUp keeps what has no answer until it is certain that nothing of it is on its way any more.
func (l *load) giveUp(pending map[uint64]request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, q := range pending {
		switch {
		case q.write != nil:
			l.unsure = append(l.unsure, q.write)
		case q.read != nil:
			q.read.Failed()
		}
	}
}

func (l *load) note(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wrong = append(l.wrong, err)
}

// settle judges the volume after a kill: the process is gone, so is all that it had not done.
func (l *load) settle(t *testing.T, s *cluster.Server, round int) {
	t.Helper()
	for _, w := range l.unsure {
		w.Ended()
	}
	l.unsure = nil
	for _, err := range l.wrong {
		t.Errorf("round %d: %v", round, err)
	}
	r := connect(t, s, l.uris)
	defer r.Close()
	if r.size != loadSize {
		t.Errorf("round %d: %s has size %d", round, l.name, r.size)
	}
	if err := l.log.Verify(r, loadSize); err != nil {
		t.Errorf("round %d: %v", round, err)
	}
}
