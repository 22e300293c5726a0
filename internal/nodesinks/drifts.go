// SPDX-License-Identifier: Apache-2.0

package nodesinks

import (
	"fmt"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
)

// drifts is the observer of a backend. It remembers when other programs changed the
// dataplane.
type drifts struct {
	backends.Observer
	backend string

	mu    sync.Mutex
	times []time.Time // the last ones, at most maxDrifts
}

const maxDrifts = 100

// Drifted implements [backends.Observer].
func (d *drifts) Drifted(now bool) {
	d.Observer.Drifted(now)
	if !now {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.times = append(d.times[max(0, len(d.times)+1-maxDrifts):], time.Now())
}

// problem returns a sentence, or "" unless other programs have changed the dataplane several
// times in the last hour.
func (d *drifts) problem() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, at := range d.times {
		if time.Since(at) < time.Hour {
			n++
		}
	}
	atLeast := ""
	switch n {
	case 0, 1: // an administrator may have done it
		return ""
	case maxDrifts:
		atLeast = "at least "
	}
	return fmt.Sprintf("another program changed the %s rules %s%d times in the last hour; connections may fail until they are repaired", d.backend, atLeast, n)
}

// Problems returns a sentence for each backend whose dataplane other programs have changed
// several times in the last hour.
func (n *Node) Problems() (all []string) {
	for _, d := range n.drifts {
		if problem := d.problem(); problem != "" {
			all = append(all, problem)
		}
	}
	return all
}
