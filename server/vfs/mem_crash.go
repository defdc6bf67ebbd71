package vfs

import (
	"maps"
	"math/rand/v2"
	"slices"
)

// Kill ends all processes: their handles die, their locks are gone, everything
// they wrote is still in the page cache, synced or not.
func (m *Mem) Kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.life++
	m.used = 0 // unlinked files end with their last handle
	m.walk(m.root, func(n *memNode) {
		n.lock, n.opens = nil, 0
		m.used += int64(len(n.blocks)) * memBlock
	})
}

func (m *Mem) walk(n *memNode, visit func(*memNode)) {
	visit(n)
	for _, child := range n.entries {
		m.walk(child, visit)
	}
}

// Crash returns the file system that might be found after a power cut at this
// moment; m itself goes on unharmed. What was synced is there. Everything else,
// each sector, size and directory change by itself, is there or not, as the
// seed decides; 0 drops all of it, 1 keeps all of it.
func (m *Mem) Crash(seed uint64) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &crash{seed: seed, rand: rand.New(rand.NewPCG(seed, 0)), nodes: map[*memNode]*memNode{}}
	entries := c.directories(m)
	after := &Mem{inodes: m.inodes, mount: m.mount + 1, capacity: m.capacity, noTry: m.noTry}
	after.root = c.node(m.root, entries)
	after.walk(after.root, func(n *memNode) { after.used += int64(len(n.blocks)) * memBlock })
	return after
}

// crash makes the choices of one power cut.
type crash struct {
	seed  uint64
	rand  *rand.Rand
	nodes map[*memNode]*memNode
}

// pick chooses one of n versions, the oldest durable, the last the newest.
func (c *crash) pick(n int) int {
	switch c.seed {
	case 0:
		return 0
	case 1:
		return n - 1
	}
	return c.rand.IntN(n)
}

// directories decides which changes survived, in their order.
func (c *crash) directories(m *Mem) map[*memNode]map[string]*memNode {
	entries := map[*memNode]map[string]*memNode{}
	of := func(dir *memNode) map[string]*memNode {
		if entries[dir] == nil {
			entries[dir] = maps.Clone(dir.durable)
		}
		return entries[dir]
	}
	for _, change := range m.changes {
		if c.pick(2) == 0 {
			continue
		}
		for _, e := range change.edits {
			e.apply(of(e.dir))
		}
	}
	return entries
}

// node copies what a name leads to, deciding what is found in it.
func (c *crash) node(n *memNode, entries map[*memNode]map[string]*memNode) *memNode {
	if done := c.nodes[n]; done != nil {
		done.links++
		return done
	}
	after := &memNode{inode: n.inode, links: 1}
	c.nodes[n] = after
	if n.entries == nil {
		c.content(n, after)
		return after
	}
	found := entries[n]
	if found == nil {
		found = n.durable
	}
	after.entries, after.durable = map[string]*memNode{}, map[string]*memNode{}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		child := c.node(found[name], entries)
		after.entries[name], after.durable[name] = child, child
	}
	return after
}

const sector = 512

func (c *crash) content(n, after *memNode) {
	sizes := append(slices.Clone(n.sizes), n.size)
	after.size = sizes[c.pick(len(sizes))]
	after.blocks, after.older = maps.Clone(n.blocks), map[int64][]*[memBlock]byte{}
	for _, i := range slices.Sorted(maps.Keys(n.older)) {
		if b := c.block(append(slices.Clone(n.older[i]), n.blocks[i])); b != nil {
			after.blocks[i] = b
		} else {
			delete(after.blocks, i)
		}
	}
	for i, b := range after.blocks {
		keep := after.size - i*memBlock
		if keep <= 0 {
			delete(after.blocks, i)
		} else if keep < memBlock {
			cut := *b
			clear(cut[keep:])
			after.blocks[i] = &cut
		}
	}
}

// block mixes a block's versions sector by sector; nil is a hole.
func (c *crash) block(versions []*[memBlock]byte) *[memBlock]byte {
	first := versions[c.pick(len(versions))]
	if c.seed <= 1 {
		return first
	}
	mixed, allocated := new([memBlock]byte), first != nil
	for s := 0; s < memBlock; s += sector {
		from := first
		if c.pick(4) == 0 {
			from = versions[c.pick(len(versions))]
		}
		if from != nil {
			copy(mixed[s:s+sector], from[s:s+sector])
			allocated = true
		}
	}
	if !allocated {
		return nil
	}
	return mixed
}
