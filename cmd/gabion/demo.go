package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	nbd "github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const demoHelp = `A guided tour on this machine, in half a minute: a server on loopback, a volume
created, attached, written and verified, grown while it is in use, and verified
again after a kill -9 of the server. Nothing needs root; everything is in a
temporary directory and is removed at the end.`

func (a *app) demoCommand() *cobra.Command {
	var keep bool
	amount := int64(256 * chunk)
	cmd := &cobra.Command{
		Use: "demo", Short: "A guided tour on this machine, without root", Long: demoHelp, Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			if !keep {
				runtime.LockOSThread() // the server dies with the thread that started it
			}
			return a.runDemo(ctx, amount, keep)
		}),
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the server and the volume running, and print how to use them")
	cmd.Flags().Var(sizeFlag{&amount}, "write", "`SIZE` of what is written and verified, at most 1GiB")
	return cmd
}

// tour is one run of the demo.
type tour struct {
	*app
	screen *screen
	server *child
	keep   bool

	volume *metapb.Volume
	uri    string
	disk   *nbd.Client
	size   int64 // of the pattern, in bytes
	seed   uint64

	acknowledged int64 // bytes from the start that the second round was told are written
}

const (
	tourName = "tour"
	tourSize = 1 << 30
	tourGrow = 2 << 30
	chunk    = 1 << 20
	streams  = 8
)

func (a *app) runDemo(ctx context.Context, amount int64, keep bool) (err error) {
	if amount < 8*chunk || amount > tourSize {
		return usagef("--write %s: it is at least 8MiB and at most 1GiB", formatSize(amount))
	}
	dir, err := os.MkdirTemp("", "gabion-demo-")
	if err != nil {
		return err
	}
	t := &tour{app: a, screen: newScreen(a.out), keep: keep, seed: uint64(time.Now().UnixNano())}
	defer func() {
		if keep && err == nil {
			return
		}
		if t.server != nil {
			err = errors.Join(err, t.server.kill()) // nothing to do after an orderly end
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	if t.server, err = newChild(dir, keep); err != nil {
		return err
	}
	t.servers = t.server.metadata()
	if t.size, err = patternSize(dir, amount); err != nil {
		return err
	}
	t.screen.say("Gabion in half a minute: one server, one disk, in %s\n", dir)
	for _, step := range t.steps() {
		if err := t.screen.step(step.name, func() (string, error) { return step.do(ctx) }); err != nil {
			return err
		}
	}
	if keep {
		t.farewell(dir)
	}
	return nil
}

type tourStep struct {
	name string
	do   func(context.Context) (string, error)
}

func (t *tour) steps() []tourStep {
	amount := formatSize(t.size)
	all := []tourStep{
		{"gabion server --bootstrap", t.start},
		{"gabion volume create " + tourName + " --size 1GiB", t.create},
		{"gabion attach " + tourName, t.attach},
		{"write " + amount, t.write},
		{"verify " + amount, t.verify},
		{"gabion volume resize " + tourName + " --size 2GiB", t.grow},
		{"gabion status", t.status},
		{"kill -9 the server while it is written to", t.crash},
		{"gabion server, again", t.restart},
		{"verify " + amount + " and what was acknowledged last", t.verifyCrash},
	}
	if t.keep {
		return all
	}
	return append(all,
		tourStep{"gabion detach " + tourName, t.detach},
		tourStep{"gabion volume delete " + tourName, t.remove},
		tourStep{"SIGTERM to the server", func(context.Context) (string, error) { return "ended in order", t.server.stop() }},
	)
}

func (t *tour) start(ctx context.Context) (string, error) {
	if err := t.server.start(ctx); err != nil {
		return "", err
	}
	return "ready at " + t.servers, nil
}

func (t *tour) create(ctx context.Context) (string, error) {
	err := t.ask(ctx, func(ctx context.Context, c *client.Client) (err error) {
		t.volume, err = c.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: tourName, Size: tourSize, Policy: &metapb.Policy{
			Replicas: 1, Durability: metapb.Policy_FLUSH,
		}})
		return err
	})
	return "thin: it uses nothing yet", err
}

func (t *tour) attach(ctx context.Context) (string, error) {
	var view attachView
	err := t.ask(ctx, func(ctx context.Context, c *client.Client) error {
		r, err := c.Attach(ctx, &metapb.AttachRequest{Volume: &metapb.VolumeRef{Id: t.volume.GetId()}, Node: tourName})
		if err == nil {
			view, err = viewAttach(r)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	t.uri = view.SocketURI
	return "over a UNIX socket", t.connect(ctx)
}

func (t *tour) connect(ctx context.Context) (err error) {
	target, err := nbd.ParseURI(t.uri)
	if err != nil {
		return err
	}
	t.disk, err = nbd.Dial(ctx, target, nbd.Config{})
	return err
}

func (t *tour) write(ctx context.Context) (string, error) {
	p := t.screen.progress("writing", t.size)
	err := chunks(ctx, t.size, func(off int64, buf []byte) error {
		t.pattern(buf, off, 0)
		if err := t.writeAt(buf, off); err != nil {
			return err
		}
		p.add(chunk)
		return nil
	})
	if err == nil {
		err = t.disk.Flush()
	}
	return p.done() + ", flushed", err
}

func (t *tour) verify(ctx context.Context) (string, error) {
	p := t.screen.progress("verifying", t.size)
	err := chunks(ctx, t.size, func(off int64, buf []byte) error {
		if err := t.readAt(buf, off); err != nil {
			return err
		}
		p.add(chunk)
		return t.compare(buf, off, 0)
	})
	return p.done(), err
}

func (t *tour) writeAt(p []byte, off int64) error { _, err := t.disk.WriteAt(p, off); return err }
func (t *tour) readAt(p []byte, off int64) error  { _, err := t.disk.ReadAt(p, off); return err }

func (t *tour) grow(ctx context.Context) (string, error) {
	err := t.ask(ctx, func(ctx context.Context, c *client.Client) (err error) {
		t.volume, err = c.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: &metapb.VolumeRef{Id: t.volume.GetId()}, Size: tourGrow})
		return err
	})
	return "while it is connected", err
}

func (t *tour) status(ctx context.Context) (string, error) {
	var s statusView
	err := t.ask(ctx, func(ctx context.Context, c *client.Client) (err error) {
		s, err = readStatus(ctx, c)
		return err
	})
	if err != nil {
		return "", err
	}
	health := "all is well"
	if len(s.Conditions) > 0 {
		health = s.Conditions[0].Problem
	}
	return fmt.Sprintf("%s; %d volume of %s", health, s.Volumes, formatSize(s.ProvisionedSize)), nil
}

// crash kills the server in the middle of writes that nobody flushes. They go
// over the first part of the pattern, so that what was not acknowledged has
// something old to be.
func (t *tour) crash(ctx context.Context) (string, error) {
	var acknowledged atomic.Int64
	enough := make(chan struct{})
	writing := make(chan error, 1)
	go func() {
		buf := make([]byte, chunk/16)
		for off := int64(0); off < t.size; off += int64(len(buf)) {
			t.pattern(buf, off, 1)
			if err := t.writeAt(buf, off); err != nil {
				writing <- err
				return
			}
			if acknowledged.Add(int64(len(buf))) == 4*chunk {
				close(enough)
			}
		}
		writing <- nil
	}()
	select {
	case <-enough:
	case err := <-writing:
		return "", err
	}
	err := t.server.kill()
	<-writing // it fails, or was done
	_ = t.disk.Close()
	t.acknowledged = acknowledged.Load()
	return fmt.Sprintf("after %s more, acknowledged but not flushed", formatSize(t.acknowledged)), err
}

func (t *tour) restart(ctx context.Context) (string, error) {
	if err := t.server.start(ctx); err != nil {
		return "", err
	}
	return "connected again", t.connect(ctx)
}

func (t *tour) verifyCrash(ctx context.Context) (string, error) {
	if got := t.disk.Export().Size; got != tourGrow {
		return "", fmt.Errorf("%w: the volume has %s, not %s", block.ErrCorrupt, formatSize(got), formatSize(tourGrow))
	}
	p := t.screen.progress("verifying", t.size)
	err := chunks(ctx, t.size, func(off int64, buf []byte) error {
		if err := t.readAt(buf, off); err != nil {
			return err
		}
		p.add(chunk)
		const grain = 4096
		for at := int64(0); at < chunk; at += grain {
			b := buf[at : at+grain]
			isNew, isOld := t.compare(b, off+at, 1), t.compare(b, off+at, 0)
			if off+at < t.acknowledged && isNew != nil {
				return fmt.Errorf("an acknowledged write was lost: %w", isNew)
			}
			if isNew != nil && isOld != nil {
				return isOld
			}
		}
		return nil
	})
	return p.done() + ": every acknowledged byte is there", err
}

func (t *tour) detach(ctx context.Context) (string, error) {
	err := t.disk.Close()
	return "its URI opens nothing any more", errors.Join(err, t.ask(ctx, func(ctx context.Context, c *client.Client) error {
		_, err := c.Detach(ctx, &metapb.DetachRequest{Volume: &metapb.VolumeRef{Id: t.volume.GetId()}, Node: tourName})
		return err
	}))
}

func (t *tour) remove(ctx context.Context) (string, error) {
	return "its space is free again", t.ask(ctx, func(ctx context.Context, c *client.Client) error {
		_, err := c.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: &metapb.VolumeRef{Id: t.volume.GetId()}})
		return err
	})
}

// farewell says how to go on with what was kept.
func (t *tour) farewell(dir string) {
	u, err := url.Parse(t.uri)
	if err != nil {
		return
	}
	t.screen.say(`
The server keeps running (process %[1]d, directory %[2]s). Try:

  export GABION_SERVER=%[3]s
  gabion status
  URI='%[4]s'
  nbdinfo "$URI"
  qemu-img info "$URI"
  nbdcopy --progress "$URI" %[2]s/copy.img
  sudo nbd-client -unix %[5]s -N %[6]s /dev/nbd0

End it with: kill %[1]d; rm -r %[2]s`,
		t.server.cmd.Process.Pid, dir, t.servers, t.uri, filepath.Join(dir, "nbd.sock"), u.Path[1:])
}
