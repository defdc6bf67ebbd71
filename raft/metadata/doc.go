// Package metadata is the replicated state machine of a cell: which nodes,
// disks, volumes, runs, members, attachments and grants there are. It is pure:
// a command and its log index in, a new state and events out, with no clock,
// randomness, map order or I/O, so that every voter comes to the same state.
// The rules of each command and the snapshot format are in DESIGN.md.
//
// One goroutine applies; any number read Views, which never change. Objects
// that a View or a Result hands out are shared: nobody may modify them.
package metadata
