package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// faultRule is fault.Rule as people write it. GET answers with an array of
// these, POST takes one.
type faultRule struct {
	Point string   `json:"point"`
	Match string   `json:"match,omitempty"`
	Delay duration `json:"delay,omitzero"`
	Hold  bool     `json:"hold,omitempty"`
	Error string   `json:"error,omitempty"`
	Count int      `json:"count,omitempty"`
	Hits  int      `json:"hits"` // GET only
}

// duration is "500ms" in JSON.
type duration time.Duration

func (d duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%w: delay %.40q: write it as 500ms or 2s", block.ErrInvalid, b)
	}
	*d = duration(v)
	return nil
}

// faultHandler lists (GET), arms (POST) and clears (DELETE, all or ?point=NAME) rules.
func faultHandler(faults *fault.Set, log *slog.Logger) http.Handler {
	if faults == nil {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "this server injects no faults: start it with --fault-injection", http.StatusForbidden)
		})
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /faults", func(w http.ResponseWriter, _ *http.Request) {
		rules := []faultRule{}
		for _, s := range faults.Rules() {
			rules = append(rules, faultRule{s.Point, s.Match, duration(s.Delay), s.Hold, s.Error, s.Count, s.Hits})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(rules) // fails only if the client left
	})
	mux.HandleFunc("POST /faults", func(w http.ResponseWriter, r *http.Request) {
		rule, err := decodeFault(http.MaxBytesReader(w, r.Body, 64<<10))
		if err == nil {
			err = faults.Arm(rule)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		log.Warn("fault armed", "point", rule.Point, "match", rule.Match, "delay", rule.Delay, "hold", rule.Hold, "error", rule.Error, "count", rule.Count)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, r *http.Request) {
		point := r.URL.Query().Get("point")
		faults.Clear(point)
		log.Warn("faults cleared", "point", point)
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

func decodeFault(body io.Reader) (fault.Rule, error) {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	var r faultRule
	if err := d.Decode(&r); err != nil {
		if errors.Is(err, block.ErrInvalid) {
			return fault.Rule{}, err
		}
		return fault.Rule{}, fmt.Errorf(`%w: a fault is JSON such as {"point":"disk.sync","error":"io","delay":"500ms","count":1}: %v`, block.ErrInvalid, err)
	}
	return fault.Rule{Point: r.Point, Match: r.Match, Delay: time.Duration(r.Delay), Hold: r.Hold, Error: r.Error, Count: r.Count}, nil
}
