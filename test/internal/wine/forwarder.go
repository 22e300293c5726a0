// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"bytes"
	"encoding/binary"
)

// forwarder returns a library for 64-bit Windows that contains no code. Its only export
// is forwarded to target, a symbol of another library ("library.Symbol"). See Microsoft's
// "PE Format". The library has one section, which contains the export directory.
func forwarder(name, symbol, target string) []byte {
	const (
		section   uint32 = 0x1000 // address of the section
		alignment uint32 = 0x200  // file alignment of sections
		directory uint32 = 40     // size of the export directory table
	)
	le := binary.LittleEndian
	// The address table, the name pointer table and the ordinal table follow the directory,
	// each with one entry. Then the strings follow.
	exports := make([]byte, directory+4+4+4)
	text := func(s string) uint32 {
		at := section + uint32(len(exports))
		exports = append(append(exports, s...), 0)
		return at
	}
	nameAt, symbolAt, targetAt := text(name), text(symbol), text(target)
	le.PutUint32(exports[12:], nameAt)
	le.PutUint32(exports[16:], 1) // first ordinal
	le.PutUint32(exports[20:], 1) // number of addresses
	le.PutUint32(exports[24:], 1) // number of names
	le.PutUint32(exports[28:], section+directory)
	le.PutUint32(exports[32:], section+directory+4)
	le.PutUint32(exports[36:], section+directory+8)
	// The exported address is within the section of the export directory. So it refers to
	// the name of the target, not to code.
	le.PutUint32(exports[directory:], targetAt)
	le.PutUint32(exports[directory+4:], symbolAt)
	size := uint32(len(exports))
	exports = append(exports, make([]byte, alignment-size%alignment)...)

	var b bytes.Buffer
	write := func(values ...any) {
		for _, v := range values {
			if err := binary.Write(&b, le, v); err != nil {
				panic(err) // binary.Write fails only if v has no fixed size
			}
		}
	}
	dos := make([]byte, 64)
	copy(dos, "MZ")
	le.PutUint32(dos[60:], uint32(len(dos)))
	write(dos, []byte("PE\x00\x00"))
	write(uint16(0x8664), uint16(1), [3]uint32{}, uint16(240), uint16(0x2022))                                                  // machine AMD64; one section; flags for large addresses and for a library
	write(uint16(0x20b), uint16(0), [5]uint32{1: uint32(len(exports))})                                                         // PE32+
	write(uint64(0x180000000), uint32(0x1000), uint32(alignment))                                                               // base address, alignments
	write([6]uint16{6, 0, 0, 0, 6, 0}, [4]uint32{1: 2 * section, 2: alignment})                                                 // versions; sizes of the image and of the headers
	write(uint16(3), uint16(0x160), [4]uint64{0x100000, 0x1000, 0x100000, 0x1000})                                              // subsystem console; flags for relocation and for no execution of data; sizes of stack and heap
	write([2]uint32{1: 16}, section, size, [15]uint64{})                                                                        // 16 data directories, of which only the export directory is used
	write([]byte(".edata\x00\x00"), [6]uint32{size, section, uint32(len(exports)), alignment}, [2]uint16{}, uint32(0x40000040)) // readable data
	write(make([]byte, int(alignment)-b.Len()), exports)
	return b.Bytes()
}
