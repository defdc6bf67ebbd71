// Package lab is the vocabulary of the scenarios that run inside a test VM, and the protocol between guest and host.
package lab
