// Package kerneltest is a machine in memory for tests of nbd/kernel and of what
// is built on it: a Kernel with the behaviour that was measured on Linux 6.1 and
// 6.12, servers for its devices' sockets, and a metadata service.
//
// It has the traits that make the real one hard to use. Sockets that a device
// does not need are closed without a word. A request on a socket that died waits
// for its own timer. A device that is in use outlives its end as a zombie. One
// call that hangs stops all others. A size change waits for what is in flight.
// The driver notices the end of a socket a moment later than sock_diag does.
//
// Time is that of package time, so it runs in synctest bubbles. Fake.Close ends
// everything.
package kerneltest
