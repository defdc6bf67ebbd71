package mount

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// Linux is the host. It has no state; all methods are safe for concurrent use,
// as far as they concern different devices and paths. What may wait for a device
// waits in a child.
type Linux struct{}

// NewLinux returns the host.
func NewLinux() *Linux { return &Linux{} }

// Try mounts a file system where nobody can see it and lets it go again.
func (l *Linux) Try(f FileSystem) error {
	_, err := apart(mountTask(doTry, f, ""))
	return err
}

func try(f FileSystem) error {
	fd, err := open(f)
	if err == nil {
		_ = unix.Close(fd) // the mount's only reference
	}
	return err
}

// Mount mounts a file system at a directory. It shows there complete or not at all.
func (l *Linux) Mount(f FileSystem, point string) error {
	_, err := apart(mountTask(doMount, f, point))
	return err
}

func mountAt(f FileSystem, point string) error {
	fd, err := open(f)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := move(fd, point); err != nil {
		return err
	}
	announce(f, point)
	return nil
}

// open makes a mount of a file system that is nowhere yet.
func open(f FileSystem) (int, error) {
	ctx, err := unix.Fsopen(string(f.Type), unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.ENODEV) {
		return 0, fmt.Errorf("%w: this kernel has no %s: modprobe %s", block.ErrUnsupported, f.Type, f.Type)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: fsopen %s: %w", block.ErrIO, f.Type, err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigSetString(ctx, "source", f.Device); err != nil {
		return 0, fmt.Errorf("%w: %s on %s: %w", sentinel(err), f.Type, f.Device, err)
	}
	for _, p := range parameters(f) {
		if p.isFlag {
			err = unix.FsconfigSetFlag(ctx, p.key)
		} else {
			err = unix.FsconfigSetString(ctx, p.key, p.value)
		}
		if err != nil {
			return 0, fmt.Errorf("%w: mount option %s: this kernel's %s does not take it: %w%s", block.ErrInvalid, p.key, f.Type, err, said(ctx))
		}
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return 0, fmt.Errorf("%w: %s on %s cannot be mounted: %w%s%s", sentinel(err), f.Type, f.Device, err, remedy(f, err), said(ctx))
	}
	attributes := f.Options.attributes
	if f.ReadOnly {
		attributes |= unix.MOUNT_ATTR_RDONLY
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, int(attributes))
	if err != nil {
		return 0, fmt.Errorf("%w: %s on %s cannot be mounted: %w", sentinel(err), f.Type, f.Device, err)
	}
	return fd, nil
}

// parameters are what the file system is told, the driver's own first.
func parameters(f FileSystem) (list []parameter) {
	flag := func(key string) { list = append(list, parameter{key: key, isFlag: true}) }
	if f.ReadOnly {
		flag("ro") // before what only a read-only mount may ask for
	}
	switch {
	case f.Type == XFS:
		if !f.Options.has("nouuid") {
			flag("nouuid") // a clone has its origin's, and both may be on one node
		}
		if f.ReadOnly {
			flag("norecovery")
		}
	case f.ReadOnly:
		flag("noload")
	case !f.Options.has("errors"):
		list = append(list, parameter{key: "errors", value: "remount-ro"})
	}
	return append(list, f.Options.parameters...)
}

// sentinel is what an errno of mounting means.
func sentinel(err error) error {
	switch {
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		return block.ErrCorrupt
	case errors.Is(err, unix.EBUSY):
		return block.ErrInUse
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EOPNOTSUPP):
		return block.ErrPrecondition
	case errors.Is(err, unix.ENOENT):
		return block.ErrNotFound
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		return block.ErrUnavailable
	}
	return block.ErrIO
}

func remedy(f FileSystem, err error) string {
	if f.Type == XFS && errors.Is(sentinel(err), block.ErrCorrupt) {
		return "; attach the volume elsewhere and run xfs_repair"
	}
	return ""
}

// said is what the kernel has to say about a mount that failed.
func said(ctx int) string {
	var all []string
	buf := make([]byte, 1024)
	for range 16 {
		n, err := unix.Read(ctx, buf)
		if err != nil || n <= 2 {
			break
		}
		all = append(all, string(bytes.TrimSpace(buf[2:n]))) // "e ", "w " or "i "
	}
	if len(all) == 0 {
		return ""
	}
	return "; the kernel says: " + oneLine(strings.Join(all, "; "))
}

// move shows a mount at a path, whose last part is not followed if it is a link.
func move(fd int, point string) error {
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, point, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("%w: mount at %s: %w", sentinel(err), point, err)
	}
	return nil
}

// utab is where the tools of util-linux keep the options that the kernel does
// not know. systemd reads it to end network mounts before the network.
const utab = "/run/mount/utab"

// announce says that a mount needs the network; best effort.
func announce(f FileSystem, point string) {
	_, _ = run("mount", "--fake", "--internal-only", "--types", string(f.Type), "--options", "_netdev", f.Device, point)
}

func retract(point string) {
	if b, err := os.ReadFile(utab); err == nil && bytes.Contains(b, []byte(" TARGET="+point+" ")) {
		_, _ = run("umount", "--fake", "--internal-only", "--no-canonicalize", point)
	}
}

// BindFS shows the file system that is mounted at source at the directory
// target, if it is device n's.
func (l *Linux) BindFS(source, target string, n Number, readOnly bool) error {
	return bind(source, target, readOnly, func(st *unix.Stat_t) error {
		if got := number(st.Dev); got != n {
			return fmt.Errorf("%w: what is at %s is of device %s, not %s", block.ErrPrecondition, source, got, n)
		}
		return nil
	})
}

// BindNode shows the device node source at the file target, if it is device n's.
func (l *Linux) BindNode(source, target string, n Number, readOnly bool) error {
	return bind(source, target, readOnly, func(st *unix.Stat_t) error {
		if got := number(st.Rdev); st.Mode&unix.S_IFMT != unix.S_IFBLK || got != n {
			return fmt.Errorf("%w: %s is not the node of device %s", block.ErrPrecondition, source, n)
		}
		return nil
	})
}

// bind compares and changes the very mount that it then shows: nothing can be
// put in its place meanwhile, and no writable one ever shows where a read-only one is due.
func bind(source, target string, readOnly bool, check func(*unix.Stat_t) error) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", sentinel(err), source, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("%w: %s: %w", block.ErrIO, source, err)
	}
	if err := check(&st); err != nil {
		return err
	}
	if readOnly {
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("%w: %s read-only: %w", sentinel(err), target, err)
		}
	}
	return move(fd, target)
}

// Unmount removes the topmost mount at point, and nothing that is in use.
func (l *Linux) Unmount(point string) error {
	_, err := apart(task{Do: doUnmount, Point: point})
	return err
}

// What is busy for a moment only is not in use: a process that is being started has the descriptors of who starts it,
// until its program is loaded.
const (
	busyPatience = time.Second
	busyLook     = 20 * time.Millisecond
)

func unmount(point string) error {
	err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW)
	for end := time.Now().Add(busyPatience); errors.Is(err, unix.EBUSY) && time.Now().Before(end); {
		time.Sleep(busyLook)
		err = unix.Unmount(point, unix.UMOUNT_NOFOLLOW)
	}
	switch {
	case err == nil:
		retract(point)
		return nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		return nil // not a mount; who must know looks into the table
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: %s is busy: a process has files open there or works in it", block.ErrInUse, point)
	default:
		return fmt.Errorf("%w: unmount %s: %w", block.ErrIO, point, err)
	}
}
