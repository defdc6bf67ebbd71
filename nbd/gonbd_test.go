//go:build cgo || amd64

package nbd_test

import (
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"unsafe"

	"github.com/gabion-storage/gabion/nbd/wire"
	gonbd "github.com/pojntfx/go-nbd/pkg/client"
	"golang.org/x/sys/unix"
)

// go-nbd's client shakes hands for a kernel device. There need be none: in a process of its own the ioctls of the
// kernel's nbd driver succeed without doing anything, and the transmission phase is then tried by hand.
func TestGoNBDClient(t *testing.T) {
	s := serve(t, nil)
	s.volume.WriteAt(block4k(7), 0)
	for _, at := range [][2]string{{"unix", s.unix}, {"tcp", s.tcp}} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "NBD_TEST_HELPER=go-nbd", "NBD_TEST_NETWORK="+at[0], "NBD_TEST_SOCKET="+at[1])
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("over %s: %v\n%s", at[0], err, out)
		}
	}
}

func init() { helpers["go-nbd"] = helperGoNBD }

func helperGoNBD() {
	check := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	check(ignoreDeviceCalls())
	nc, err := net.Dial(os.Getenv("NBD_TEST_NETWORK"), os.Getenv("NBD_TEST_SOCKET"))
	check(err)
	device, err := os.Open(os.DevNull)
	check(err)
	check(gonbd.Connect(nc, device, &gonbd.Options{ExportName: "v"}))
	_, err = nc.Write(wire.Request{Cookie: 1, Length: 4096}.Append(nil))
	check(err)
	p := make([]byte, wire.SimpleReplySize+4096)
	_, err = io.ReadFull(nc, p)
	check(err)
	if p[4]|p[5]|p[6]|p[7] != 0 || p[16] != 7 || p[len(p)-1] != 7 {
		panic("the read brought something else")
	}
}

// ignoreDeviceCalls makes the ioctls of the nbd driver (0xab..) succeed without being executed.
func ignoreDeviceCalls() error {
	const (
		retAllow = 0x7fff0000
		retErrno = 0x00050000 // of 0: success
		nr, cmd  = 0, 24      // in struct seccomp_data: the number, the second argument's low half
	)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_IOCTL, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: cmd},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xffffff00},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0xab00, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: retErrno},
		{Code: unix.BPF_RET | unix.BPF_K, K: retAllow},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}
