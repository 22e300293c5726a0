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
	// docs/ebpf.md describes these elements.
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
	used := uint32(0)
	all := frontends.Iterate()
	for all.Next(&frontend, &list) {
		line := fmt.Sprintf("%s/%d affinity %d:", text(frontend), frontend.Pad[0], list.Affinity)
		for i := range list.Count {
			var endpoint address
			slot := struct {
				List       uint64
				Index, Pad uint32
			}{list.ID, i, 0}
			if err := slots.Lookup(slot, &endpoint); err != nil {
				t.Fatalf("read slot %d of %s: %v", i, line, err)
			}
			line += " " + text(endpoint)
			used++
		}
		lines = append(lines, line)
	}
	if err := all.Err(); err != nil {
		t.Fatalf("read map frontends: %v", err)
	}
	// There must be no slots of deleted lists.
	n, key, value := uint32(0), []byte(nil), []byte(nil)
	elements := slots.Iterate()
	for elements.Next(&key, &value) {
		n++
	}
	if err := elements.Err(); err != nil || n != used {
		t.Errorf("the map has %d slots, and the frontends use %d (%v)", n, used, err)
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
