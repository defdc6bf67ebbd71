package mount

// Options are mount options that were checked; made by ParseOptions.
type Options struct {
	list []string
}
