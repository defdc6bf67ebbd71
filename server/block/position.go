package block

import "fmt"

// Fixed by the format; see server/image/DESIGN.md.
const (
	// ExtentsPerRun is how many consecutive extents one placement decision covers.
	ExtentsPerRun = 16
	// MarksPerExtent is how many mark bits a record has: one per MiB of a 64 MiB extent.
	MarksPerExtent = 64
	// DefaultExtentSize is the extent size of a cluster that names none, in bytes.
	DefaultExtentSize = 64 << 20
	// MinExtentSize lets tests cross many extents cheaply: one 4 KiB block per mark.
	MinExtentSize = MarksPerExtent * 4096
	// MaxExtentSize bounds what one record stands for.
	MaxExtentSize = 1 << 30
	// MaxVolumeSize is the largest volume, in bytes.
	MaxVolumeSize = 64 << 40
	// SizeQuantum is what every volume size is a multiple of, in bytes.
	SizeQuantum = 4096
	// LockGrain is the grain of the range lock and of credits, in bytes.
	LockGrain = 4096
	// MaxPayload is the largest READ or WRITE, in bytes; TRIM and WRITE_ZEROES are bounded by 32 bits only.
	MaxPayload = 32 << 20
)

// ExtentIndex numbers a volume's extents from 0; RunIndex its runs.
type (
	ExtentIndex uint32
	RunIndex    uint32
)

// Geometry turns offsets into extents and runs. ExtentSize is a power of two
// from MinExtentSize to MaxExtentSize, fixed when the cluster is created.
type Geometry struct{ ExtentSize int64 }

// Validate returns ErrInvalid for a size that no cluster can have.
func (g Geometry) Validate() error {
	if g.ExtentSize < MinExtentSize || g.ExtentSize > MaxExtentSize || g.ExtentSize&(g.ExtentSize-1) != 0 {
		return fmt.Errorf("%w: extent size %d is not a power of two from %d to %d bytes",
			ErrInvalid, g.ExtentSize, MinExtentSize, MaxExtentSize)
	}
	return nil
}

// Extent is the extent that holds the byte at off.
func (g Geometry) Extent(off int64) ExtentIndex { return ExtentIndex(off / g.ExtentSize) }

// Run is the run that holds the byte at off.
func (g Geometry) Run(off int64) RunIndex { return RunIndex(off / g.RunSize()) }

// RunSize is the address space of a run, in bytes.
func (g Geometry) RunSize() int64 { return g.ExtentSize * ExtentsPerRun }

// RegionSize is the address space of one mark, in bytes.
func (g Geometry) RegionSize() int64 { return g.ExtentSize / MarksPerExtent }

// Extents is how many extents a volume of size bytes has, the last one perhaps partial.
func (g Geometry) Extents(size int64) int64 { return (size + g.ExtentSize - 1) / g.ExtentSize }

// Runs is how many runs a volume of size bytes has.
func (g Geometry) Runs(size int64) int64 { return (size + g.RunSize() - 1) / g.RunSize() }

// RunOf is the run an extent belongs to.
func (e ExtentIndex) RunOf() RunIndex { return RunIndex(e / ExtentsPerRun) }

// First is the first extent of a run.
func (r RunIndex) First() ExtentIndex { return ExtentIndex(r) * ExtentsPerRun }

// ValidateSize returns ErrInvalid or ErrTooLarge unless size is one a volume can have.
func ValidateSize(size int64) error {
	switch {
	case size <= 0:
		return fmt.Errorf("%w: a volume's size must be positive, not %d", ErrInvalid, size)
	case size > MaxVolumeSize:
		return fmt.Errorf("%w: %d bytes; the largest volume is 64TiB (%d bytes)", ErrTooLarge, size, int64(MaxVolumeSize))
	case size%SizeQuantum != 0:
		return fmt.Errorf("%w: size %d is not a multiple of %d bytes; the next is %d",
			ErrInvalid, size, SizeQuantum, (size/SizeQuantum+1)*SizeQuantum)
	}
	return nil
}
