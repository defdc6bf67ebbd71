package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/csi/driver"
)

// Fill writes a file into the volume from its beginning, over the wire, as a consumer does who is no node: the volume is
// attached to nobody else. The flags are nbdcopy's.
func (s *Server) Fill(v *Volume, file string, flags ...string) {
	uri := s.Attach(v.ID, "filler")
	s.t.Sh("nbdcopy", append(flags, "--flush", file, uri)...)
	s.Detach(v.ID, "filler")
}

// File makes a file of a size in MiB below the scenario's directory and runs a shell command on it, which has its path
// as $1. It is gone after the scenario.
func (t *T) File(name string, mib int, command string) string {
	path := filepath.Join(t.Dir, name)
	t.Check(os.WriteFile(path, nil, 0o600), "%s", name)
	t.Check(os.Truncate(path, int64(mib)<<20), "%s", name)
	t.Sh("sh", "-e", "-c", command, "sh", path)
	return path
}

// Poke writes bytes into a file.
func (t *T) Poke(path string, off int64, b []byte) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	t.Check(err, "%s", path)
	_, err = f.WriteAt(b, off)
	t.Check(err, "%s", path)
	t.Check(f.Close(), "%s", path)
}

// Peek reads bytes of a file.
func (t *T) Peek(path string, off int64, n int) []byte {
	f, err := os.Open(path)
	t.Check(err, "%s", path)
	defer func() { _ = f.Close() }()
	b := make([]byte, n)
	_, err = f.ReadAt(b, off)
	t.Check(err, "%s", path)
	return b
}

// Holds ends the scenario unless the volume, as the server's disk has it, begins with the content of a file.
func (s *Server) Holds(v *Volume, file string) {
	a, b := open(s.t, file), open(s.t, s.Image(v))
	defer func() { _, _ = a.Close(), b.Close() }()
	x, y := make([]byte, 1<<20), make([]byte, 1<<20)
	for off := int64(0); ; off += int64(len(x)) {
		n, _ := a.ReadAt(x, off)
		if n == 0 {
			return
		}
		if m, _ := b.ReadAt(y[:n], off); m != n || !bytes.Equal(x[:n], y[:n]) {
			s.t.Fatalf("volume %s has changed in MiB %d", v.Name, off>>20)
		}
	}
}

func open(t *T, path string) *os.File {
	f, err := os.Open(path)
	t.Check(err, "%s", path)
	return f
}

// Touched is a mark of a volume's image that every write to it changes.
func (s *Server) Touched(v *Volume) string {
	var st syscall.Stat_t
	s.t.Check(syscall.Stat(s.Image(v), &st), "the image of %s", v.Name)
	return fmt.Sprintf("written at %d.%09d, %d blocks", st.Mtim.Sec, st.Mtim.Nsec, st.Blocks)
}

// Born is how much of the volume takes space on the server's disk, in bytes. A volume that was never written to has no image.
func (s *Server) Born(v *Volume) int64 {
	var st syscall.Stat_t
	err := syscall.Stat(s.Image(v), &st)
	if errors.Is(err, syscall.ENOENT) {
		return 0
	}
	s.t.Check(err, "the image of %s", v.Name)
	return st.Blocks * 512
}

// NotStaged makes sure that a call of the volume is refused with these words, and leaves no device and no mount.
func (v *Volume) NotStaged(what string, words ...string) {
	ctx, cancel := v.t.call()
	defer cancel()
	v.t.Refused(v.TryStage(ctx), what, words...)
	if d := v.Devices(); len(d) > 0 {
		v.t.Fatalf("%s: the refused stage leaves %s", what, strings.Join(d, " "))
	}
	if Mounted(v.Staging()) {
		v.t.Fatalf("%s: the refused stage leaves a mount", what)
	}
}

// Abnormal is what the node says is wrong with the volume's condition; "": nothing.
func (v *Volume) Abnormal() (message string) {
	v.must("stats", func(ctx context.Context) error {
		a, err := v.TryStats(ctx)
		if err != nil {
			return err
		}
		if abnormal, m, _ := driver.Condition(a); abnormal {
			message = m
		}
		return nil
	})
	return message
}
