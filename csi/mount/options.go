package mount

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// Options are mount options that were checked against what the file system
// takes. The zero value is none.
type Options struct {
	attributes uint64 // of the mount: MOUNT_ATTR_*
	readOnly   bool
	parameters []parameter // of the file system
	text       []string    // as they were asked for, in order, without repeats and words without effect
}

type parameter struct {
	key, value string
	isFlag     bool
}

// Strings are the options in a form that is the same for equal options.
func (o Options) Strings() []string { return slices.Clone(o.text) }

// ReadOnly reports whether "ro" is among the options. It is meant for what is
// shown to pods; the file system itself is mounted as the device is.
func (o Options) ReadOnly() bool { return o.readOnly }

// takes is what values an option has.
type takes struct {
	what    string         // for people
	pattern *regexp.Regexp // nil: none
	also    bool           // also without a value
}

// The kinds of options. No value of any of them can be a path, another option or free text.
func kinds() (flag, number, size, label takes, words func(...string) takes) {
	number = takes{what: "a number", pattern: regexp.MustCompile(`^[0-9]{1,9}$`)}
	size = takes{what: "a size such as 64k", pattern: regexp.MustCompile(`^[0-9]{1,9}[kKmMgG]?$`)}
	label = takes{what: "an SELinux label", pattern: regexp.MustCompile(`^"?[A-Za-z0-9_.]+:[A-Za-z0-9_.]+:[A-Za-z0-9_.]+(:[A-Za-z0-9_.:,-]+)?"?$`)}
	words = func(list ...string) takes {
		return takes{what: strings.Join(list, " or "), pattern: regexp.MustCompile("^(" + strings.Join(list, "|") + ")$")}
	}
	return takes{}, number, size, label, words
}

// attributes are the options of a mount, whatever is mounted; 0: the default said aloud.
func attributes() map[string]uint64 {
	return map[string]uint64{
		"defaults": 0, "rw": 0, "suid": 0, "dev": 0, "exec": 0, "atime": 0, "diratime": 0, "async": 0, "relatime": 0, "_netdev": 0, "nofail": 0, "symfollow": 0,
		"nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
		"noatime": unix.MOUNT_ATTR_NOATIME, "strictatime": unix.MOUNT_ATTR_STRICTATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME,
		"nosymfollow": unix.MOUNT_ATTR_NOSYMFOLLOW,
	}
}

// known are the options of a file system. Left out on purpose: what opens
// other devices or files (logdev, journal_path), stops the node (errors=panic),
// gives up promises about flushed data (nobarrier), is the driver's own
// decision (noload, norecovery, remount, bind), or is gone.
func known(t FS) map[string]takes {
	flag, number, size, label, words := kinds()
	list := map[string]takes{
		"sync": flag, "dirsync": flag, "lazytime": flag,
		"context": label, "fscontext": label, "defcontext": label, "rootcontext": label,
		"discard": flag, "nodiscard": flag, "grpid": flag, "nogrpid": flag, "bsdgroups": flag, "sysvgroups": flag,
		"quota": flag, "noquota": flag, "usrquota": flag, "grpquota": flag, "prjquota": flag,
	}
	only := map[FS]map[string]takes{
		Ext4: {
			"data": words("ordered", "journal", "writeback"), "data_err": words("ignore", "abort"), "errors": words("remount-ro", "continue"),
			"commit": number, "max_batch_time": number, "min_batch_time": number, "journal_ioprio": number, "inode_readahead_blks": number,
			"stripe": number, "max_dir_size_kb": number, "resuid": number, "resgid": number, "mb_optimize_scan": words("0", "1"),
			"barrier": words("1"), "journal_checksum": flag, "nojournal_checksum": flag, "delalloc": flag, "nodelalloc": flag,
			"auto_da_alloc": flag, "noauto_da_alloc": flag, "dioread_lock": flag, "dioread_nolock": flag, "block_validity": flag, "noblock_validity": flag,
			"user_xattr": flag, "nouser_xattr": flag, "acl": flag, "noacl": flag, "i_version": flag, "noinit_itable": flag,
			"init_itable": {what: number.what, pattern: number.pattern, also: true},
		},
		XFS: {
			"allocsize": size, "logbsize": size, "logbufs": number, "sunit": number, "swidth": number,
			"filestreams": flag, "ikeep": flag, "noikeep": flag, "inode32": flag, "inode64": flag, "largeio": flag, "nolargeio": flag,
			"noalign": flag, "swalloc": flag, "wsync": flag, "nouuid": flag, "attr2": flag, "noattr2": flag,
			"uquota": flag, "gquota": flag, "pquota": flag, "uqnoenforce": flag, "gqnoenforce": flag, "pqnoenforce": flag, "qnoenforce": flag,
		},
	}
	maps.Copy(list, only[t])
	return list
}

// ParseOptions checks mount options, each an option or several with commas
// between them. ErrInvalid names the flag by its place and says what there is.
func ParseOptions(t FS, flags []string) (Options, error) {
	var o Options
	if t != Ext4 && t != XFS {
		return o, fmt.Errorf("%w: file system %.40q: it is %s or %s", block.ErrInvalid, t, Ext4, XFS)
	}
	attrs, params := attributes(), known(t)
	for i, flag := range flags {
		for _, word := range splitOptions(flag) {
			if err := o.add(word, attrs, params); err != nil {
				return Options{}, fmt.Errorf("%w: mount flag %d, %.60q, %s", block.ErrInvalid, i+1, word, because(err, t, params))
			}
		}
	}
	return o, nil
}

// errOption is what is wrong with one option; errNoSuch: that it is none.
type errOption string

const errNoSuch errOption = ""

func (e errOption) Error() string { return string(e) }

func because(err error, t FS, params map[string]takes) string {
	if text := err.Error(); text != "" {
		return text
	}
	names := slices.Sorted(maps.Keys(params))
	return fmt.Sprintf("is not an option of %s that can be used here. These can, besides ro, noatime, nodiratime, strictatime, nosuid, nodev and noexec: %s",
		t, strings.Join(names, ", "))
}

func (o *Options) add(word string, attrs map[string]uint64, params map[string]takes) error {
	if word == "" || slices.Contains(o.text, word) {
		return nil
	}
	if word == "ro" {
		o.readOnly = true
		o.text = append(o.text, word)
		return nil
	}
	if bits, isAttribute := attrs[word]; isAttribute {
		if bits != 0 {
			o.attributes |= bits
			o.text = append(o.text, word)
		}
		if o.attributes&unix.MOUNT_ATTR__ATIME == unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME {
			return errOption("contradicts noatime or strictatime")
		}
		return nil
	}
	key, value, hasValue := strings.Cut(word, "=")
	takes, isKnown := params[key]
	switch {
	case !isKnown:
		return errNoSuch
	case takes.pattern == nil && hasValue:
		return errOption("takes no value")
	case takes.pattern != nil && !hasValue && !takes.also, hasValue && !takes.pattern.MatchString(value):
		return errOption("takes " + takes.what)
	case slices.ContainsFunc(o.parameters, func(p parameter) bool { return p.key == key }):
		return errOption("is there twice")
	}
	o.parameters = append(o.parameters, parameter{key: key, value: strings.Trim(value, `"`), isFlag: !hasValue})
	o.text = append(o.text, word)
	return nil
}

// splitOptions splits at commas that are not between quotes.
func splitOptions(flag string) []string {
	quoted := false
	return strings.FieldsFunc(flag, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// has reports whether an option of the file system is given.
func (o Options) has(key string) bool {
	return slices.ContainsFunc(o.parameters, func(p parameter) bool { return p.key == key })
}
