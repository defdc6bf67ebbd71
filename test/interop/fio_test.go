package interop

import (
	"testing"
)

// fio writes self-describing blocks at random offsets and reads each back.
func TestFioVerify(t *testing.T) {
	need(t, "fio")
	for _, c := range []struct {
		name  string
		flags []string
		args  []string
	}{
		{"4 KiB random", nil, []string{"--bs=4k", "--rw=randwrite", "--iodepth=32"}},
		{"512 byte sectors", []string{"--block-size", "512"}, []string{"--bs=512", "--rw=randwrite", "--iodepth=16", "--io_size=4m"}},
		{"mixed sizes", nil, []string{"--bsrange=4k-256k", "--blockalign=4k", "--rw=randrw", "--iodepth=16", "--verify_backlog=64"}},
		{"large sequential", nil, []string{"--bs=1m", "--rw=write", "--iodepth=4"}},
		{"with flushes", nil, []string{"--bs=16k", "--rw=randwrite", "--iodepth=8", "--fsync=32"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := newVolume(t, "64MiB", c.flags...)
			run(t, "fio", append([]string{"--name=verify", "--ioengine=nbd", "--uri=" + v.Socket, "--size=64m",
				"--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--randseed=1"}, c.args...)...)
		})
	}
}

// Four writers on four connections, each in its quarter of the volume, then one reader that checks all of it.
func TestFioVerifyFourConnections(t *testing.T) {
	need(t, "fio")
	v := newVolume(t, "64MiB")
	args := []string{"--name=verify", "--ioengine=nbd", "--uri=" + v.TCP, "--bs=4k", "--rw=randwrite", "--iodepth=16",
		"--numjobs=4", "--size=16m", "--offset_increment=16m", "--verify=crc32c", "--verify_fatal=1", "--randseed=1"}
	run(t, "fio", append(args, "--do_verify=0")...)
	run(t, "fio", append(args, "--verify_only")...)
}

// Trimmed blocks read as zeros while the others keep what was written.
func TestFioTrim(t *testing.T) {
	need(t, "fio")
	v := newVolume(t, "64MiB")
	for _, rw := range []string{"write", "randtrim"} {
		run(t, "fio", "--name="+rw, "--ioengine=nbd", "--uri="+v.Socket, "--size=64m", "--bs=64k", "--rw="+rw, "--iodepth=8")
	}
	if n := allocated(t, v.image()); n > 1<<20 {
		t.Errorf("a trimmed volume uses %d bytes", n)
	}
}
