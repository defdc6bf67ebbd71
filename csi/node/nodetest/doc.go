// Package nodetest is a host in memory for tests of the Node service: devices,
// a mount table and file systems that do what the real ones do as far as the
// service can tell. Directories and files are real.
//
// A Host outlives the plugins that work on it. Each plugin sees it through a
// Plugin, which can be killed, or made to fail, at any of its steps.
package nodetest
