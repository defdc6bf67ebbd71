// Package consensus replicates a state machine with hashicorp/raft, which it
// alone imports. See DESIGN.md for files, crash steps and goroutines.
package consensus
