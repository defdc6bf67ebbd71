package lab

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// inNamespace runs f on a thread of a network namespace. The thread ends with f, so that no other goroutine gets it.
func inNamespace(ns string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		h, err := os.Open("/run/netns/" + ns)
		if err == nil {
			defer func() { _ = h.Close() }()
			err = unix.Setns(int(h.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}
