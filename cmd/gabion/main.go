// Command gabion is the whole of Gabion in one binary: the server of a storage
// node, the operators' command line, and the guided tour.
//
// Exit codes: 0 done, 1 refused or failed, 2 usage.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(newApp(os.Stdout, os.Stderr).run(ctx, os.Args[1:]))
}
