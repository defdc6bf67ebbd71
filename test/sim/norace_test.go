//go:build !race

package sim

// fixedRuns take seconds, so that every `go test` has them.
const fixedRuns = 40
