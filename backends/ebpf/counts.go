// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"fmt"
)

// Counts has numbers that the programs count. A process continues with the numbers of the
// process before it.
type Counts struct {
	// Translated has the numbers of addresses that the programs replaced, by hook: connect4,
	// sendmsg4, recvmsg4, getpeername4, and the same names with 6. At connect and sendmsg,
	// an endpoint replaces a service. At recvmsg and getpeername, a service replaces an
	// endpoint.
	Translated map[string]uint64
	// Left has the numbers of connections and datagrams to frontends in the maps that the
	// programs left to the other sink, by reason. The reasons are: abandoned (the backend
	// has not run for ten minutes, or an error paused the programs), no_endpoint (only
	// existing UDP sockets may use the endpoints), list_changed (the list changed at this
	// moment), no_memory (there is none for the record of the socket, or the cluster IP has
	// too many clients with session affinity), bound_port (the caller has bound the TCP
	// socket to a port), and ambiguous (the source of an answer to the UDP socket could be
	// wrong).
	Left map[string]uint64
}

// leftReasons has the reasons in the order of connect.c. In the map counters, they follow
// the hooks.
var leftReasons = [...]string{"abandoned", "no_endpoint", "list_changed", "no_memory", "bound_port", "ambiguous"}

var errNotStarted = errors.New("the eBPF backend is not started")

// Counts reads the counters of the programs. It may be called at any time, and returns an
// error unless the backend is started.
func (b *Backend) Counts() (Counts, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.programs == nil {
		return Counts{}, errNotStarted
	}
	c := Counts{Translated: map[string]uint64{}, Left: map[string]uint64{}}
	hooks := b.programs.hooks()
	for i := range len(hooks) + len(leftReasons) {
		var perCPU []uint64
		if err := b.programs.Counters.Lookup(uint32(i), &perCPU); err != nil {
			return Counts{}, fmt.Errorf("read map counters: %w", err)
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		if i < len(hooks) {
			c.Translated[hooks[i].name] = sum
		} else {
			c.Left[leftReasons[i-len(hooks)]] = sum
		}
	}
	return c, nil
}
