// Package checker judges what a Gabion volume returned against what its
// clients were told. It serves real-process tests and the simulator alike.
//
// A Log counts the writes of every block. A write writes self-describing
// blocks, so that a read shows which write it saw; trims and zeroes have their
// count too and read as zeros. For each block the log keeps the writes that may
// still be seen:
//
//   - A write may be seen from its beginning. It ends when it is acknowledged,
//     or when it is certain that nothing of it can reach a disk any more.
//   - Once a write is acknowledged, all that had ended before it began are gone
//     for good; once a read returned a write, all others that had ended before
//     the read began are.
//
// A client that never has two writes to one block under way gets the plain rule
// from this: a read returns any count from the newest acknowledged or already
// returned (the minimum) to the newest sent. Writes that overlap may be ordered
// either way, but once.
//
// A loss of unflushed data, which the client was told of by the permanent
// refusal of its cache epoch, brings back what was gone, except what was gone
// before the newest answered flush began, or was overwritten by a durable write.
package checker
