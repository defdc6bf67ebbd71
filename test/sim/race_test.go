//go:build race

package sim

const fixedRuns = 10
