//go:build !race

package daemon

const shadow = 1
