package checker

import (
	"fmt"
	"slices"
	"strings"
)

// instant orders what clients saw: each beginning and each end has its own.
type instant uint64

// entry is a write of one block that may be seen, or that a loss may bring back.
type entry struct {
	count uint64 // 0: what was there at first
	prior uint64 // of the copy that was sent before, which this one repeats; 0: none
	zero  bool   // reads as zeros
	begin instant
	end   instant // 0: it may take effect as yet
	// hidden: reads that begin from here on must not return it; 0: they may.
	hidden instant
	// settled: not even a loss brings it back.
	settled bool
}

func (e *entry) ended(before instant) bool { return e.end != 0 && e.end < before }

// history is the writes of one block. Entries are in order of count.
type history struct {
	current uint64 // newest sent
	entries []entry
}

func newHistory() *history {
	return &history{entries: []entry{{zero: true, begin: 1, end: 1}}}
}

func (h *history) add(zero bool, now instant, prior uint64) uint64 {
	h.current++
	h.entries = append(h.entries, entry{count: h.current, prior: prior, zero: zero, begin: now})
	return h.current
}

// copies visits an entry and the copies that were sent before it.
func (h *history) copies(e *entry, visit func(*entry)) {
	for ; e != nil; e = h.find(e.prior) {
		visit(e)
		if e.prior == 0 {
			return
		}
	}
}

// overtake hides the copies that were sent before e: e took effect, so they did before it or never will.
func (h *history) overtake(e *entry, now instant, settle bool) {
	h.copies(e, func(o *entry) {
		if o == e {
			return
		}
		if o.hidden == 0 {
			o.hidden = now
		}
		o.settled = o.settled || settle
	})
}

func (h *history) find(count uint64) *entry {
	i, ok := slices.BinarySearchFunc(h.entries, count, func(e entry, c uint64) int {
		switch {
		case e.count < c:
			return -1
		case e.count > c:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &h.entries[i]
}

// hide ends the visibility of every entry that had ended before and is not kept.
func (h *history) hide(before, now instant, settle bool, keep func(*entry) bool) {
	for i := range h.entries {
		e := &h.entries[i]
		if !e.ended(before) || keep(e) {
			continue
		}
		if e.hidden == 0 {
			e.hidden = now
		}
		e.settled = e.settled || settle
	}
}

// returned takes what a read that began at begin saw, and reports whether it may.
func (h *history) returned(c content, begin, now instant) bool {
	seen := func(e *entry) bool {
		if e.zero {
			return c.zero
		}
		return !c.zero && e.count == c.count
	}
	possible := slices.ContainsFunc(h.entries, func(e entry) bool {
		return seen(&e) && (e.hidden == 0 || e.hidden > begin)
	})
	if possible {
		h.hide(begin, now, false, seen)
		if e := h.find(c.count); !c.zero {
			h.overtake(e, now, false)
		}
	}
	return possible
}

// prune forgets what neither a read under way nor a loss can show any more.
func (h *history) prune(flushed, oldestRead instant) {
	h.entries = slices.DeleteFunc(h.entries, func(e entry) bool {
		return e.hidden != 0 && e.hidden < oldestRead && (e.settled || e.hidden <= flushed)
	})
}

// lose brings back what was not hidden when the newest answered flush began.
func (h *history) lose(flushed, now instant) {
	for i := range h.entries {
		e := &h.entries[i]
		if !e.settled && e.hidden > flushed {
			e.hidden = 0
		}
		if e.end == 0 {
			e.end = now
		}
	}
}

// allowed lists the counts that a read may return from begin on.
func (h *history) allowed(begin instant) []uint64 {
	var counts []uint64
	for _, e := range h.entries {
		if e.hidden == 0 || e.hidden > begin {
			counts = append(counts, e.count)
		}
	}
	return counts
}

// tell says which writes a read that began at begin may show.
func (h *history) tell(begin instant) string {
	var words []string
	for _, count := range h.allowed(begin) {
		what := "write"
		switch e := h.find(count); {
		case count == 0:
			words = append(words, "zeros (never written)")
			continue
		case e.zero:
			what = "zeros of write"
		}
		words = append(words, fmt.Sprintf("%s %d", what, count))
	}
	return fmt.Sprintf("%s; the newest sent is %d", strings.Join(words, " or "), h.current)
}
