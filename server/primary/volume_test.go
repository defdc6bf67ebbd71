package primary

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// rig is a manager over one volume, one disk and a metadata service in memory.
type rig struct {
	t      testing.TB
	meta   *memMetadata
	disks  *memDisks
	disk   *memMember
	m      *Manager
	secret []byte
}

const rigSize = 64 << 20

func newRig(t testing.TB, edit func(*Map)) *rig {
	t.Helper()
	g := block.Geometry{ExtentSize: block.MinExtentSize}
	disk := block.DiskID{UUID: id(1)}
	r := &rig{t: t, secret: bytes.Repeat([]byte{7}, 32), disk: newMember(disk, g, 2*rigSize)}
	r.meta = &memMetadata{place: func(block.RunIndex) []block.DiskID { return []block.DiskID{disk} }}
	r.meta.m = Map{Volume: VolumeInfo{
		ID: block.VolumeID{UUID: id(9)}, Name: "v", Size: rigSize, WantedSize: rigSize, WaitWhenFull: true,
		BlockSize: 4096, Replicas: 1, Version: 1, CacheEpoch: 1,
	}, Attachments: []Attachment{{ID: block.AttachmentID{UUID: id(5)}, Node: "c1", TokenDigest: sha256.Sum256(r.secret)}}}
	if edit != nil {
		edit(&r.meta.m)
	}
	r.disks = &memDisks{members: []*memMember{r.disk}}
	m, err := New(Config{Metadata: r.meta, Replicas: r.disks, Geometry: g, Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	r.m = m
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

func (r *rig) name(tail string) string {
	return r.meta.m.Volume.ID.String() + "/" + base64.RawURLEncoding.EncodeToString(r.secret) + tail
}

type client struct {
	t testing.TB
	s *memStream
	d block.Device
}

func (r *rig) open(tail string) *client {
	r.t.Helper()
	c, err := r.tryOpen(tail)
	if err != nil {
		r.t.Fatalf("open: %v", err)
	}
	return c
}

func (r *rig) tryOpen(tail string) (*client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s := newStream()
	d, err := r.m.Open(ctx, r.name(tail), s)
	if err != nil {
		return nil, err
	}
	c := &client{t: r.t, s: s, d: d}
	r.t.Cleanup(d.Disconnect)
	return c, nil
}

// do submits one request and waits for its completion.
func (c *client) do(r *block.Request) error {
	c.t.Helper()
	c.send(r)
	return c.wait().Err
}

func (c *client) send(r *block.Request) {
	r.Stream = c.s
	c.d.Submit([]*block.Request{r})
}

func (c *client) wait() *block.Request {
	c.t.Helper()
	select {
	case r := <-c.s.done:
		return r
	case <-time.After(10 * time.Second):
		c.t.Fatal("no completion")
		return nil
	}
}

func (c *client) write(off int64, data []byte) error {
	return c.do(&block.Request{Op: block.OpWrite, Offset: off, Length: int64(len(data)), Data: data})
}

func (c *client) read(off, n int64) ([]byte, error) {
	r := &block.Request{Op: block.OpRead, Offset: off, Length: n}
	err := c.do(r)
	return r.Data, err
}

func (c *client) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func block4k(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

func TestServe(t *testing.T) {
	for _, slow := range []bool{false, true} {
		t.Run(fmt.Sprintf("slow=%v", slow), func(t *testing.T) {
			r := newRig(t, nil)
			r.disk.slow = slow
			c := r.open("")
			got, err := c.read(8192, 4096)
			c.must(err)
			if !bytes.Equal(got, make([]byte, 4096)) {
				t.Error("unborn does not read as zeros")
			}
			c.must(c.write(4096, block4k(1)))
			c.must(c.write(5<<20, bytes.Repeat([]byte{2}, 9<<20))) // over several runs, two of them unborn
			c.must(c.do(&block.Request{Op: block.OpTrim, Offset: 6 << 20, Length: 1 << 20}))
			c.must(c.do(&block.Request{Op: block.OpTrim, Offset: 40 << 20, Length: 20 << 20}))
			c.must(c.do(&block.Request{Op: block.OpZero, Offset: 30 << 20, Length: 4096, NoHole: true, FUA: true}))
			c.must(c.do(&block.Request{Op: block.OpFlush}))
			got, err = c.read(0, 16<<20)
			c.must(err)
			want := make([]byte, 16<<20)
			copy(want[4096:], block4k(1))
			copy(want[5<<20:], bytes.Repeat([]byte{2}, 9<<20))
			clear(want[6<<20 : 7<<20])
			if !bytes.Equal(got, want) {
				t.Error("content differs")
			}
			st, err := c.d.Status(nil, 0, rigSize, 64)
			c.must(err)
			t.Log(st)
			s := r.m.Status()[0]
			if s.Ops[block.OpWrite] != 2 || s.InFlight != 0 || s.Sessions != 1 || s.Problem != "" {
				t.Errorf("status: %+v", s)
			}
		})
	}
}

func TestSecondOpenSeesData(t *testing.T) {
	r := newRig(t, nil)
	c := r.open("/1/1")
	c.must(c.write(0, block4k(3)))
	v := r.m.opened(r.meta.m.Volume.ID)
	r.m.retireForTest(v)
	c2 := r.open("/1/2")
	got, err := c2.read(0, 4096)
	c2.must(err)
	if !bytes.Equal(got, block4k(3)) {
		t.Error("content lost")
	}
	if r.meta.m.Generation != 2 || r.meta.m.Volume.CacheEpoch != 1 {
		t.Errorf("generation %d, cache epoch %d", r.meta.m.Generation, r.meta.m.Volume.CacheEpoch)
	}
}

// retireForTest ends a volume as a deposition would.
func (m *Manager) retireForTest(v *volume) {
	v.event(func(c *Core) { c.depose(errors.New("test")) })
}

func TestRefusals(t *testing.T) {
	r := newRig(t, nil)
	for _, name := range []string{
		"", "x", r.name("/1"), r.name("/01/1"), r.name("/0/1"), r.name("/1/0"), r.name("/1/1/1"), r.name("") + "=", "/" + r.name(""),
		r.name("/+1/1"), r.name("/1/18446744073709551616"),
	} {
		if _, err := r.m.Open(t.Context(), name, newStream()); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("open %q: %v", name, err)
		}
	}
	unknown := block.VolumeID{UUID: id(77)}.String() + "/" + base64.RawURLEncoding.EncodeToString(r.secret)
	wrong := r.meta.m.Volume.ID.String() + "/" + base64.RawURLEncoding.EncodeToString(make([]byte, 32))
	_, err1 := r.m.Open(t.Context(), unknown, newStream())
	_, err2 := r.m.Open(t.Context(), wrong, newStream())
	if err1 == nil || err2 == nil || err1.Error() != err2.Error() || !errors.Is(err1, block.ErrPermission) {
		t.Errorf("unknown volume: %v; wrong token: %v", err1, err2)
	}
	if r.meta.grants != 0 {
		t.Error("a stranger made this server the primary")
	}
	r.open("/1/5")
	for tail, want := range map[string]error{"/1/4": block.ErrStale, "": block.ErrInUse, "/2/9": block.ErrUnavailable} {
		if _, err := r.tryOpen(tail); !errors.Is(err, want) {
			t.Errorf("open %s: %v, want %v", tail, err, want)
		}
	}
}
