package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Release is the Debian release whose user land the guests run.
const Release = "bookworm"

// suites are where kernels are looked for; the archive's security suites are added to the stable ones. A suite that
// the machine's archive does not have is no error.
var suites = []string{Release, Release + "-backports", "trixie", "trixie-backports", "sid"}

// listAge is how old the package lists may be before they are fetched again.
const listAge = 24 * time.Hour

// Debian is the package archive that this machine uses, seen through lists of its own: neither the machine's sources
// nor its installed packages matter or change.
type Debian struct {
	dir string // of the lists and of what is downloaded
	out io.Writer
}

// options point apt at the private lists. Signatures are checked with the machine's keyring.
func (d *Debian) options() []string {
	set := [][2]string{
		{"Dir::Etc::sourcelist", filepath.Join(d.dir, "sources.list")}, {"Dir::Etc::sourceparts", "/dev/null"},
		{"Dir::State", filepath.Join(d.dir, "state")}, {"Dir::State::status", "/dev/null"}, {"Dir::Cache", filepath.Join(d.dir, "cache")},
		{"Acquire::Languages", "none"}, {"APT::Sandbox::User", "root"}, {"APT::Default-Release", ""},
	}
	var o []string
	for _, kv := range set {
		o = append(o, "-o", kv[0]+"="+kv[1])
	}
	return o
}

func (d *Debian) apt(ctx context.Context, tool string, args ...string) (string, error) {
	return output(ctx, d.dir, tool, append(d.options(), args...)...)
}

// Update fetches the package lists unless they are fresh. Old lists do where the archive is out of reach.
func (d *Debian) Update(ctx context.Context) error {
	stamp := filepath.Join(d.dir, "updated")
	info, err := os.Stat(stamp)
	if err == nil && time.Since(info.ModTime()) < listAge {
		return nil
	}
	old := err == nil
	if err := d.writeSources(ctx); err != nil {
		return err
	}
	if _, err := d.apt(ctx, "apt-get", "update", "-qq"); err != nil {
		if names, listErr := d.apt(ctx, "apt-cache", "pkgnames", "linux-image-"); listErr != nil || strings.TrimSpace(names) == "" {
			return fmt.Errorf("fetching Debian's package lists: %w", err)
		}
		if old {
			fmt.Fprintln(d.out, "vm: the package lists could not be fetched, older ones are used:", err)
			return nil
		}
		fmt.Fprintln(d.out, "vm: some package lists could not be fetched:", err)
	}
	return os.WriteFile(stamp, nil, 0o600)
}

// writeSources lists the suites at the places that the machine itself uses.
func (d *Debian) writeSources(ctx context.Context) error {
	for _, sub := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(d.dir, sub), 0o700); err != nil {
			return err
		}
	}
	out, err := output(ctx, "", "apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages", "Origin: Debian")
	if err != nil {
		return err
	}
	var list bytes.Buffer
	seen := map[string]bool{}
	for _, line := range strings.Split(out, "\n") {
		label, uri, ok := strings.Cut(line, "|")
		if !ok || seen[line] {
			continue
		}
		seen[line] = true
		for _, s := range suites {
			stable := s == Release || s == "trixie"
			switch {
			case label == "Debian":
				fmt.Fprintf(&list, "deb %s %s main\n", uri, s)
			case label == "Debian-Security" && stable:
				fmt.Fprintf(&list, "deb %s %s-security main\n", uri, s)
			}
		}
	}
	if list.Len() == 0 {
		return errors.New("this machine has no Debian archive in its apt sources: the VM tests need one for kernels and the guest's packages")
	}
	return os.WriteFile(filepath.Join(d.dir, "sources.list"), list.Bytes(), 0o600)
}

// Mirror is the address of the archive.
func (d *Debian) Mirror() (string, error) {
	b, err := os.ReadFile(filepath.Join(d.dir, "sources.list"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 4 && f[2] == Release {
			return f[1], nil
		}
	}
	return "", fmt.Errorf("no source of %s", Release)
}

// Package is one version of a binary package.
type Package struct {
	Name, Version string
	Depends       string
}

var kernelName = regexp.MustCompile(`^linux-image-[0-9].*-cloud-amd64$`)

// Kernel finds the newest cloud kernel: of a series such as "6.1", or of all ("latest").
func (d *Debian) Kernel(ctx context.Context, series string) (Package, error) {
	out, err := d.apt(ctx, "apt-cache", "pkgnames", "linux-image-")
	if err != nil {
		return Package{}, err
	}
	var names []string
	for _, n := range strings.Fields(out) {
		if kernelName.MatchString(n) {
			names = append(names, n)
		}
	}
	found, err := d.show(ctx, names...)
	if err != nil {
		return Package{}, err
	}
	found = slices.DeleteFunc(found, func(p Package) bool {
		return series != "latest" && !strings.HasPrefix(p.Version, series+".")
	})
	if len(found) == 0 {
		return Package{}, fmt.Errorf("KERNEL=%s: Debian offers no such cloud kernel; give a series such as 6.1, or latest", series)
	}
	return slices.MaxFunc(found, func(a, b Package) int { return compareVersions(ctx, a.Version, b.Version) }), nil
}

// compareVersions orders versions as dpkg does.
func compareVersions(ctx context.Context, a, b string) int {
	switch {
	case a == b:
		return 0
	case exec.CommandContext(ctx, "dpkg", "--compare-versions", a, "lt", b).Run() == nil:
		return -1
	default:
		return 1
	}
}

// show reads the records of packages.
func (d *Debian) show(ctx context.Context, names ...string) ([]Package, error) {
	if len(names) == 0 {
		return nil, nil
	}
	out, err := d.apt(ctx, "apt-cache", append([]string{"show", "--no-all-versions"}, names...)...)
	if err != nil {
		return nil, err
	}
	var found []Package
	for record := range strings.SplitSeq(out, "\n\n") {
		var p Package
		for line := range strings.Lines(record) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch key {
			case "Package":
				p.Name = value
			case "Version":
				p.Version = value
			case "Depends":
				p.Depends = value
			}
		}
		if p.Name != "" {
			found = append(found, p)
		}
	}
	return found, nil
}

var kernelPart = regexp.MustCompile(`linux-(?:base|binary|modules)-[0-9][^ ,]*`)

// parts are the packages that hold a kernel: newer ones have the image and the modules in packages of their own.
func (p Package) parts() []string {
	return append([]string{p.Name}, kernelPart.FindAllString(p.Depends, -1)...)
}

// Download fetches packages into dir and returns the files.
func (d *Debian) Download(ctx context.Context, dir string, names ...string) ([]string, error) {
	if _, err := output(ctx, dir, "apt-get", append(append(d.options(), "download", "-qq"), names...)...); err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(dir, "*.deb"))
}

// output runs a command and returns its standard output; a failure tells the end of what it said.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(said.String() + out.String())
		return out.String(), fmt.Errorf("%s: %w: %s", name, err, text[max(0, len(text)-2000):])
	}
	return out.String(), nil
}
