package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// Binary returns the path of the gabion binary under test: GABION_BINARY if it
// is set, else one built into dir from this source tree.
func Binary(dir string) (string, error) {
	if path := os.Getenv("GABION_BINARY"); path != "" {
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("GABION_BINARY: %w", err)
		}
		return path, nil
	}
	path := filepath.Join(dir, "gabion")
	build := exec.Command("go", "build", "-o", path, "./cmd/gabion")
	build.Dir = Root()
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building gabion: %w\n%s", err, out)
	}
	return path, nil
}

// Root is the directory of the source tree.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}
