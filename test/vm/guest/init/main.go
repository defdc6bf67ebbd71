// Command init is the first process of a test VM.
//
// The kernel starts it from the initial archive, where it loads the modules of the disks, mounts the root file system
// and executes itself there. As process 1 of the root file system it reaps orphans, and ends the VM when the agent, its
// child, does.
package main

import (
	"fmt"
	"os"
)

func main() {
	if os.Args[0] == "/init" {
		fatal(enterRoot())
	}
	fatal(supervise())
}

// fatal ends the VM if err is not nil: nobody is there to read an exit code.
func fatal(err error) {
	if err != nil {
		fmt.Println("init:", err)
		powerOff()
	}
}
