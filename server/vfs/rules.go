package vfs

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// Rule is one fault. Its text form is
//
//	<operation> <name pattern> <when> <error> [short=<bytes>]
//
// where the operation is one of Kinds or *, the pattern is path.Match's
// without spaces, when is #n (the n-th match only), #n+ (from the n-th on)
// or * (every one), and the error is eio, enospc, unsupported or again:
//
//	datasync head.img #1 eio
//	write head.img #3+ enospc short=4096
type Rule struct {
	Kind    string
	Pattern string
	First   int  // counted from 1
	Forever bool // from First on, not only once
	Err     string
	Short   int // bytes written before the error; writes only
}

var ruleErrors = map[string]error{
	"eio":         block.ErrIO,
	"enospc":      block.ErrNoSpace,
	"unsupported": block.ErrUnsupported,
	"again":       ErrWouldBlock,
}

// ParseRule reads the text form; anything else is ErrInvalid.
func ParseRule(s string) (Rule, error) {
	bad := func(what string) (Rule, error) {
		return Rule{}, fmt.Errorf("%w: fault rule %.100q: %s", block.ErrInvalid, s, what)
	}
	fields := strings.Fields(s)
	if len(fields) != 4 && len(fields) != 5 {
		return bad("it takes operation, pattern, when, error and perhaps short=<bytes>")
	}
	r := Rule{Kind: fields[0], Pattern: fields[1], First: 1, Forever: true, Err: fields[3]}
	if r.Kind != "*" && !slices.Contains(Kinds, r.Kind) {
		return bad("unknown operation")
	}
	if _, err := path.Match(r.Pattern, ""); err != nil {
		return bad("bad pattern")
	}
	if when := fields[2]; when != "*" {
		n, isNth := strings.CutPrefix(when, "#")
		n, r.Forever = strings.CutSuffix(n, "+")
		first, err := strconv.ParseUint(n, 10, 31)
		if !isNth || err != nil || first == 0 {
			return bad("when is #n, #n+ or *")
		}
		r.First = int(first)
	}
	if ruleErrors[r.Err] == nil {
		return bad("the error is eio, enospc, unsupported or again")
	}
	if len(fields) == 5 {
		n, isShort := strings.CutPrefix(fields[4], "short=")
		short, err := strconv.ParseUint(n, 10, 31)
		if !isShort || err != nil {
			return bad("expected short=<bytes>")
		}
		r.Short = int(short)
	}
	return r, nil
}

// String is the text form.
func (r Rule) String() string {
	when := "#" + strconv.Itoa(r.First)
	switch {
	case r.Forever && r.First == 1:
		when = "*"
	case r.Forever:
		when += "+"
	}
	s := r.Kind + " " + r.Pattern + " " + when + " " + r.Err
	if r.Short > 0 {
		s += " short=" + strconv.Itoa(r.Short)
	}
	return s
}

// Rules is a Hook made of rules that may change while it is in use. The zero
// value has none. Safe for concurrent use.
type Rules struct {
	mu    sync.Mutex
	rules []*countedRule
}

type countedRule struct {
	Rule
	matched int
}

// Add arms a rule given in its text form.
func (r *Rules) Add(text string) error {
	rule, err := ParseRule(text)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rules = append(r.rules, &countedRule{Rule: rule})
	return nil
}

// Clear disarms all rules.
func (r *Rules) Clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rules = nil
}

// Hook decides about one operation: the first rule that fires does.
func (r *Rules) Hook(op Op) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rule := range r.rules {
		if rule.fires(op) {
			err := injected(op, ruleErrors[rule.Err])
			if rule.Short > 0 {
				return &Short{N: rule.Short, Err: err}
			}
			return err
		}
	}
	return nil
}

func (r *countedRule) fires(op Op) bool {
	if r.Kind != "*" && r.Kind != op.Kind {
		return false
	}
	if ok, _ := path.Match(r.Pattern, path.Base(op.Name)); !ok {
		return false
	}
	r.matched++
	return r.matched == r.First || r.Forever && r.matched > r.First
}
