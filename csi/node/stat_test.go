package node_test

import (
	"io/fs"
	"syscall"
)

// allocated is how many bytes a file takes.
func allocated(info fs.FileInfo) int64 { return info.Sys().(*syscall.Stat_t).Blocks << 9 }
