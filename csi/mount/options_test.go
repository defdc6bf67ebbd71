package mount_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

func TestOptions(t *testing.T) {
	tests := []struct {
		fs    mount.FS
		flags []string
		want  []string // canonical form
		err   string   // else: what the refusal says
	}{
		{fs: "ext4", flags: nil},
		{fs: "ext4", flags: []string{"noatime", "noatime", "defaults", "_netdev", "rw"}, want: []string{"noatime"}},
		{fs: "ext4", flags: []string{"noatime,nodiratime", "commit=5"}, want: []string{"noatime", "nodiratime", "commit=5"}},
		{fs: "ext4", flags: []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`, "discard"},
			want: []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`, "discard"}},
		{fs: "ext4", flags: []string{"init_itable", "data=journal"}, want: []string{"init_itable", "data=journal"}},
		{fs: "xfs", flags: []string{"ro", "logbsize=256k", "nouuid"}, want: []string{"ro", "logbsize=256k", "nouuid"}},
		{fs: "ext4", flags: []string{"nosuchopt"}, err: "mount flag 1, \"nosuchopt\", is not an option of ext4"},
		{fs: "ext4", flags: []string{"noatime", "logbsize=256k"}, err: "mount flag 2"},
		{fs: "ext4", flags: []string{"errors=panic"}, err: "takes remount-ro or continue"},
		{fs: "ext4", flags: []string{"commit=five"}, err: "takes a number"},
		{fs: "ext4", flags: []string{"commit"}, err: "takes a number"},
		{fs: "ext4", flags: []string{"discard=1"}, err: "takes no value"},
		{fs: "ext4", flags: []string{"commit=5", "commit=6"}, err: "twice"},
		{fs: "ext4", flags: []string{"noatime", "strictatime"}, err: "contradicts"},
		{fs: "ext4", flags: []string{"commit=5\n"}, err: "takes a number"},
		{fs: "ext4", flags: []string{"context=a b"}, err: "takes an SELinux label"},
		{fs: "btrfs", flags: nil, err: `file system "btrfs"`},
		{fs: "", flags: nil, err: "file system"},
	}
	for _, tt := range tests {
		o, err := mount.ParseOptions(tt.fs, tt.flags)
		if tt.err != "" {
			if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s %q: %v", tt.fs, tt.flags, err)
			}
			continue
		}
		if err != nil || !slices.Equal(o.Strings(), tt.want) {
			t.Errorf("%s %q: %q, %v", tt.fs, tt.flags, o.Strings(), err)
		}
	}
}

// What opens other files, stops the node, or is the driver's own decision is no option of anybody.
func TestOptionsNobodyMayGive(t *testing.T) {
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		for _, flag := range []string{
			"remount", "bind", "rbind", "move", "loop", "offset=512", "sizelimit=1", "noload", "norecovery", "nobarrier", "barrier=0",
			"logdev=/dev/sda", "rtdev=/dev/sda", "journal_path=/etc/shadow", "journal_dev=8:1", "errors=panic", "sb=1", "helper=x", "x-mount.mkdir",
			"dax", "shared", "private", "source=/dev/sda", "usrjquota=../x", "test_dummy_encryption", "=", "=x", "-o", "--bind", "ro=1", "NOATIME",
		} {
			if _, err := mount.ParseOptions(fs, []string{flag}); !errors.Is(err, block.ErrInvalid) {
				t.Errorf("%s takes %q: %v", fs, flag, err)
			}
		}
	}
}
