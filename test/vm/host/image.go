package host

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// packages of the guest besides Debian's minimum: what a storage node has, and what the scenarios look with.
var packages = []string{
	"kmod", "udev", "iproute2", "nftables", "procps", "util-linux", "mount", "e2fsprogs", "xfsprogs",
	"libnbd-bin", "cryptsetup-bin", "dmsetup", "lvm2", "btrfs-progs", "fdisk", "psmisc", "strace",
}

// mountPoints exist in the root image for what the guest mounts.
var mountPoints = []string{"gabion", "data", "lib/modules"}

const imageSize = "1400M"

// RootImage is the path of the guest's root file system, made once.
func (c *Cache) RootImage(ctx context.Context) (string, error) {
	if err := c.Debian.Update(ctx); err != nil {
		return "", err
	}
	mirror, err := c.Debian.Mirror()
	if err != nil {
		return "", err
	}
	dir, err := c.build(ctx, filepath.Join("root", Release+"_"+digest(packages, mountPoints)), func(tmp string) error {
		fmt.Fprintln(c.Out, "vm: building the guest's root image, once; this takes a minute or two")
		tree := filepath.Join(tmp, "tree")
		include := "--include=" + strings.Join(packages, ",")
		if _, err := output(ctx, tmp, "debootstrap", "--variant=minbase", include, Release, tree, mirror); err != nil {
			return err
		}
		if err := trim(tree); err != nil {
			return err
		}
		for _, m := range mountPoints {
			if err := os.MkdirAll(filepath.Join(tree, m), 0o755); err != nil {
				return err
			}
		}
		if _, err := output(ctx, tmp, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", tree, filepath.Join(tmp, "root.img"), imageSize); err != nil {
			return err
		}
		return os.RemoveAll(tree)
	})
	if err != nil {
		return "", fmt.Errorf("root image: %w", err)
	}
	return filepath.Join(dir, "root.img"), nil
}

// trim removes what a guest never reads.
func trim(tree string) error {
	for _, pattern := range []string{"var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "lib/modules/*"} {
		found, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil {
			return err
		}
		for _, f := range found {
			if err := os.RemoveAll(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// WritePayload makes the file system image with what changes from run to run: the binaries and the kernel's modules.
func WritePayload(ctx context.Context, image string, k *Kernel, binaries ...string) error {
	tree, err := os.MkdirTemp(filepath.Dir(image), "payload")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tree) }()
	bin := filepath.Join(tree, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return err
	}
	for _, from := range binaries {
		if err := copyFile(filepath.Join(bin, filepath.Base(from)), from, 0o755); err != nil {
			return err
		}
	}
	if err := os.CopyFS(filepath.Join(tree, "lib"), os.DirFS(filepath.Join(k.Root, "lib"))); err != nil {
		return err
	}
	_, err = output(ctx, "", "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", tree, image, "160M")
	return err
}

// WriteInitrd makes the archive with which the kernel starts: the first program and the modules that find its disks.
func WriteInitrd(file string, k *Kernel, initial string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := newCPIO(f)
	for _, dir := range []string{"dev", "proc", "root", "modules"} {
		w.dir(dir)
	}
	program, err := os.ReadFile(initial)
	if err != nil {
		return err
	}
	w.file("init", program)
	for i, m := range k.Boot {
		b, err := os.ReadFile(filepath.Join(k.Root, m))
		if err != nil {
			return err
		}
		w.file(fmt.Sprintf("modules/%02d.ko", i), b)
	}
	if err := w.close(); err != nil {
		return err
	}
	return f.Close()
}

// WriteDataDisk makes the empty disk that power cuts keep.
func WriteDataDisk(ctx context.Context, file string) error {
	const size = 16 << 30 // sparse
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(file, size); err != nil {
		return err
	}
	_, err := output(ctx, "", "mkfs.xfs", "-q", file)
	return err
}

func copyFile(to, from string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Close()
}
