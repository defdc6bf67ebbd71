// Package daemon is what surrounds the storage in a server process: an ordered
// list of things to start and stop, the HTTP listener for operators (metrics,
// health, profiles, fault points), the NBD UNIX socket, logging and the version.
//
// Goroutines: Group.Run starts none while it serves; while it stops, one per
// step, which it waits for as long as the grace time lasts. HTTP.Serve starts
// one per connection (net/http) and Shutdown waits for them.
package daemon
