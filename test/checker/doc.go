// Package checker judges what a Gabion volume returned against what its
// clients were told: a write log per block with the range of writes a read may
// legally show. It serves real-process tests and the simulator alike.
package checker
