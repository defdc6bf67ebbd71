// Package driver is the CSI endpoint: a gRPC server on a UNIX socket, the
// Identity service, and what every call goes through on its way to a service.
//
// The Controller and Node services return plain errors that wrap a sentinel of
// server/block (or ErrPending) with a full sentence. They name no gRPC code:
// the table in errors.go does, and nothing else. What they return is what an
// operator reads as the event on a claim.
//
// A call passes, from the outside in:
//
//	report    one log line with method, ids, code and duration; the error is
//	          translated, and what the caller may have put secrets into is
//	          taken out of its text
//	recover   a panic is INTERNAL, with its stack in the log
//	deadline  a caller without one gets one, and the answer leaves a little
//	          before the caller stops listening
//	secrets   are dropped: no service of this driver needs any
//	turn      calls that concern the same thing go one after the other; one
//	          that waits too long, or that finds too many waiting, is ABORTED
//
// Goroutines: those of gRPC, one per connection and one per call; Stop waits
// for all of them.
package driver
