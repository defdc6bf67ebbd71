package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gabion-storage/gabion/server/daemon"
)

// emit is how a sampler says one value.
type emit = func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string)

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// descs makes the descriptions of one sampler, by name.
type descs map[string]*prometheus.Desc

// metric describes one metric; the name is its key.
func (d descs) metric(name, help string, labels ...string) descs {
	d[name] = prometheus.NewDesc("gabion_"+name, help, labels, nil)
	return d
}

func (d descs) collector(read func(emit)) daemon.Samples {
	s := daemon.Samples{Read: read}
	for _, x := range d {
		s.Descs = append(s.Descs, x)
	}
	return s
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (s *server) diskMetrics() daemon.Samples {
	d := descs{}.
		metric("disk_capacity_bytes", "What the disk can hold, less the reserve.", "disk_id", "path").
		metric("disk_available_bytes", "What the disk can take now, less the reserve.", "disk_id", "path").
		metric("disk_online", "1: usable; 0: failed, see the log and `gabion disk list`.", "disk_id", "path").
		metric("disk_unknown_volumes", "Volumes on the disk that the metadata service does not know; they are left alone.", "disk_id", "path")
	return d.collector(func(emit emit) {
		for _, r := range s.store.Reports() {
			labels := []string{r.ID.String(), r.Path}
			emit(d["disk_online"], gauge, truth(r.Online), labels...)
			if r.Online {
				emit(d["disk_capacity_bytes"], gauge, float64(r.Capacity), labels...)
				emit(d["disk_available_bytes"], gauge, float64(r.Available), labels...)
				emit(d["disk_unknown_volumes"], gauge, float64(len(r.Unknown)), labels...)
			}
		}
	})
}

func (s *server) raftMetrics() daemon.Samples {
	d := descs{}.
		metric("raft_leader", "1 if this server leads the metadata service.").
		metric("raft_term", "The current term.").
		metric("raft_last_index", "Newest entry in the log.").
		metric("raft_commit_index", "Newest entry that is committed.").
		metric("raft_applied_index", "Newest entry that the state machine has applied.").
		metric("raft_snapshot_index", "Newest entry that a snapshot covers.").
		metric("raft_log_bytes", "Log segments on disk.").
		metric("raft_stable_bytes", "Term, vote and segment records on disk.").
		metric("raft_snapshot_bytes", "Snapshots on disk.")
	return d.collector(func(emit emit) {
		st := s.consensus.Stats()
		for name, value := range map[string]float64{
			"raft_leader": truth(st.Leads), "raft_term": float64(st.Term), "raft_last_index": float64(st.LastIndex),
			"raft_commit_index": float64(st.CommitIndex), "raft_applied_index": float64(st.AppliedIndex),
			"raft_snapshot_index": float64(st.SnapshotIndex), "raft_log_bytes": float64(st.LogBytes),
			"raft_stable_bytes": float64(st.StableBytes), "raft_snapshot_bytes": float64(st.SnapshotBytes),
		} {
			emit(d[name], gauge, value)
		}
	})
}

func (s *server) volumeMetrics() daemon.Samples {
	d := descs{}.
		metric("volume_info", "1, with the volume's name in a label.", "volume_id", "volume").
		metric("volume_size_bytes", "The size that is served.", "volume_id").
		metric("volume_generation", "The primary's grant.", "volume_id").
		metric("volume_cache_epoch", "Rises when acknowledged, unflushed data may be gone.", "volume_id").
		metric("volume_sessions", "Open connections.", "volume_id").
		metric("volume_problem", "1 if something is wrong; `gabion status` says what.", "volume_id").
		metric("volume_requests", "Requests taken and not answered, by what they wait for: the disks (running), a conflicting request (queued), "+
			"a disk that is away (blocked), their range's first placement (birth), free space (space), a sync (syncing).", "volume_id", "state")
	return d.collector(func(emit emit) {
		for _, v := range s.manager.Status() {
			id := v.ID.String()
			emit(d["volume_info"], gauge, 1, id, v.Name)
			emit(d["volume_size_bytes"], gauge, float64(v.Size), id)
			emit(d["volume_generation"], gauge, float64(v.Generation), id)
			emit(d["volume_cache_epoch"], gauge, float64(v.CacheEpoch), id)
			emit(d["volume_sessions"], gauge, float64(v.Sessions), id)
			emit(d["volume_problem"], gauge, truth(v.Problem != ""), id)
			for state, n := range map[string]int{
				"running": v.InFlight, "queued": v.Queued, "blocked": v.Blocked, "birth": v.Births, "space": v.Space, "syncing": v.Syncing,
			} {
				emit(d["volume_requests"], gauge, float64(n), id, state)
			}
		}
	})
}

func (s *server) nbdMetrics() daemon.Samples {
	d := descs{}.
		metric("nbd_connections", "Open connections, with those in handshake.").
		metric("nbd_handshakes", "Connections that have not named an export yet.").
		metric("nbd_payload_bytes", "Write payloads in flight beyond the connections' own shares.").
		metric("nbd_reply_bytes", "Read data in flight beyond the connections' own shares.").
		metric("nbd_stalls_total", "Times the process or host was stopped for so long that all connections were closed.").
		metric("nbd_silenced_lines_total", "Log lines held back because too many came.")
	return d.collector(func(emit emit) {
		st := s.nbd.Stats()
		emit(d["nbd_connections"], gauge, float64(st.Connections))
		emit(d["nbd_handshakes"], gauge, float64(st.HalfOpen))
		emit(d["nbd_payload_bytes"], gauge, float64(st.PayloadBytes))
		emit(d["nbd_reply_bytes"], gauge, float64(st.ReplyBytes))
		emit(d["nbd_stalls_total"], counter, float64(st.Stalls))
		emit(d["nbd_silenced_lines_total"], counter, float64(st.SilencedLines))
	})
}
