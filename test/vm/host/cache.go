package host

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cache is the directory outside the source tree where kernels and the root image are kept between runs.
type Cache struct {
	Dir    string
	Out    io.Writer // what takes long is told here
	Debian *Debian
	lock   *os.File
}

// tools are the programs that a run needs, with the packages that bring them.
var tools = map[string]string{
	"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "mke2fs": "e2fsprogs", "mkfs.xfs": "xfsprogs", "dpkg-deb": "dpkg",
	"apt-get": "apt", "modprobe": "kmod", "depmod": "kmod", "xz": "xz-utils", "zstd": "zstd",
}

// OpenCache makes the directory if there is none. Runs that use one cache take turns until Close.
func OpenCache(dir string, out io.Writer) (*Cache, error) {
	if err := checkTools(); err != nil {
		return nil, err
	}
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		dir = filepath.Join(base, "gabion-vm")
	}
	apt := filepath.Join(dir, "apt")
	if err := os.MkdirAll(apt, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		fmt.Fprintln(out, "vm: waiting for another run")
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			return nil, err
		}
	}
	return &Cache{Dir: dir, Out: out, Debian: &Debian{dir: apt, out: out}, lock: f}, nil
}

func checkTools() error {
	if os.Geteuid() != 0 {
		return errors.New("the VM tests build a root file system: run them as root")
	}
	var missing []string
	for tool, pkg := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			if _, err := os.Stat("/usr/sbin/" + tool); err != nil {
				missing = append(missing, pkg)
			}
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the VM tests need %s: run make setup as root", strings.Join(missing, ", "))
	}
	return nil
}

// Close lets the next run go on.
func (c *Cache) Close() error { return c.lock.Close() }

// build returns the directory name of the cache, made by fill if it is not there. A build that is cut off leaves no
// trace under the name. Older ones of the same kind with another key stay until the user removes the cache.
func (c *Cache) build(_ context.Context, name string, fill func(tmp string) error) (string, error) {
	dir := filepath.Join(c.Dir, name)
	if _, err := os.Stat(dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return dir, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return "", err
	}
	tmp := dir + ".part"
	if err := os.RemoveAll(tmp); err != nil {
		return "", err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return "", err
	}
	if err := fill(tmp); err != nil {
		return "", errors.Join(err, os.RemoveAll(tmp))
	}
	return dir, os.Rename(tmp, dir)
}

// digest is a short key for lists of names.
func digest(lists ...[]string) string {
	h := sha256.New()
	for _, l := range lists {
		fmt.Fprintln(h, strings.Join(l, " "))
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6])
}
