package nbd_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"github.com/gabion-storage/gabion/server/block"
)

// script runs a transcript against a server with the volumes v, ro and big and with names that are refused.
func script(t *testing.T, name string) *served {
	t.Helper()
	s := serve(t, func(_ *nbd.Config, s *served) {
		ro := nbdtest.NewMemory(size)
		ro.ReadOnly = true
		s.exports.Volumes["ro"] = ro
		s.exports.Volumes["big"] = nbdtest.NewMemory(5 << 30)
		s.exports.Refuse["lost"] = fmt.Errorf("volume lost: %w", block.ErrCacheLost)
		s.exports.Refuse["denied"] = fmt.Errorf("volume denied: %w", block.ErrPermission)
		s.exports.Refuse["busy"] = fmt.Errorf("volume busy is attached to n1: %w", block.ErrInUse)
		s.exports.Refuse["later"] = fmt.Errorf("volume later is not served here: %w", block.ErrUnavailable)
		s.exports.Refuse["broken"] = errors.New("something else")
	})
	transcript(t, s, name)
	return s
}

func TestB001ExportNames(t *testing.T)      { script(t, "b001") }
func TestB003List(t *testing.T)             { script(t, "b003") }
func TestB004UnknownOptions(t *testing.T)   { script(t, "b004") }
func TestB006ExportNameReply(t *testing.T)  { script(t, "b006") }
func TestB009ReadOnly(t *testing.T)         { script(t, "b009") }
func TestB010BlockSizes(t *testing.T)       { script(t, "b010") }
func TestB012BlockStatusAtEnd(t *testing.T) { script(t, "b012") }
func TestB014TrimAcrossEnd(t *testing.T)    { script(t, "b014") }
func TestB015ZeroLength(t *testing.T)       { script(t, "b015") }
func TestB022LengthLimits(t *testing.T)     { script(t, "b022") }
func TestB023UnknownCommands(t *testing.T)  { script(t, "b023") }
func TestGoNBDHandshake(t *testing.T)       { script(t, "go-nbd") }
func TestRefusals(t *testing.T)             { script(t, "refusals") }

func TestB016OffsetsWrap(t *testing.T) {
	s := script(t, "b016")
	if n := s.volume.Allocated(); n != 0 {
		t.Errorf("refused requests changed %d bytes", n)
	}
}
