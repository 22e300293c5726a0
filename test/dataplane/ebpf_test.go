// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// lists returns the frontends in the maps of kpng-ebpf with their endpoints, as sorted
// lines. It replaces markerIP with a fixed text. Without these maps, it returns nothing.
func (c *cluster) lists(t testing.TB, markerIP string) (lines []string) {
	t.Helper()
	frontends, slots := openMap(t, "frontends"), openMap(t, "slots")
	if frontends == nil || slots == nil {
		return nil
	}
	defer frontends.Close()
	defer slots.Close()
	// docs/operate/ebpf.md describes these elements.
	type address struct {
		IP        [16]byte
		Port, Pad [2]byte
	}
	text := func(a address) string {
		addr := netip.AddrPortFrom(netip.AddrFrom16(a.IP).Unmap(), binary.BigEndian.Uint16(a.Port[:]))
		return strings.Replace(addr.String(), markerIP+":", "marked:", 1)
	}
	var frontend address // Pad has the protocol
	var list struct {
		ID              uint64
		Count, Affinity uint32
	}
	type slot struct {
		List       uint64
		Index, Pad uint32
	}
	counts := map[uint64]uint32{} // the number of slots of each list; frontends may share a list
	var endpoint address
	all := frontends.Iterate()
	for all.Next(&frontend, &list) {
		line := fmt.Sprintf("%s/%d affinity %d:", text(frontend), frontend.Pad[0], list.Affinity)
		for i := range list.Count {
			if err := slots.Lookup(slot{List: list.ID, Index: i}, &endpoint); err != nil {
				t.Fatalf("read slot %d of %s: %v", i, line, err)
			}
			line += " " + text(endpoint)
		}
		counts[list.ID] = list.Count
		lines = append(lines, line)
	}
	if err := all.Err(); err != nil {
		t.Fatalf("read map frontends: %v", err)
	}
	// There must be no slots of deleted lists.
	var key slot
	elements := slots.Iterate()
	for elements.Next(&key, &endpoint) {
		if key.Index >= counts[key.List] {
			t.Errorf("no frontend uses slot %d of list %d", key.Index, key.List)
		}
	}
	if err := elements.Err(); err != nil {
		t.Fatalf("read map slots: %v", err)
	}
	slices.Sort(lines)
	return lines
}

func openMap(t testing.TB, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(bpffs, "kpng-ebpf", name), nil)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("open map %s: %v", name, err)
	}
	return m
}
