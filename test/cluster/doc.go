// Package cluster runs real `gabion server` processes on loopback, for tests
// and for the benchmark: start, kill, stop, pause, restart, and what the kernel
// says about the process. Everything lives in a directory of the caller's, and
// no process outlives the one that started it.
package cluster
