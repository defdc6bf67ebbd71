//go:build !race

package sim

// What every `go test` has takes seconds.
const (
	fixedRuns = 40
	birthStep = 1
)
