package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// bootModules are loaded before there is a root file system, in this order with what they depend on.
var bootModules = []string{"virtio_pci", "virtio_blk", "ext4"}

// guestModules is what the scenarios may load. What a kernel has built in or does not know is left out.
var guestModules = []string{
	"nbd", "xfs", "loop", "veth", "sch_netem", "nf_tables", "inet_diag", "tcp_diag", "unix_diag", "tls",
	"dm_mod", "dm_crypt", "af_alg", "algif_skcipher", "algif_hash", "aesni_intel", "xts", "sha256_generic", "sha256_ssse3", "essiv", "cbc",
	"crc32c_generic", "crc32c_intel",
}

// Kernel is an unpacked kernel.
type Kernel struct {
	Package Package
	Release string   // as uname -r
	Image   string   // path of vmlinuz
	Root    string   // directory with lib/modules/<Release>, uncompressed
	Boot    []string // module files of bootModules in loading order, relative to Root
}

// Version is the release without what Debian adds to it.
func (k *Kernel) Version() string {
	version, _, _ := strings.Cut(k.Release, "-cloud")
	version, _, _ = strings.Cut(version, "+")
	return version
}

// FetchKernel finds, downloads and unpacks a kernel, or takes it from the cache.
func (c *Cache) FetchKernel(ctx context.Context, series string) (*Kernel, error) {
	if err := c.Debian.Update(ctx); err != nil {
		return nil, err
	}
	p, err := c.Debian.Kernel(ctx, series)
	if err != nil {
		return nil, err
	}
	dir, err := c.build(ctx, filepath.Join("kernel", p.Name+"_"+p.Version+"_"+digest(bootModules, guestModules)), func(tmp string) error {
		return c.unpackKernel(ctx, p, tmp)
	})
	if err != nil {
		return nil, fmt.Errorf("kernel %s %s: %w", p.Name, p.Version, err)
	}
	releases, err := os.ReadDir(filepath.Join(dir, "lib/modules"))
	if err != nil || len(releases) != 1 {
		return nil, fmt.Errorf("%s holds no single kernel: %w", dir, err)
	}
	boot, err := os.ReadFile(filepath.Join(dir, "boot-modules"))
	if err != nil {
		return nil, err
	}
	return &Kernel{Package: p, Release: releases[0].Name(), Image: filepath.Join(dir, "vmlinuz"), Root: dir, Boot: strings.Fields(string(boot))}, nil
}

// unpackKernel lays out vmlinuz, lib/modules and boot-modules in dir.
func (c *Cache) unpackKernel(ctx context.Context, p Package, dir string) error {
	fmt.Fprintln(c.Out, "vm: fetching", p.Name, p.Version)
	all := filepath.Join(dir, "all")
	if err := os.Mkdir(all, 0o700); err != nil {
		return err
	}
	debs, err := c.Debian.Download(ctx, dir, p.parts()...)
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if _, err := output(ctx, dir, "dpkg-deb", "-x", deb, all); err != nil {
			return err
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	images, _ := filepath.Glob(filepath.Join(all, "boot/vmlinuz-*"))
	if more, _ := filepath.Glob(filepath.Join(all, "usr/lib/modules/*/vmlinuz")); len(images) == 0 {
		images = more
	}
	if len(images) != 1 {
		return fmt.Errorf("%v hold %d kernel images", p.parts(), len(images))
	}
	if err := os.Rename(images[0], filepath.Join(dir, "vmlinuz")); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(all, "lib/modules")); errors.Is(err, fs.ErrNotExist) {
		if err := os.Symlink("usr/lib", filepath.Join(all, "lib")); err != nil {
			return err
		}
	}
	if err := pickModules(ctx, all, dir); err != nil {
		return err
	}
	return os.RemoveAll(all)
}

// pickModules copies the modules that are used, uncompressed, from the tree all to the tree dir.
func pickModules(ctx context.Context, all, dir string) error {
	releases, err := os.ReadDir(filepath.Join(all, "lib/modules"))
	if err != nil || len(releases) != 1 {
		return fmt.Errorf("modules of %d kernels: %w", len(releases), err)
	}
	release := releases[0].Name()
	if _, err := output(ctx, "", "depmod", "-b", all, release); err != nil {
		return err
	}
	var boot []string
	for i, name := range slices.Concat(bootModules, guestModules) {
		files, err := moduleFiles(ctx, all, release, name)
		if err != nil && i < len(bootModules)+1 { // and nbd
			return err
		}
		for _, from := range files {
			to, err := copyModule(ctx, all, dir, from)
			if err != nil {
				return err
			}
			if i < len(bootModules) && !slices.Contains(boot, to) {
				boot = append(boot, to)
			}
		}
	}
	for _, f := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if b, err := os.ReadFile(filepath.Join(all, "lib/modules", release, f)); err == nil {
			if err := os.WriteFile(filepath.Join(dir, "lib/modules", release, f), b, 0o600); err != nil {
				return err
			}
		}
	}
	if _, err := output(ctx, "", "depmod", "-b", dir, release); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "boot-modules"), []byte(strings.Join(boot, "\n")), 0o600)
}

// moduleFiles are the files of a module and of what it depends on, in loading order.
func moduleFiles(ctx context.Context, root, release, name string) ([]string, error) {
	out, err := output(ctx, "", "modprobe", "-d", root, "-S", release, "--show-depends", name)
	if err != nil {
		return nil, err
	}
	var files []string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "insmod" {
			files = append(files, f[1])
		}
	}
	return files, nil
}

// copyModule uncompresses a module of the tree all into the tree dir and returns its path there.
func copyModule(ctx context.Context, all, dir, from string) (string, error) {
	at := strings.Index(from, "/lib/modules/")
	if at < 0 {
		return "", fmt.Errorf("%s is no module of %s", from, all)
	}
	name, packed := from[at+1:], filepath.Ext(from)
	var b []byte
	var err error
	switch packed {
	case ".ko":
		b, err = os.ReadFile(from)
	case ".xz", ".zst":
		name = strings.TrimSuffix(name, packed)
		var out string
		out, err = output(ctx, "", map[string]string{".xz": "xz", ".zst": "zstd"}[packed], "-dc", from)
		b = []byte(out)
	default:
		err = fmt.Errorf("%s: a compression that is not known here", from)
	}
	if err != nil {
		return "", err
	}
	to := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return "", err
	}
	return name, os.WriteFile(to, b, 0o600)
}
