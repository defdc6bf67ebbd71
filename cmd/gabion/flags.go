package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gabion-storage/gabion/server/block"
)

// choice is a flag that takes one of a few words.
type choice struct {
	value   *string
	allowed []string
}

// newChoice sets *value to the first word, which is the default.
func newChoice(value *string, allowed ...string) *choice {
	*value = allowed[0]
	return &choice{value, allowed}
}

// newOptionalChoice leaves *value empty until one of the words is given.
func newOptionalChoice(value *string, allowed ...string) *choice { return &choice{value, allowed} }

func (c *choice) String() string { return *c.value }
func (c *choice) Type() string   { return strings.Join(c.allowed, "|") }
func (c *choice) Set(s string) error {
	if !slices.Contains(c.allowed, s) {
		return fmt.Errorf("it is %s", strings.Join(c.allowed, " or "))
	}
	*c.value = s
	return nil
}

// sizeFlag is a number of bytes as people write it.
type sizeFlag struct{ size *int64 }

func (f sizeFlag) Type() string { return "SIZE" }
func (f sizeFlag) String() string {
	if *f.size == 0 {
		return ""
	}
	return formatSize(*f.size)
}

func (f sizeFlag) Set(s string) error {
	n, err := parseSize(s)
	if err == nil {
		*f.size = n
	}
	return err
}

// volumeSizeFlag is a size that a volume can have.
type volumeSizeFlag struct{ sizeFlag }

// Set rounds a size that was written with a unit up to what volumes are made
// of, so that 500M is one; a number of bytes is meant exactly.
func (f volumeSizeFlag) Set(s string) error {
	n, err := parseSize(s)
	if err != nil {
		return err
	}
	if _, exact := parseBytes(s); !exact && n > 0 && n <= block.MaxVolumeSize {
		n = (n + block.SizeQuantum - 1) / block.SizeQuantum * block.SizeQuantum
	}
	if err := block.ValidateSize(n); err != nil {
		return errors.New(strings.TrimPrefix(strings.TrimPrefix(err.Error(), block.ErrInvalid.Error()+": "), block.ErrTooLarge.Error()+": "))
	}
	*f.size = n
	return nil
}

// The least is what requests wait should a server end while its device grows.
const (
	defaultOutageLimit = 24 * time.Hour
	leastOutageLimit   = 10 * time.Second
)

// outageLimit adds the flag that says how long devices outlive their servers.
func outageLimit(f *pflag.FlagSet, limit *time.Duration) {
	*limit = defaultOutageLimit
	f.Var(outageFlag{limit}, "outage-limit", "how long requests of a device wait while no server is connected, before they fail with\n"+
		"an I/O error; of devices made from now on")
}

type outageFlag struct{ limit *time.Duration }

func (f outageFlag) Type() string   { return "duration" }
func (f outageFlag) String() string { return f.limit.String() }
func (f outageFlag) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < leastOutageLimit || d%time.Second != 0 {
		return fmt.Errorf("it is whole seconds, %v or more, such as 90s or 24h", leastOutageLimit)
	}
	*f.limit = d
	return nil
}
