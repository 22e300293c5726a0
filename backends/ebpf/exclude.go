// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"path/filepath"

	"k8s.io/klog/v2"
)

// maxCgroupLevels is CGROUP_LEVELS in connect.c, and maxExcluded is the size of the map
// excluded.
const maxCgroupLevels, maxExcluded = 16, 4096

// writeExcluded writes the IDs of the excluded cgroups to the map excluded. A cgroup that is
// made again has another ID.
func (b *backend) writeExcluded(ctx context.Context) error {
	wanted := map[uint64]uint32{}
	for _, path := range b.opts.ExcludedCgroups {
		id, err := cgroupID(filepath.Join(b.cgroup, path))
		if err == nil {
			wanted[id] = 0
		} else if !b.missing[path] {
			klog.FromContext(ctx).Info("Excluded cgroup not found; it is excluded when it exists", "cgroup", path, "reason", err.Error())
		}
		b.missing[path] = err != nil
	}
	return kernelTable[uint64, uint32]{"excluded", b.programs.Excluded}.replace(ctx, wanted)
}
