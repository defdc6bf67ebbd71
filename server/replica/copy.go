package replica

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
)

// Sealed is what a copy says of itself when it was sealed.
type Sealed struct {
	Incarnation block.Incarnation
	Unflushed   bool                // some region is marked unflushed
	Lost        []block.ExtentIndex // committed here, but without a good record
}

// seat is a volume's place on a disk over all open instances of the disk: what
// must survive an instance is its fence.
type seat struct {
	fence
	sealing sync.Mutex // one seal at a time; held across its I/O
}

// Copy is one volume on one open instance of one disk. Once the instance has
// ended every operation fails with ErrIO, a read with ErrUnavailable; the Store
// then hands out another Copy. Safe for concurrent use.
type Copy struct {
	store *Store
	seat  *seat
	disk  *image.Disk
	desc  image.Description

	mu  sync.Mutex
	img *image.Image // set by the first Seal; read without mu between enter and exit, which follow it
}

// Disk is the disk the copy lies on.
func (c *Copy) Disk() block.DiskID { return c.disk.ID() }

// Seal raises the copy to generation g, durably, once everything admitted
// before has finished, and makes the image if the disk has none. size is the
// volume's in bytes; a larger image is left as it is. born: the committed runs
// placed on this disk.
//
// ErrStale: the disk has seen a higher generation. ErrPrecondition: something was
// written here outside the committed runs. ErrUnavailable: older
// operations did not finish before ctx ended; the copy stays closed. ErrIO: the
// instance has ended.
func (c *Copy) Seal(ctx context.Context, g block.Generation, size int64, born []block.RunIndex) (Sealed, error) {
	c.seat.sealing.Lock()
	defer c.seat.sealing.Unlock()
	if err := c.seat.shut(ctx); err != nil {
		return Sealed{}, c.wrap("seal", err)
	}
	img, err := c.open(size)
	if err != nil {
		return Sealed{}, c.wrap("seal", err)
	}
	if g >= img.Generation() { // else it is refused below, and nothing else matters
		if err := compare(img, born); err != nil {
			return Sealed{}, c.wrap("seal", err)
		}
	}
	if err := img.Seal(g); err != nil {
		return Sealed{}, c.wrap("seal", err)
	}
	if img.Size() < size {
		if err := img.Grow(size); err != nil {
			return Sealed{}, c.wrap("seal", err)
		}
	}
	c.describe(img)
	s := Sealed{Incarnation: c.disk.Incarnation(), Unflushed: img.Unflushed(), Lost: img.Lost(born)}
	if err := c.disk.Err(); err != nil {
		return Sealed{}, c.wrap("seal", err)
	}
	c.seat.open(g)
	return s, nil
}

// compare refuses a map of the volume that lacks runs which were written here:
// it comes from a metadata service that was restored from before, and serving
// by it would show zeros in place of data (H70).
func compare(img *image.Image, born []block.RunIndex) error {
	strangers, err := img.Strangers(born)
	if err != nil || len(strangers) == 0 {
		return err
	}
	return fmt.Errorf("%w: %d written extents here, the first is %d, are unknown to the metadata service, which must have been restored from an older backup; restore a newer one",
		block.ErrPrecondition, len(strangers), strangers[0])
}

// describe brings volume.json up to date, if it is damaged or says something
// else. Only readers without the metadata service need it: a full disk is no
// reason to serve nothing. An I/O error ends the instance, as everywhere.
func (c *Copy) describe(img *image.Image) {
	if d, ok := img.Description(); ok && d.Name == c.desc.Name && maps.Equal(d.Policy, c.desc.Policy) {
		return
	}
	if err := img.SetDescription(c.desc); err != nil {
		c.store.cfg.Log.Warn("volume.json cannot be written", "volume_id", c.desc.ID.String(), "disk_id", c.disk.ID().String(), "err", err)
	}
}

// open finds or makes the image and stores it for the operations that follow.
func (c *Copy) open(size int64) (*image.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	img, err := c.disk.Image(c.desc.ID)
	if errors.Is(err, block.ErrNotFound) {
		desc := c.desc
		desc.Size = size
		img, err = c.disk.CreateImage(desc)
	}
	if err != nil {
		return nil, err
	}
	if c.img != img { // else nothing may be stored: Release reads it outside the fence
		c.img = img
	}
	return img, nil
}

// enter admits an operation of generation g. The fence was opened after img was
// set, and is shared by all instances, so an old instance's Copy may get in: its
// image then fails with ErrIO.
func (c *Copy) enter(g block.Generation) (*image.Image, error) {
	if err := c.seat.enter(g); err != nil {
		return nil, err
	}
	if c.img == nil {
		c.seat.exit()
		return nil, c.wrap("enter", fmt.Errorf("%w: this copy was never sealed", block.ErrStale))
	}
	return c.img, nil
}

// Birth makes the runs present and zero, durably; see image.Image.Birth.
func (c *Copy) Birth(_ context.Context, g block.Generation, runs []block.RunIndex) error {
	img, err := c.enter(g)
	if err != nil {
		return err
	}
	defer c.seat.exit()
	return c.noteSpace(img.Birth(g, runs))
}

// Grow makes the image at least size bytes long, durably.
func (c *Copy) Grow(_ context.Context, g block.Generation, size int64) error {
	img, err := c.enter(g)
	if err != nil {
		return err
	}
	defer c.seat.exit()
	if img.Size() >= size {
		return nil
	}
	return img.Grow(size)
}

// Reserve takes space credit for io; see image.Image.Reserve.
func (c *Copy) Reserve(io *block.IO) error {
	img, err := c.enter(io.Generation)
	if err != nil {
		return err
	}
	defer c.seat.exit()
	return c.noteSpace(img.Reserve(io))
}

// Release gives back the credit of an io that will not be written. It comes after a Reserve that succeeded, so the image is there.
func (c *Copy) Release(io *block.IO) { c.img.Release(io) }

// TryWrite is Write if that does not block. done false and no error: nothing
// happened and the credit is still held. With an error it is given back.
func (c *Copy) TryWrite(io *block.IO) (done bool, err error) {
	img, err := c.enter(io.Generation)
	if err != nil {
		c.Release(io)
		return true, err
	}
	done, err = img.TryWrite(io)
	c.seat.exit()
	return done, err
}

// WriteCached is Write if that waits for nothing but the page cache; done false
// and no error: nothing happened and the credit is still held.
func (c *Copy) WriteCached(io *block.IO) (done bool, err error) {
	img, err := c.enter(io.Generation)
	if err != nil {
		c.Release(io)
		return true, err
	}
	done, err = img.WriteCached(io)
	c.seat.exit()
	return done, c.noteSpace(err)
}

// Write carries io out and gives its credit back in any case; see image.Image.Write.
func (c *Copy) Write(io *block.IO) error {
	img, err := c.enter(io.Generation)
	if err != nil {
		c.Release(io)
		return err
	}
	err = img.Write(io)
	c.seat.exit()
	return c.noteSpace(err)
}

// TryRead is Read if that does not block; done false: p is undefined.
func (c *Copy) TryRead(g block.Generation, p []byte, off int64) (done bool, err error) {
	img, err := c.enter(g)
	if err != nil {
		return false, err
	}
	done, err = img.TryReadAt(p, off)
	c.seat.exit()
	return done, c.rangeError(err)
}

// Read fills p from off. ErrIO and ErrCorrupt concern this range only;
// ErrUnavailable: the instance has ended.
func (c *Copy) Read(g block.Generation, p []byte, off int64) error {
	img, err := c.enter(g)
	if err != nil {
		return err
	}
	err = img.ReadAt(p, off)
	c.seat.exit()
	return c.rangeError(err)
}

// rangeError tells a reader apart what lies in its range from what became of
// the disk: with the instance gone, nothing was learnt about the range.
func (c *Copy) rangeError(err error) error {
	if err == nil || c.disk.Err() == nil {
		return err
	}
	return c.wrap("read", fmt.Errorf("%w: %v", block.ErrUnavailable, err))
}

// Status appends what is allocated in a range; see image.Image.Status.
func (c *Copy) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	c.mu.Lock()
	img := c.img
	c.mu.Unlock()
	if img == nil {
		return dst, c.wrap("status", fmt.Errorf("%w: this copy was never sealed", block.ErrStale))
	}
	return img.Status(dst, off, length, limit)
}

// Sync makes every write completed before the call durable.
func (c *Copy) Sync(_ context.Context, g block.Generation) error {
	img, err := c.enter(g)
	if err != nil {
		return err
	}
	defer c.seat.exit()
	return img.Sync()
}

// ClearMarks forgets the marks that a completed Sync made redundant. With one
// copy per run every disk of the run is in, so both kinds go together.
func (c *Copy) ClearMarks(_ context.Context, g block.Generation, upto block.Sequence) error {
	img, err := c.enter(g)
	if err != nil {
		return err
	}
	defer c.seat.exit()
	return img.ClearMarks(upto, image.Behind|image.Unflushed)
}

// Allocated is the space the copy takes on its disk, in bytes.
func (c *Copy) Allocated() (int64, error) {
	img, err := c.disk.Image(c.desc.ID)
	if err != nil {
		return 0, err
	}
	return img.Allocated()
}

// noteSpace remembers that somebody was refused for space, so that the store
// tells when there is room again.
func (c *Copy) noteSpace(err error) error {
	if err != nil && errors.Is(err, block.ErrNoSpace) {
		c.store.starved.Store(true)
	}
	return err
}

func (c *Copy) wrap(op string, err error) error {
	return fmt.Errorf("%s volume %s on disk %s: %w", op, c.desc.ID, c.disk.ID(), err)
}
