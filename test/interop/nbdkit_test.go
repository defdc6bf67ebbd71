package interop

import (
	"encoding/json"
	"path/filepath"
	"testing"
)

// nbdkit's nbd plugin is a client of ours and a server to nbdinfo and nbdcopy:
// what they see through it is what the plugin understood of us.
func TestNBDKitPlugin(t *testing.T) {
	need(t, "nbdkit", "nbdinfo", "nbdcopy")
	v := newVolume(t, "160MiB")
	through := func(command string) string {
		return run(t, "nbdkit", "--exit-with-parent", "--unix", "-", "nbd", "uri="+v.Socket, "--run", command)
	}
	direct := nbdinfo(t, v.Socket).Exports[0]
	var info exportInfo
	if err := json.Unmarshal([]byte(through(`nbdinfo --json "$uri"`)), &info); err != nil {
		t.Fatal(err)
	}
	e := info.Exports[0]
	if e.Size != direct.Size || e.ReadOnly || !e.CanFlush || !e.CanFUA || !e.CanTrim || !e.CanZero || !e.MultiConn {
		t.Errorf("through nbdkit: %+v, directly: %+v", e, direct)
	}
	source := sparseFile(t, 160<<20)
	back := filepath.Join(t.TempDir(), "back.raw")
	through(`nbdcopy "` + source + `" "$uri"`)
	through(`nbdcopy "$uri" "` + back + `"`)
	sameFile(t, source, back)
	if n := allocated(t, v.image()); n > allocated(t, source)+4<<20 {
		t.Errorf("the volume uses %d bytes of a source of %d", n, allocated(t, source))
	}
}
