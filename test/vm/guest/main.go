// Command guest is the first process of a test VM and the program that runs scenarios in it.
//
// The kernel starts it three times over: as /init of the initial archive it loads the modules of the disks, mounts the
// root file system and executes itself there; as process 1 of the root file system it reaps orphans and ends the VM
// when its child does; as that child it runs the scenarios of the kernel's command line.
package main

import (
	"fmt"
	"os"
)

func main() {
	switch {
	case os.Getpid() != 1:
		runScenarios()
	case os.Args[0] == "/init":
		fatal(enterRoot())
	default:
		fatal(supervise())
	}
}

// fatal ends the VM if err is not nil: nobody is there to read an exit code.
func fatal(err error) {
	if err != nil {
		fmt.Println("guest:", err)
		powerOff()
	}
}
