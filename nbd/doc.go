// Package nbd serves block devices over the NBD protocol: fixed newstyle
// handshake, and a transmission phase that reads, executes and answers
// requests in batches. What is spoken, who runs, what is bounded and when a
// connection is closed stands in DESIGN.md.
package nbd
