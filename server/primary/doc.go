// Package primary serves a volume: it orders the requests of all connections,
// hands them to the copies (members), decides when an answer may be given, and
// takes over, gives birth, grows and detaches under the volume's grant.
//
// Core is the whole of that as one pure state machine per open volume; Volume
// drives it with goroutines, members and metadata; Manager finds and opens
// volumes by export name. See DESIGN.md.
package primary
