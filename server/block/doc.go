// Package block is the vocabulary of the data plane: identities, positions,
// numbers that only grow, requests, and the errors every layer shares. It
// imports the standard library only and everything else imports it.
//
// Units: an offset, a size or a length is in bytes; an Index counts extents or
// runs. Numbers that order things (Generation, Version, CacheEpoch,
// SessionNumber, Sequence) start at 0, which means "none yet".
package block
