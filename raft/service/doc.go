// Package service answers the metadata API: it resolves keys, chooses ids,
// tokens and times, refuses early what would be refused, commits the rest, and
// waits for confirmations. The state machine is raft/metadata, its replication
// raft/consensus; see DESIGN.md.
package service
