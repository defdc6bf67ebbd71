// Package replica owns the disks of a storage node and offers each volume's
// copy on each of them to a primary: fenced, and gone once it is proven that
// nobody needs it. See DESIGN.md.
package replica
