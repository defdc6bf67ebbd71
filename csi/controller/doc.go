// Package controller is the CSI Controller service over a small VolumeService,
// which speaks of volumes and racks and knows no gRPC. It holds no state: every
// call may come twice, at once, late, or at another process of this driver.
package controller
