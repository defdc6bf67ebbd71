//go:build race

package sim

const (
	fixedRuns = 8
	birthStep = 4 // of the file operations of a birth, every fourth is struck
)
