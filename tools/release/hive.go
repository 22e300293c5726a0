// SPDX-License-Identifier: Apache-2.0

package main

import "encoding/binary"

// emptyHive returns a file of Windows' registry (regf, version 1.5) with a root key and
// nothing else. Administrators and the system have access to the key.
func emptyHive() []byte {
	const (
		block = 4096
		none  = 0xffffffff // in place of an offset
		nk    = 0x20       // offset of the root key, relative to the first bin
	)
	le := binary.LittleEndian
	cell := func(content []byte) []byte {
		size := (4 + len(content) + 7) &^ 7
		used := int32(-size) // a free cell has a positive size
		return append(le.AppendUint32(nil, uint32(used)), append(content, make([]byte, size-4-len(content))...)...)
	}
	words := func(to []byte, values ...uint32) []byte {
		for _, v := range values {
			to = le.AppendUint32(to, v)
		}
		return to
	}

	key := func(security uint32) []byte {
		k := le.AppendUint16([]byte("nk"), 0x2c) // a root key, which has a name in ASCII and cannot be deleted
		k = append(k, make([]byte, 8)...)        // time of the last change
		k = words(k, 0, none)                    // no accesses, no parent
		k = words(k, 0, 0, none, none)           // no subkeys
		k = words(k, 0, none, security, none)    // no values, no class
		k = append(k, make([]byte, 20)...)       // largest lengths of names and values
		k = le.AppendUint16(k, 4)                // length of the name
		k = le.AppendUint16(k, 0)                // length of the class
		return cell(append(k, "ROOT"...))
	}
	sk := uint32(nk + len(key(0)))
	descriptor := securityDescriptor()
	security := words([]byte("sk\x00\x00"), sk, sk, 1, uint32(len(descriptor))) // a list of one, used by one key
	cells := append(key(sk), cell(append(security, descriptor...))...)

	hive := make([]byte, 2*block)
	copy(hive, "regf")
	for offset, value := range map[int]uint32{4: 1, 8: 1, 20: 1, 24: 5, 32: 1, 36: nk, 40: block, 44: 1} {
		le.PutUint32(hive[offset:], value) // sequence numbers, version, format, root key, size, clustering
	}
	var checksum uint32
	for i := 0; i < 508; i += 4 {
		checksum ^= le.Uint32(hive[i:])
	}
	le.PutUint32(hive[508:], checksum)
	bin := hive[block:]
	copy(bin, "hbin")
	le.PutUint32(bin[8:], block)
	copy(bin[nk:], cells)
	free := nk + len(cells)
	le.PutUint32(bin[free:], uint32(block-free))
	return hive
}

// securityDescriptor grants the system and administrators all access to a key.
func securityDescriptor() []byte {
	le := binary.LittleEndian
	system := []byte{1, 1, 0, 0, 0, 0, 0, 5, 18, 0, 0, 0}                        // S-1-5-18
	administrators := []byte{1, 2, 0, 0, 0, 0, 0, 5, 32, 0, 0, 0, 0x20, 2, 0, 0} // S-1-5-32-544
	var entries []byte
	for _, sid := range [][]byte{system, administrators} {
		entries = append(entries, 0, 2) // an entry that grants, also for subkeys
		entries = le.AppendUint16(entries, uint16(8+len(sid)))
		entries = le.AppendUint32(entries, 0xf003f)
		entries = append(entries, sid...)
	}
	list := le.AppendUint16([]byte{2, 0}, uint16(8+len(entries)))
	list = append(le.AppendUint32(list, 2), entries...)
	const header = 20
	d := le.AppendUint16([]byte{1, 0}, 0x8004) // relative to itself, with a list
	owner := uint32(header + len(list))
	d = le.AppendUint32(d, owner)
	d = le.AppendUint32(d, owner+uint32(len(administrators))) // the group
	d = le.AppendUint32(d, 0)                                 // no list for audits
	d = le.AppendUint32(d, header)
	d = append(d, list...)
	return append(append(d, administrators...), system...)
}
