package daemon

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// hardened marks the second start of a process that Harden started anew.
const hardened = "GABION_HARDENED"

// Harden prepares the process for the time when memory is short, in which a
// consumer's kernel on the same host writes back to the very server that needs
// memory for that. Every part is tried; the errors are sentences about those
// that could not be had. It never fails the caller.
//
//   - No thread waits for write-back of its own when it allocates
//     (PR_SET_IO_FLUSHER, Linux 5.6, CAP_SYS_RESOURCE). Threads have that from the
//     thread that started them, and a runtime has threads before main: so the
//     process starts anew, once, with the same id, arguments and files. Harden
//     then does not return. Call it from the main thread, before anything is
//     opened or started; a signal that a dead parent is to send stays set.
//   - The kernel kills every other process first (oom_score_adj, CAP_SYS_RESOURCE).
//   - What is in memory stays there, as it comes to be used (mlockall with
//     MCL_ONFAULT, Linux 4.4, CAP_IPC_LOCK): an idle process stays small.
func Harden() []error { return take(ioFlusher, lastKilled, inMemory) }

// HardenRunner is Harden for a process that runs tools, which may need much
// memory: they would inherit its place among those to be killed, so it keeps the
// ordinary one. It can be started again at any time; it must not hang.
func HardenRunner() []error { return take(ioFlusher, inMemory) }

// precaution is one part of being hard.
type precaution struct {
	without string // what may happen
	take    func() error
}

var (
	ioFlusher  = precaution{"its threads may wait for write-back through itself", flushIO}
	lastKilled = precaution{"the kernel may kill it before others", surviveOOM}
	inMemory   = precaution{"parts of it may have to be read from disk again", stayInMemory}
)

func take(all ...precaution) (missing []error) {
	for _, p := range all {
		if err := p.take(); err != nil {
			missing = append(missing, fmt.Errorf("%s: %w", p.without, err))
		}
	}
	return missing
}

func flushIO() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	is, err := unix.PrctlRetInt(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0)
	again := os.Getenv(hardened) != ""
	switch {
	case err != nil:
		return needs("CAP_SYS_RESOURCE", err)
	case is == 1:
		return os.Unsetenv(hardened)
	case again: // never in a circle
		return errors.New("the kernel did not keep it over a new start")
	}
	if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
		return needs("CAP_SYS_RESOURCE", err)
	}
	err = syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), hardened+"=1"))
	return errors.Join(fmt.Errorf("starting anew: %w", err), unix.Prctl(unix.PR_SET_IO_FLUSHER, 0, 0, 0, 0))
}

func surviveOOM() error {
	return needs("CAP_SYS_RESOURCE", os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0))
}

func stayInMemory() error {
	return needs("CAP_IPC_LOCK", unix.Mlockall(unix.MCL_CURRENT|unix.MCL_FUTURE|unix.MCL_ONFAULT))
}

// needs names the capability whose absence err is.
func needs(capability string, err error) error {
	if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.ENOMEM) { // the latter is what a limit of locked memory says
		return fmt.Errorf("%w: run it with %s", err, capability)
	}
	return err
}
