//go:build race

package sim

const defaultRuns = 10
