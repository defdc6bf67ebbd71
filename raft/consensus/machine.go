package consensus

import "io"

// Machine is the state machine that is replicated. Apply, Snapshot and Restore
// are called from one goroutine at a time.
type Machine interface {
	// Apply applies one committed command. The response goes to the proposer
	// and carries the machine's refusals. An error means the machine cannot
	// apply the command at all (a newer feature level, an undecodable entry):
	// then nothing may have changed, and the node halts.
	Apply(index uint64, command []byte) (response any, err error)
	// Snapshot returns a function that writes the state as it is now. It is
	// quick; the function runs beside later calls of Apply, or never.
	Snapshot() (write func(io.Writer) error)
	// Restore replaces the state by a written one, wholly or not at all.
	Restore(r io.Reader) error
}
