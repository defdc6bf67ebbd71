package nbd

// An arena is a buffer that replies are laid out in, one behind the other.
// Everything here is called with the connection's mu held.

const (
	maxSmall  = 32 << 10 // the largest read that is copied into an arena
	maxArenas = 8        // live per connection: one with a slow read in it stays
)

// reserve gives r n bytes of the current arena. False: take other memory.
func (c *conn) reserve(r *request, n int) bool {
	a := c.arena
	if a == nil || a.used+n > len(a.data) {
		if a = c.newArena(); a == nil {
			return false
		}
	}
	r.arena, r.at = a, a.used
	a.used += n
	a.refs++
	return true
}

// newArena makes a fresh arena the current one; nil if there are as many as may be.
func (c *conn) newArena() *buffer {
	if c.arenas >= maxArenas {
		return nil
	}
	c.retireArena()
	c.arena = c.srv.pools.get(chunkSize)
	c.arenas++
	return c.arena
}

// retireArena ends the current arena's time as such. It is given back with its last reply.
func (c *conn) retireArena() {
	a := c.arena
	c.arena = nil
	if a != nil && a.refs == 0 {
		c.srv.pools.put(a)
		c.arenas--
	}
}

func (c *conn) releaseArena(a *buffer) {
	a.refs--
	switch {
	case a.refs > 0:
	case a == c.arena && c.idle:
		c.retireArena()
	case a == c.arena:
		a.used = 0
	default:
		c.srv.pools.put(a)
		c.arenas--
	}
}
