// Package sanity runs csi-sanity and the CSI field cases against the driver's
// services in this process and a real `gabion server` beside it. Only what
// needs a kernel is faked: devices and mounts.
package sanity
