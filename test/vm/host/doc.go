// Package host prepares and runs test VMs: it fetches Debian's cloud kernels, builds the guest's root image, boots the
// emulator and reads what the guest tells.
package host
