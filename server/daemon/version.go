package daemon

import (
	"runtime"
	"runtime/debug"
)

// Version says what binary this is.
type Version struct {
	Version string `json:"version"` // of the release, or the commit's short hash, or "devel"
	Commit  string `json:"commit,omitempty"`
	Date    string `json:"date,omitempty"` // of the commit, RFC 3339
	Dirty   bool   `json:"dirty,omitempty"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// ReadVersion reads what the build recorded. linked, if not empty, was given by
// the linker and wins.
func ReadVersion(linked string) Version {
	v := Version{Version: linked, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Commit = s.Value
			case "vcs.time":
				v.Date = s.Value
			case "vcs.modified":
				v.Dirty = s.Value == "true"
			}
		}
	}
	if v.Version == "" && len(v.Commit) >= 12 {
		v.Version = v.Commit[:12]
	}
	if v.Version == "" {
		v.Version = "devel"
	}
	return v
}
