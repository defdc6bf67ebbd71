package host

import (
	"bufio"
	"fmt"
	"io"
)

// cpio writes the "newc" archive that the kernel unpacks as its first root file system.
type cpio struct {
	w     *bufio.Writer
	inode int
	err   error
}

func newCPIO(w io.Writer) *cpio { return &cpio{w: bufio.NewWriterSize(w, 1<<20)} }

const (
	modeDir  = 0o040755
	modeFile = 0o100755
)

func (c *cpio) dir(name string)            { c.entry(name, modeDir, nil) }
func (c *cpio) file(name string, b []byte) { c.entry(name, modeFile, b) }

// entry is a header of 13 hexadecimal numbers, the name and the content, the last two each padded to four bytes.
func (c *cpio) entry(name string, mode int, content []byte) {
	if c.err != nil {
		return
	}
	c.inode++
	const headerSize = 110
	fields := [13]int{c.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0}
	c.write([]byte("070701"))
	for _, f := range fields {
		c.write(fmt.Appendf(nil, "%08X", f))
	}
	c.write(append([]byte(name), 0))
	c.pad(headerSize + len(name) + 1)
	c.write(content)
	c.pad(len(content))
}

func (c *cpio) write(b []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
}

func (c *cpio) pad(n int) { c.write(make([]byte, -n&3)) }

// close ends the archive.
func (c *cpio) close() error {
	c.entry("TRAILER!!!", 0, nil)
	if c.err == nil {
		c.err = c.w.Flush()
	}
	return c.err
}
