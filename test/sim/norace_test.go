//go:build !race

package sim

// defaultRuns of TestRandom take seconds, so that every `go test` has them.
const defaultRuns = 60
