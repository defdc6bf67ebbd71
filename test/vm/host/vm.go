package host

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// Machine is what every boot of a run shares.
type Machine struct {
	Kernel  *Kernel
	Root    string // image, never written
	Payload string // image, never written
	Initrd  string
	Data    string // image that boots write and power cuts keep
	Console string // file for the kernel's and the guest's console output
	Keep    string // where KeepConsole puts that: this, the kernel's version and a number
	CPU     string // model, as the emulator names it
	Append  string // more words for the kernel's command line
}

// fork is the machine with another disk and console, for a guest that runs beside others.
func (m *Machine) fork(n int) *Machine {
	fork := *m
	fork.Data, fork.Console = fmt.Sprintf("%s.%d", m.Data, n), fmt.Sprintf("%s.%d", m.Console, n)
	fork.Keep = fmt.Sprintf("%s-%s-%d.log", m.Keep, m.Kernel.Version(), n)
	return &fork
}

// KeepConsole copies the console's output to where it outlives the run, and returns its name.
func (m *Machine) KeepConsole() (string, error) {
	b, err := os.ReadFile(m.Console)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(m.Keep), 0o755); err != nil {
		return "", err
	}
	return m.Keep, os.WriteFile(m.Keep, b, 0o600)
}

// VM is one boot.
type VM struct {
	cmd    *exec.Cmd
	Events <-chan lab.Event // closed when the VM has ended
	exited chan struct{}
}

// Boot starts the emulator. The memory is in MiB; the words are added to the kernel's command line.
func (m *Machine) Boot(ctx context.Context, memory, cpus int, words ...string) (*VM, error) {
	cmdline := append([]string{"console=ttyS0", "loglevel=4", "panic=-1", "net.ifnames=0", "log_buf_len=8M",
		"mitigations=off", "init_on_alloc=0", "nokaslr", "apparmor=0", "audit=0", m.Append}, words...)
	disk := func(file, options string) []string {
		return []string{"-drive", "if=virtio,format=raw,file=" + file + "," + options}
	}
	args := []string{
		"-accel", "tcg,thread=multi", "-cpu", m.CPU, "-m", fmt.Sprint(memory), "-smp", fmt.Sprint(cpus),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-chardev", "file,id=console,append=on,path=" + m.Console, "-serial", "chardev:console",
		"-chardev", "stdio,id=events,signal=off", "-serial", "chardev:events",
		"-kernel", m.Kernel.Image, "-initrd", m.Initrd, "-append", strings.Join(cmdline, " "),
	}
	args = append(args, disk(m.Root, "snapshot=on,cache=unsafe")...)
	args = append(args, disk(m.Payload, "readonly=on")...)
	// A write that the guest has handed over is kept by the host: the volatile cache that a power cut empties is the
	// guest's page cache.
	args = append(args, disk(m.Data, "cache=unsafe,discard=unmap")...)
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	events := make(chan lab.Event, 64)
	v := &VM{cmd: cmd, Events: events, exited: make(chan struct{})}
	go func() {
		readEvents(out, events)
		_ = cmd.Wait() // how it ended is told by its events
		close(events)
		close(v.exited)
	}()
	return v, nil
}

func readEvents(out io.Reader, events chan<- lab.Event) {
	s := bufio.NewScanner(out)
	s.Buffer(nil, 4<<20)
	for s.Scan() {
		var e lab.Event
		if err := json.Unmarshal(s.Bytes(), &e); err == nil {
			events <- e
		}
	}
}

// Used is what the emulator took of the host's processors so far.
func (v *VM) Used() time.Duration {
	select {
	case <-v.exited:
		return v.cmd.ProcessState.UserTime() + v.cmd.ProcessState.SystemTime()
	default:
	}
	const perProcess = 2 // CPUCLOCK_SCHED: clock ids of other processes are made of their number, see clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^v.cmd.Process.Pid<<3|perProcess), &ts); err != nil { // it ends just now
		return 0
	}
	return time.Duration(ts.Nano())
}

// Kill ends the VM as a power failure does. Events that were not read are lost.
func (v *VM) Kill() {
	_ = v.cmd.Process.Kill()
	for range v.Events { //nolint:revive // so that the reader ends
	}
	<-v.exited
}
