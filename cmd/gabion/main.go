// Command gabion is the whole of Gabion in one binary: the server of a storage
// node, the operators' command line, and the guided tour.
//
// Exit codes: 0 done, 1 refused or failed, 2 usage.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/gabion-storage/gabion/server/daemon"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version string

// Main stays on the first thread: what a process is told about its parent's
// death belongs to a thread, and daemon.Harden starts the process anew.
func init() { runtime.LockOSThread() }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	a := newApp(os.Stdout, os.Stderr)
	a.harden, a.hardenRunner = daemon.Harden, daemon.HardenRunner
	os.Exit(a.run(ctx, os.Args[1:]))
}
