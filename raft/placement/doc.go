// Package placement decides where the replicas of a run go and how much more
// may be promised, given nodes, disks and a policy. It is pure: no clock, no
// randomness, no I/O; the same question has the same answer. The formulas are
// in DESIGN.md.
package placement
