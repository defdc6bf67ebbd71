// Package node is the CSI Node service. It keeps nothing that matters: what is
// staged and published is read from the kernel and from the mount table at the
// beginning of every call, and a call finishes or undoes what an earlier one,
// killed at whatever step, left behind. See DESIGN.md.
package node
