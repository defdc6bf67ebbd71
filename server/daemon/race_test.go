//go:build race

package daemon

// The race detector keeps several bytes for each one that was ever used.
const shadow = 4
