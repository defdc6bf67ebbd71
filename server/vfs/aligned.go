package vfs

import "unsafe"

// AlignedBuffer returns size zero bytes whose address direct I/O accepts.
func AlignedBuffer(size int) []byte {
	p := make([]byte, size+DirectAlign)
	skip := 0
	if size > 0 {
		skip = int(-uintptr(unsafe.Pointer(&p[0])) & (DirectAlign - 1))
	}
	return p[skip : skip+size : skip+size]
}

// Aligned reports whether direct I/O can use p as it is.
func Aligned(p []byte) bool {
	return len(p)%DirectAlign == 0 && (len(p) == 0 || uintptr(unsafe.Pointer(&p[0]))%DirectAlign == 0)
}
