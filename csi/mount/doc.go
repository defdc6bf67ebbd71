// Package mount is what the node plugin does to a Linux host: it reads the
// mount table, says what is on a block device, makes, checks, grows, mounts and
// unmounts file systems, and binds them to a pod's directory.
//
// It decides nothing. Whether a device may be formatted is not for it to say,
// and nothing it finds, or fails to find, on a device proves that it is blank.
//
// # The mount table
//
// A mount is known by its id, its device number and its root; never by the name
// of a device, which the kernel reuses. What is mounted at a path is told by
// the table alone: no path of a mounted file system is looked up, because one
// whose device is gone answers every look with an error, or never. Paths are
// compared after the symbolic links of the parent directory are resolved.
//
// # How things are mounted
//
//	file system  fsopen, fsmount, move_mount; then mount(8) with --fake, which mounts nothing and
//	             notes _netdev in /run/mount/utab, by which systemd knows that the network
//	             must outlive the mount
//	trial        fsopen, fsmount: mounted where nobody can see it, and gone when let go
//	bind         open_tree, fstat, mount_setattr, move_mount: what is bound is compared with the
//	             device that was meant, and made read-only, before it shows anywhere
//	unmount      umount2 without MNT_DETACH or MNT_FORCE: busy is an error, never hidden
//
// # Children
//
// Whoever waits in the kernel for a device that does not answer cannot be killed,
// and what he has open stays open: of a plugin, its socket and its locks, without
// which the next one cannot begin. So whatever reads, writes or syncs a device is
// done by a child (child.go): the program itself, started anew as gabion-mount, in
// a process group of its own and with none of the plugin's files. It is sent
// SIGKILL when the plugin dies, so that no mount shows that nobody waits for. An
// unmount is complete in the table before it begins to wait; until it ends the
// device is claimed, and so is neither formatted, mounted nor given up.
//
// What is asked of a mounted file system's memory (Usage), and mounts of what is
// mounted already, touch no device and need no child.
//
// # Options of mkfs
//
// A volume is thin: an extent costs space from its first write on, so metadata
// is packed together and what reads as zeros is not written. On a volume of
// which no extent was ever born (Blank), ext4 is told that the device is zeroed;
// else the tables are zeroed in the background after the first mount.
//
//	ext4  -b 4096 -m 0 -E packed_meta_blocks=1,lazy_itable_init=1,lazy_journal_init=1, and
//	      Blank: nodiscard,assume_storage_prezeroed=1; else discard
//	xfs   from 512 GiB on: -l size=256m; Blank: -K; else the device is discarded
//
// Of a 64 TiB volume, 32 extents of 64 MiB are born by mkfs.ext4 and 72 by
// mkfs.xfs (without packed_meta_blocks: 32,797).
//
// # Tools
//
// mkfs, fsck and the tools that grow a file system are never killed: their
// calls take no context and return when the tool ends. They run in a process
// group of their own, so that they outlive the plugin. Two of them never work on
// one device at a time, whoever started them: each claims it (O_EXCL), as a
// mount does.
//
// Their output is quoted in errors, cut to a line. Mount options are checked
// against a table of known ones with typed values (options.go), so that no
// option can carry a secret or a second option.
package mount
