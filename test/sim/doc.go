// Package sim runs a Gabion cell of one node as a deterministic discrete-event
// simulation: one seed is one run, bit for bit. The primary's core, the
// metadata state machine and the disks' images are the real ones; time,
// connections, the metadata log, the client and all faults are the
// simulation's. See DESIGN.md.
package sim
