// Package adapt lets the CSI services and the kernel's devices ask the metadata
// service in their own words: it is where the halves meet, for the binary and
// for the tests that run the services in their own process.
package adapt
