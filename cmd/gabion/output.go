package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// print writes v as JSON, or what fill puts into columns.
//
// The JSON is an interface that scripts rely on: names are snake_case and never
// change their meaning, sizes are numbers of bytes, times are RFC 3339, and
// what is absent is left out.
func (a *app) print(v any, fill func(*table)) error {
	if a.output == "json" {
		return writeJSON(a.out, v, "  ")
	}
	t := table{tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)}
	fill(&t)
	return t.w.Flush()
}

func writeJSON(w io.Writer, v any, indent string) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	return e.Encode(v)
}

// table is text in columns.
type table struct{ w *tabwriter.Writer }

// row writes one line; an empty cell becomes a dash, so that columns can be counted.
func (t *table) row(cells ...string) {
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	_, _ = io.WriteString(t.w, strings.Join(cells, "\t")+"\n") // reported by Flush
}

// unixTime is nanoseconds since 1970 as the API carries them; 0 is no time.
func unixTime(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// age is how long ago t was, as coarse as a person counts it.
func age(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(time.Since(t), 0)
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

// quoted is a volume's name as it is, if it is one word that a terminal shows
// as it is, and else between quotes, with what cannot be seen written out.
func quoted(name string) string {
	q := strconv.Quote(name)
	if q == `"`+name+`"` && !strings.ContainsFunc(name, unicode.IsSpace) {
		return name
	}
	return q
}

// line writes text that belongs to no column.
func (t *table) line(text string) { _, _ = io.WriteString(t.w, text+"\n") }
