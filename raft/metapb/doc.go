// Package metapb is the wire of the metadata service: the objects, the log's
// commands, the gRPC API, and the one table between shared errors and gRPC
// codes (errors.go).
package metapb
