package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// MakeDir makes a directory in a parent that is there. made is false if it was
// there; anything else there is ErrPrecondition.
func (l *Linux) MakeDir(path string) (made bool, err error) {
	err = os.Mkdir(path, 0o750)
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Lstat(path)
		if err != nil {
			return false, fmt.Errorf("%w: %s: %w", block.ErrIO, path, err)
		}
		if !info.IsDir() {
			return false, fmt.Errorf("%w: %s is %s, not a directory: remove it", block.ErrPrecondition, path, kind(info))
		}
		return false, nil
	}
	return err == nil, wrapMake(path, err)
}

// MakeFile makes an empty file in a parent that is there. made is false if it
// was there; anything else there, a file with content too, is ErrPrecondition.
func (l *Linux) MakeFile(path string) (made bool, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_CLOEXEC, 0o640)
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Lstat(path)
		if err != nil {
			return false, fmt.Errorf("%w: %s: %w", block.ErrIO, path, err)
		}
		if !info.Mode().IsRegular() || info.Size() != 0 {
			return false, fmt.Errorf("%w: %s is %s: remove it", block.ErrPrecondition, path, kind(info))
		}
		return false, nil
	}
	if err == nil {
		err = f.Close()
	}
	return err == nil, wrapMake(path, err)
}

func wrapMake(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s: its parent directory is missing", block.ErrPrecondition, path)
	}
	return fmt.Errorf("%w: %s: %w", block.ErrIO, path, err)
}

func kind(info fs.FileInfo) string {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return "a directory"
	case mode.IsRegular():
		return "a file with content"
	case mode&fs.ModeSymlink != 0:
		return "a symbolic link"
	case mode&fs.ModeDevice != 0:
		return "a device node"
	}
	return "neither a file nor a directory"
}

// Remove removes an empty directory, an empty file, a link or a node, if it is
// there. What has content stays and is ErrPrecondition.
func (l *Linux) Remove(path string) error {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().IsRegular() && info.Size() != 0 {
		return fmt.Errorf("%w: %s has content and is not mounted: it stays", block.ErrPrecondition, path)
	}
	if err == nil {
		err = os.Remove(path)
	}
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return nil
	case errors.Is(err, unix.ENOTEMPTY):
		return fmt.Errorf("%w: %s is not mounted and not empty: it stays", block.ErrPrecondition, path)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: %s is mounted", block.ErrInUse, path)
	}
	return fmt.Errorf("%w: %s: %w", block.ErrIO, path, err)
}
