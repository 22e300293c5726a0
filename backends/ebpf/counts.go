// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"fmt"
)

// leftReasons has the reasons in the order of connect.c. In the map counters, they follow
// the hooks.
var leftReasons = [...]string{"abandoned", "no_endpoint", "list_changed", "no_memory", "bound_port", "ambiguous", "excluded"}

var errNotStarted = errors.New("the eBPF backend is not started")

// Counts reads the counters of the programs, see [New].
func (b *backend) Counts() (translated, left map[string]uint64, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.programs == nil {
		return nil, nil, errNotStarted
	}
	translated, left = map[string]uint64{}, map[string]uint64{}
	hooks := b.programs.hooks()[:translatingHooks]
	for i := range len(hooks) + len(leftReasons) {
		var perCPU []uint64
		if err := b.programs.Counters.Lookup(uint32(i), &perCPU); err != nil {
			return nil, nil, fmt.Errorf("read map counters: %w", err)
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		if i < len(hooks) {
			translated[hooks[i].name] = sum
		} else {
			left[leftReasons[i-len(hooks)]] = sum
		}
	}
	return translated, left, nil
}
