//go:build race

package primary

const raceEnabled = true
