// Package image keeps one disk's copies of volumes: a sparse raw file per
// volume, and beside it an index that says which extents are here and which
// of their regions may differ from other copies. DESIGN.md gives every byte
// and why every crash point is safe.
//
// A Disk is one open instance of one disk; an Image is one volume on it.
// Neither knows about grants: who may write, and in which order, is decided
// above, by a fence and a range lock of 4 KiB grain.
package image
