package mount

// Linux is the host.
type Linux struct{}
