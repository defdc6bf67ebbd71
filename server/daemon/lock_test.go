package daemon

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

func TestLockDir(t *testing.T) {
	dir := t.TempDir()
	unlock, err := LockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = LockDir(dir)
	if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second lock: got %v, want the holder named", err)
	}
	if err := unlock(); err != nil {
		t.Error(err)
	}
	unlock, err = LockDir(dir)
	if err != nil {
		t.Fatalf("after the first: %v", err)
	}
	unlock()
	if _, err := LockDir(dir + "/none"); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("no directory: got %v", err)
	}
}
