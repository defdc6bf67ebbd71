// Package kernel attaches volumes to this machine's nbd driver: it makes a
// /dev/nbdN of a volume, moves it to other sockets when its server ends or falls
// silent, resizes it, takes it away, and recognises it after a restart from the
// kernel's own facts. What must hold and in which order things are done stands
// in DESIGN.md.
//
// Manager is what others use. Kernel and Dialer are its view of the machine:
// NewLinux and NewDialer are the real ones, kerneltest has a kernel in memory.
//
// Errors wrap sentinels of server/block:
//
//   - ErrNotFound: the volume has no device here, or is not attached to this node
//   - ErrUnavailable: try again; metadata or servers are not reachable, or the server does not answer
//   - ErrInUse: the device is mounted, held or still open; the text names by whom
//   - ErrPrecondition: this machine or the device's state does not allow it; the text names the remedy
//   - ErrExists: there is a device of this volume with other properties
//   - ErrCorrupt: what the server says of the volume contradicts the metadata service or the device
//   - ErrUnknown: the kernel did not answer in time
package kernel
