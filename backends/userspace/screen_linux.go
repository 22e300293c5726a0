// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// networkHeader is the offset of the IP header in socket filters (SKF_NET_OFF). With this
// offset, a filter need not know the length of preceding headers.
const networkHeader = 0xfff00000

// maxInstructions limits the length of a socket filter (BPF_MAXINSNS).
const maxInstructions = 4096

// A socket filter returns how many bytes of the packet to keep, or 0 to drop the packet.
var takePacket, dropPacket = bpf.RetConstant{Val: 1<<32 - 1}, bpf.RetConstant{}

// program returns the socket filter of s for packets of one IP family, or nil
// if s accepts all packets.
func (s *screen) program(v4 bool, pods []netip.Prefix) []bpf.Instruction {
	if s.dropAll {
		return []bpf.Instruction{dropPacket}
	}
	if !s.hereOnly && s.admission == nil {
		return nil
	}
	var admit []bpf.Instruction
	if s.admission != nil {
		for _, p := range s.admission.prefixes {
			admit = append(admit, ifSourceIn(p, v4, takePacket)...)
		}
		admit = append(admit, dropPacket)
	} else {
		admit = []bpf.Instruction{takePacket}
	}
	if !s.hereOnly {
		return admit
	}
	// Each test jumps to the first instruction of admit if the source is in one pod CIDR.
	var tests [][]bpf.Instruction
	for _, p := range pods {
		tests = append(tests, ifSourceIn(p, v4, bpf.Jump{}))
	}
	// rest is the number of instructions between the current test and the instructions of
	// admit. After the last test, only dropPacket is between them.
	rest := 1
	for i := len(tests) - 1; i >= 0; i-- {
		if n := len(tests[i]); n > 0 {
			tests[i][n-1] = bpf.Jump{Skip: uint32(rest)}
			rest += n
		}
	}
	out := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtInterfaceIndex},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: loopbackIndex, SkipTrue: 1},
		bpf.Jump{Skip: uint32(rest)},
	}
	for _, t := range tests {
		out = append(out, t...)
	}
	return append(append(out, dropPacket), admit...)
}

// ifSourceIn returns instructions that execute action if the source of a packet is in p.
// Otherwise they continue with the instruction that follows them. If v4 does not select
// the IP family of p, the result is nil.
func ifSourceIn(p netip.Prefix, v4 bool, action bpf.Instruction) []bpf.Instruction {
	if p.Addr().Is4() != v4 {
		return nil
	}
	source := uint32(networkHeader + 8) // the source is at offset 8 in an IPv6 header
	if v4 {
		source = networkHeader + 12
	}
	type word struct{ offset, mask, value uint32 }
	var words []word
	addr := p.Masked().Addr().AsSlice()
	for bits, at := p.Bits(), 0; bits > 0; bits, at = bits-32, at+4 {
		mask := ^uint32(0)
		if bits < 32 {
			mask <<= 32 - bits
		}
		words = append(words, word{source + uint32(at), mask, binary.BigEndian.Uint32(addr[at:])})
	}
	const perWord = 3
	var out []bpf.Instruction
	for i, w := range words {
		out = append(out,
			bpf.LoadAbsolute{Off: w.offset, Size: 4},
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: w.mask},
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: w.value, SkipTrue: uint8(perWord*(len(words)-i-1) + 1)})
	}
	return append(out, action)
}

// attach replaces the socket filter of c by the socket filter of s, and returns the number
// of instructions of the new filter. If s has too many prefixes, attach only removes the
// old filter, and the rules apply after a connection is accepted. The number of prefixes
// is limited by maxInstructions, by the argument room, and by the memory for socket
// options (net.core.optmem_max).
func (s *screen) attach(c syscall.RawConn, v4 bool, pods []netip.Prefix, room int) (instructions int, err error) {
	program := s.program(v4, pods)
	if len(program) > min(maxInstructions, room) {
		program = nil
	}
	raw, err := bpf.Assemble(program)
	if err != nil {
		return 0, fmt.Errorf("assemble socket filter: %w", err)
	}
	err = onDescriptor(c, func(fd int) error {
		if len(raw) > 0 {
			filter := make([]unix.SockFilter, len(raw))
			for i, r := range raw {
				filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
			}
			err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
			if err == nil {
				instructions = len(filter)
				return nil
			}
			if !errors.Is(err, unix.ENOMEM) {
				return fmt.Errorf("attach socket filter: %w", err)
			}
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("detach socket filter: %w", err)
		}
		return nil
	})
	return instructions, err
}
