package sanity

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	csitest "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
)

// notYet are the reasons for which a spec may be skipped: what the driver does
// not announce, because this version does not have it.
var notYet = []string{
	"CreateSnapshot not supported", "DeleteSnapshot not supported", "ListSnapshots not supported", "GetSnapshot not supported", "Snapshot not supported",
	"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported", "Volume Cloning not supported", "GroupControllerService not supported", "VolumeGroupSnapshots not supported",
	"ControllerModifyVolume not supported", "Modify volume not supported", "Modify Volume not supported", "NodeGetStorageHealth not supported",
}

// variant tells a process of this test which suite to run; the suite can run once in a process.
const variant = "GABION_SANITY"

// endpoint is the socket of a driver that runs already, with nothing faked, for a suite against that one.
const endpoint = "GABION_SANITY_ENDPOINT"

// TestSanity is csi-sanity, for mounted volumes and for raw ones, these with every parameter.
func TestSanity(t *testing.T) {
	if access := os.Getenv(variant); access != "" {
		suite(t, access)
		return
	}
	for _, access := range []string{"mount", "block"} {
		t.Run(access, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSanity$", "-test.v")
			cmd.Env = append(os.Environ(), variant+"="+access, "GABION_BINARY="+binary)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, "specs ran") {
					t.Log(strings.TrimSpace(line))
				}
			}
		})
	}
}

func suite(t *testing.T, access string) {
	address, dir := os.Getenv(endpoint), t.TempDir()
	if address == "" {
		r := newRig(t)
		address, dir = "unix:"+r.socket, r.dir
	}
	config := csitest.NewTestConfig()
	config.Address = address
	config.TargetPath = filepath.Join(dir, "target")
	config.StagingPath = filepath.Join(dir, "staging")
	config.RemoveTargetPath = os.RemoveAll
	config.TestVolumeAccessType = access
	config.TestVolumeSize = 64 << 20 // making a file system costs by its size
	config.TestNodeVolumeAttachLimit = true
	if access == "block" {
		config.TestVolumeParameters = map[string]string{
			"replicas": "1", "spread": "node", "access": "rack", "durability": "flush", "on-full": "error", "blockSize": "512",
			"csi.storage.k8s.io/pvc/name": "claim", "csi.storage.k8s.io/pvc/namespace": "default", "csi.storage.k8s.io/pv/name": "pvc-1",
		}
	}
	csitest.GinkgoTest(&config)
	gomega.RegisterFailHandler(ginkgo.Fail)
	ran, skipped := 0, []string{}
	ginkgo.ReportAfterSuite("what was run", func(report types.Report) {
		for _, spec := range report.SpecReports {
			switch {
			case spec.LeafNodeType != types.NodeTypeIt:
			case spec.State == types.SpecStatePending: // by the suite's authors; B063 has what it is about
			case spec.State == types.SpecStateSkipped:
				skipped = append(skipped, spec.FullText()+": "+spec.Failure.Message)
			default:
				ran++
			}
		}
	})
	ginkgo.RunSpecs(t, "csi-sanity")
	slices.Sort(skipped)
	for _, s := range skipped {
		if !slices.ContainsFunc(notYet, func(reason string) bool { return strings.HasSuffix(s, ": "+reason) }) {
			t.Errorf("skipped: %s", s)
		}
	}
	t.Logf("%d specs ran, %d are for what comes later", ran, len(skipped))
}
