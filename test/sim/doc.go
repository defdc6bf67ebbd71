// Package sim runs a Gabion cluster as a deterministic discrete-event
// simulation: one seed is one run, bit for bit. The primary's core, the
// metadata state machine and the image are the real ones; time, network, disks
// and the metadata log are models with faults.
package sim
