package sim

import (
	"errors"
	"fmt"
	"io"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// ReadAt reads a range of a volume straight from the files: they are the volume, without Gabion.
func (s *sim) ReadAt(p []byte, off int64) (int, error) {
	for done := int64(0); done < int64(len(p)); {
		at := off + done
		part := p[done:min(int64(len(p)), done+runSize-at%runSize)]
		clear(part)
		if run := s.view().Run(s.id, geometry.Run(at)); run != nil {
			if err := s.readImage(mustUUID(run.Disks[0]), part, at); err != nil {
				return int(done), err
			}
		}
		done += int64(len(part))
	}
	return len(p), nil
}

func (s *sim) readImage(id block.UUID, p []byte, off int64) error {
	for _, d := range s.host.disks {
		if d.id.UUID != id {
			continue
		}
		dir, err := d.mem.OpenDir(diskPath + "/volumes/" + s.id.String())
		if err != nil {
			return err
		}
		defer dir.Close()
		f, err := dir.Open("head.img", vfs.ReadOnly)
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := f.ReadAt(p, off); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		return nil
	}
	return fmt.Errorf("%w: disk %s", block.ErrNotFound, id)
}
