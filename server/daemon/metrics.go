package daemon

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/gabion-storage/gabion/server/block"
)

// NewRegistry returns a registry of its own with the process's, the runtime's
// and the build's metrics.
func NewRegistry(v Version) *prometheus.Registry {
	r := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "gabion_build_info",
		Help:        "1, with what was built in the labels.",
		ConstLabels: prometheus.Labels{"version": v.Version, "commit": v.Commit, "go": v.Go},
	})
	build.Set(1)
	r.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// latencyBuckets are upper bounds in seconds: from a page-cache hit to a stall.
var latencyBuckets = [...]float64{20e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1, 5, 30}

// opCount is the room for counters by block.Op.
const opCount = int(block.OpCache) + 1

// Traffic counts one volume's requests as clients see them: from the time a
// request was parsed until its reply is about to leave. It satisfies
// nbd.Observer; nothing is locked or allocated.
type Traffic struct {
	inFlight atomic.Int64
	ops      [opCount]opTraffic
}

type opTraffic struct {
	bytes   atomic.Int64
	errors  atomic.Int64
	latency atomic.Int64 // nanoseconds in all
	buckets [len(latencyBuckets) + 1]atomic.Int64
	_       [64]byte // keeps the next op off this one's cache line
}

// Started says that n requests are about to be submitted.
func (t *Traffic) Started(n int) { t.inFlight.Add(int64(n)) }

// Finished says that a request is about to be answered, or was dropped.
func (t *Traffic) Finished(op block.Op, bytes int64, latency time.Duration, err error) {
	t.inFlight.Add(-1)
	if int(op) >= opCount {
		return
	}
	o := &t.ops[op]
	if err != nil {
		o.errors.Add(1)
	} else {
		o.bytes.Add(bytes)
	}
	o.latency.Add(int64(latency))
	o.buckets[bucketOf(latency)].Add(1)
}

func bucketOf(d time.Duration) int {
	s := d.Seconds()
	for i, bound := range latencyBuckets {
		if s <= bound {
			return i
		}
	}
	return len(latencyBuckets)
}

// TrafficTable has a Traffic for every volume that was opened since the start,
// and shows them as metrics. Safe for concurrent use.
type TrafficTable struct {
	mu      sync.Mutex
	volumes map[block.VolumeID]*Traffic
}

// Of returns the volume's counters, always the same ones until Forget.
func (t *TrafficTable) Of(id block.VolumeID) *Traffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.volumes[id]
	if v == nil {
		if t.volumes == nil {
			t.volumes = map[block.VolumeID]*Traffic{}
		}
		v = &Traffic{}
		t.volumes[id] = v
	}
	return v
}

// Volumes are those that have counters, in any order.
func (t *TrafficTable) Volumes() []block.VolumeID {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.volumes))
}

// Forget drops the counters of a volume that was deleted.
func (t *TrafficTable) Forget(id block.VolumeID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.volumes, id)
}

var (
	bytesDesc    = prometheus.NewDesc("gabion_volume_bytes_total", "Bytes of requests answered without an error.", []string{"volume_id", "op"}, nil)
	errorsDesc   = prometheus.NewDesc("gabion_volume_errors_total", "Requests answered with an error, or dropped when their connection ended.", []string{"volume_id", "op"}, nil)
	latencyDesc  = prometheus.NewDesc("gabion_volume_request_seconds", "Time from parsing a request to its reply; the count is the number of requests.", []string{"volume_id", "op"}, nil)
	inFlightDesc = prometheus.NewDesc("gabion_volume_in_flight", "Requests taken and not answered yet.", []string{"volume_id"}, nil)
)

// Describe implements prometheus.Collector.
func (t *TrafficTable) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{bytesDesc, errorsDesc, latencyDesc, inFlightDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. An operation that a volume has never seen has no series.
func (t *TrafficTable) Collect(ch chan<- prometheus.Metric) {
	t.mu.Lock()
	volumes := make(map[string]*Traffic, len(t.volumes))
	for id, v := range t.volumes {
		volumes[id.String()] = v
	}
	t.mu.Unlock()
	for id, v := range volumes {
		ch <- prometheus.MustNewConstMetric(inFlightDesc, prometheus.GaugeValue, float64(v.inFlight.Load()), id)
		for op := range v.ops {
			v.ops[op].collect(ch, id, block.Op(op).String())
		}
	}
}

func (o *opTraffic) collect(ch chan<- prometheus.Metric, id, op string) {
	var count int64
	below := make(map[float64]uint64, len(latencyBuckets))
	for i := range o.buckets {
		count += o.buckets[i].Load()
		if i < len(latencyBuckets) {
			below[latencyBuckets[i]] = uint64(count)
		}
	}
	if count == 0 {
		return
	}
	seconds := time.Duration(o.latency.Load()).Seconds()
	ch <- prometheus.MustNewConstHistogram(latencyDesc, uint64(count), seconds, below, id, op)
	ch <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(o.bytes.Load()), id, op)
	ch <- prometheus.MustNewConstMetric(errorsDesc, prometheus.CounterValue, float64(o.errors.Load()), id, op)
}

// Samples is a collector over a function: for state that others hold, read at
// every scrape. read is called from several goroutines.
type Samples struct {
	Descs []*prometheus.Desc
	Read  func(emit func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string))
}

// Describe implements prometheus.Collector.
func (s Samples) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range s.Descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s Samples) Collect(ch chan<- prometheus.Metric) {
	s.Read(func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	})
}
