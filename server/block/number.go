package block

// Numbers that only grow. 0 is "none yet".
type (
	// Generation numbers a volume's primary grants.
	Generation uint64
	// Version rises with every command that changes a volume.
	Version uint64
	// CacheEpoch rises when acknowledged, unflushed data may be gone.
	CacheEpoch uint64
	// SessionNumber orders a device's reconnects; 0 is a plain client, which never reconnects as a device.
	SessionNumber uint64
	// Sequence orders a primary's writes within one generation.
	Sequence uint64
)

// Incarnation says which life of a disk answered. Two equal incarnations are
// the same open of the same disk by the same process (continuous).
type Incarnation struct {
	Boot     UUID // the kernel's boot id
	Process  UUID // drawn by each server process at its start
	Instance UUID // drawn at each disk open that cannot prove that nothing was lost since the last
}

// Continuity is what an incarnation proves against the one last admitted.
type Continuity uint8

const (
	// Rebooted: acknowledged data that was never flushed may be gone.
	Rebooted Continuity = iota
	// Restarted: acknowledged data is intact, the tail is unknown.
	Restarted
	// Continuous: unchanged, with a complete tail.
	Continuous
)

// Since compares i with the incarnation that was admitted before.
func (i Incarnation) Since(admitted Incarnation) Continuity {
	switch {
	case i == admitted:
		return Continuous
	case i.Boot == admitted.Boot && i.Instance == admitted.Instance:
		return Restarted
	default:
		return Rebooted
	}
}
