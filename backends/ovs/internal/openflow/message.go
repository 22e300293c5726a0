// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
)

const version = 6 // OpenFlow 1.5

// The types of messages.
const (
	typeHello            = 0
	typeError            = 1
	typeEchoRequest      = 2
	typeEchoReply        = 3
	typeExperimenter     = 4
	typePacketOut        = 13
	typeFlowMod          = 14
	typeGroupMod         = 15
	typeMultipartRequest = 18
	typeMultipartReply   = 19
	typeBarrierRequest   = 20
	typeBarrierReply     = 21
	typeBundleControl    = 33
	typeBundleAdd        = 34
)

const (
	headerSize = 8
	// maxMessage is the largest size of a message. A message in a bundle has a second header.
	maxMessage = 65535 - 2*headerSize - 8

	anyPort, anyGroup, noBuffer = 0xffffffff, 0xffffffff, 0xffffffff
)

// Message is a message that changes the switch.
type Message struct {
	kind byte
	body []byte
}

// Flow is a flow of a table.
type Flow struct {
	FlowKey
	Cookie  uint64
	Actions Actions
	// Packets counts the packets that have matched the flow. It is set only in a listing.
	Packets uint64
}

// FlowKey identifies a flow.
type FlowKey struct {
	Table    uint8
	Priority uint16
	// Match is a result of [Match.Encode].
	Match string
}

const (
	flowAdd          = 0
	flowDelete       = 3
	flowDeleteStrict = 4
)

func flowMod(command byte, f *Flow, cookieMask uint64) Message {
	b := make([]byte, 0, 96+len(f.Match)+len(f.Actions))
	b = binary.BigEndian.AppendUint64(b, f.Cookie)
	b = binary.BigEndian.AppendUint64(b, cookieMask)
	b = append(b, f.Table, command, 0, 0, 0, 0) // no timeouts
	b = binary.BigEndian.AppendUint16(b, f.Priority)
	for _, v := range []uint32{noBuffer, anyPort, anyGroup, 0} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	b = appendMatch(b, f.Match)
	if len(f.Actions) > 0 {
		b = append(b, 0, instructionApply)
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(f.Actions)))
		b = append(append(b, 0, 0, 0, 0), f.Actions...)
	}
	return Message{typeFlowMod, b}
}

const instructionApply = 4

func appendMatch(b []byte, match string) []byte {
	b = append(b, 0, 1)
	b = binary.BigEndian.AppendUint16(b, uint16(4+len(match)))
	b = append(b, match...)
	return append(b, make([]byte, -(4+len(match))&7)...)
}

// AddFlow adds a flow. It replaces the flow with the same key.
func AddFlow(f Flow) Message { return flowMod(flowAdd, &f, 0) }

// DeleteFlow deletes one flow if its cookie is in the set.
func DeleteFlow(key FlowKey, cookies Cookies) Message {
	return flowMod(flowDeleteStrict, &Flow{FlowKey: key, Cookie: cookies.Value}, cookies.Mask)
}

// DeleteFlows deletes flows of a table if their cookies are in the set, and their match is
// equal to the given match or narrower.
func DeleteFlows(table uint8, match string, cookies Cookies) Message {
	return flowMod(flowDelete, &Flow{FlowKey: FlowKey{Table: table, Match: match}, Cookie: cookies.Value}, cookies.Mask)
}

// AllTables is a table number that means all tables.
const AllTables = 0xff

// Cookies is the set of cookies that have the bits of Value under Mask.
type Cookies struct{ Value, Mask uint64 }

func (c Cookies) contain(cookie uint64) bool { return cookie&c.Mask == c.Value }

// Group selects one of its buckets for each connection. A connection is defined by its
// source address and source port. For each bucket, the switch hashes the connection
// together with the ID of the bucket, and multiplies the hash by the weight of the bucket.
// It selects the bucket with the largest product. If products are equal, it selects the
// last of these buckets.
type Group struct {
	ID uint32
	// Seed makes the selections of different groups independent.
	Seed uint64
	// ByClient makes the selection ignore the source port.
	ByClient bool
	Buckets  []Bucket
	// Foreign is true if no message of this package creates such a group.
	Foreign bool
}

// Bucket is a bucket of a group. IDs may have any value up to 0xffffff00.
type Bucket struct {
	ID      uint32
	Weight  uint16
	Actions Actions
}

const (
	groupAddOrModify  = 0x8000
	groupDelete       = 2
	groupInsertBucket = 3
	groupRemoveBucket = 5

	groupSelect = 1

	allBuckets = 0xffffffff
)

func groupMod(command uint16, id, bucket uint32, buckets, properties []byte) Message {
	b := make([]byte, 0, 24+len(buckets)+len(properties))
	b = binary.BigEndian.AppendUint16(b, command)
	b = append(b, groupSelect, 0)
	b = binary.BigEndian.AppendUint32(b, id)
	b = binary.BigEndian.AppendUint16(b, uint16(len(buckets)))
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint32(b, bucket)
	return Message{typeGroupMod, append(append(b, buckets...), properties...)}
}

// SetGroup returns messages that create a group or replace it. A group with many buckets
// needs several messages.
func SetGroup(g Group) []Message {
	all := InsertBuckets(g.ID, FirstBucket, g.Buckets)
	if len(all) == 0 {
		return []Message{groupMod(groupAddOrModify, g.ID, allBuckets, nil, g.selection())}
	}
	// Change the first message from an insertion to the creation of the group.
	const fixed = 16
	first := all[0].body
	all[0] = groupMod(groupAddOrModify, g.ID, allBuckets, first[fixed:], g.selection())
	return all
}

// FirstBucket means the start of the group, as the argument "after" of [InsertBuckets].
const FirstBucket = 0xfffffffd

// InsertBuckets returns messages that add buckets to a group. The argument after is the ID
// of the bucket before the new buckets.
func InsertBuckets(id, after uint32, buckets []Bucket) []Message {
	const reserve = 256 // for the fixed part and the properties
	var all []Message
	var b []byte
	flush := func() {
		if len(b) > 0 {
			all = append(all, groupMod(groupInsertBucket, id, after, b, nil))
		}
		b = nil
	}
	for i, bucket := range buckets {
		encoded := bucket.encode()
		if len(b)+len(encoded) > maxMessage-reserve {
			flush()
			after = buckets[i-1].ID
		}
		b = append(b, encoded...)
	}
	flush()
	return all
}

// RemoveBucket removes a bucket from a group.
func RemoveBucket(group, bucket uint32) Message {
	return groupMod(groupRemoveBucket, group, bucket, nil, nil)
}

// DeleteGroup deletes a group if it exists, together with the flows that use it.
func DeleteGroup(id uint32) Message { return groupMod(groupDelete, id, allBuckets, nil, nil) }

func (bucket *Bucket) encode() []byte {
	const weight = 8 // the size of the property
	b := make([]byte, 0, 16+len(bucket.Actions))
	b = binary.BigEndian.AppendUint16(b, uint16(8+weight+len(bucket.Actions)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(bucket.Actions)))
	b = binary.BigEndian.AppendUint32(b, bucket.ID)
	b = append(b, bucket.Actions...)
	b = append(b, 0, 0, 0, weight)
	return append(binary.BigEndian.AppendUint16(b, bucket.Weight), 0, 0)
}

// selection returns the property with which a group selects a bucket by a hash.
func (g *Group) selection() []byte {
	const netronomeVendor, selectionMethod = 0x0000154d, 1
	b := []byte{0xff, 0xff, 0, 0}
	b = binary.BigEndian.AppendUint32(b, netronomeVendor)
	b = binary.BigEndian.AppendUint32(b, selectionMethod)
	b = append(b, 0, 0, 0, 0)
	b = append(b, "hash\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"...)
	b = binary.BigEndian.AppendUint64(b, g.Seed)
	type field struct {
		field uint32
		size  int
	}
	fields := []field{{fieldIPv4Src, 4}, {fieldIPv6Src, 16}}
	if !g.ByClient {
		fields = append(fields, field{fieldTCPSrc, 2}, field{fieldUDPSrc, 2}, field{fieldSCTPSrc, 2})
	}
	for _, f := range fields {
		b = binary.BigEndian.AppendUint32(b, f.field|uint32(f.size))
		for range f.size {
			b = append(b, 0xff) // all bits
		}
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	return padded(b)
}

// Connections selects tracked connections. Destination is their destination before
// translation. A Destination without a port means all ports. At most one of the optional
// fields Source and Endpoint is set. Source is the client, so only one connection is
// selected. Endpoint is the address and port to which the connections were translated.
// Destination is required unless Endpoint is set.
type Connections struct {
	Zone        uint16
	Protocol    uint8
	Destination netip.AddrPort
	Source      netip.AddrPort
	Endpoint    netip.AddrPort
}

// DeleteConnections makes the switch forget tracked connections. If Source is not set, the
// switch reads its table of connections. Open vSwitch supports this message since version
// 3.1.
func DeleteConnections(c Connections) Message {
	const flush = 32
	property := func(kind uint16, value []byte) []byte {
		b := binary.BigEndian.AppendUint16(nil, kind)
		b = binary.BigEndian.AppendUint16(b, uint16(4+len(value)))
		return padded(append(b, value...))
	}
	const original, reply, zone, sourcePort = 0, 1, 2, 2
	tuple := func(kind uint16, source, destination netip.AddrPort) []byte {
		value := []byte{0, 0, 0, 0}
		for i, a := range []netip.AddrPort{source, destination} {
			if a.Addr().IsValid() {
				as16 := a.Addr().As16() // an IPv4 address as IPv4-mapped
				value = append(value, property(uint16(i), as16[:])...)
			}
		}
		for i, a := range []netip.AddrPort{source, destination} {
			if a.Port() != 0 {
				value = append(value, property(sourcePort+uint16(i), []byte{byte(a.Port() >> 8), byte(a.Port()), 0, 0})...)
			}
		}
		return property(kind, value)
	}
	b := binary.BigEndian.AppendUint32(nil, niciraVendor)
	b = binary.BigEndian.AppendUint32(b, flush)
	b = append(b, c.Protocol, 0, 0, 0, 0, 0, 0, 0)
	if c.Destination.IsValid() {
		b = append(b, tuple(original, c.Source, c.Destination)...)
	}
	if c.Endpoint.IsValid() {
		b = append(b, tuple(reply, c.Endpoint, netip.AddrPort{})...)
	}
	b = append(b, property(zone, []byte{byte(c.Zone >> 8), byte(c.Zone), 0, 0})...)
	return Message{typeExperimenter, b}
}

// SendIP makes the switch execute actions for an IP packet, as if the packet came from a
// controller. The packet has no Ethernet addresses.
func SendIP(packet []byte, actions Actions) Message {
	const fromController = 0xfffffffd
	etherType := []byte{IPv4 >> 8, IPv4 & 0xff}
	if packet[0]>>4 == 6 {
		etherType = []byte{IPv6 >> 8, IPv6 & 0xff}
	}
	b := binary.BigEndian.AppendUint32(nil, noBuffer)
	b = append(binary.BigEndian.AppendUint16(b, uint16(len(actions))), 0, 0)
	b = appendMatch(b, string(appendField(nil, fieldInPort, fromController, 4)))
	b = append(b, actions...)
	b = append(append(b, make([]byte, 12)...), etherType...)
	return Message{typePacketOut, append(b, packet...)}
}

var errTruncated = errors.New("truncated message")

// take returns the first n bytes of b and the rest.
func take(b []byte, n int) (first, rest []byte, err error) {
	if n < 0 || len(b) < n {
		return nil, nil, errTruncated
	}
	return b[:n], b[n:], nil
}

// takeEntry returns the first entry of a list, and the rest of the list. An entry begins
// with its size, which must be at least the argument fixed.
func takeEntry(b []byte, fixed int) (entry, rest []byte, err error) {
	if len(b) < fixed {
		return nil, nil, errTruncated
	}
	entry, rest, err = take(b, int(binary.BigEndian.Uint16(b)))
	if err == nil && len(entry) < fixed {
		err = errTruncated
	}
	return entry, rest, err
}

// parseFlows appends the flows of a listing.
func parseFlows(flows []Flow, b []byte) ([]Flow, error) {
	const fixed = 24
	for len(b) > 0 {
		entry, rest, err := takeEntry(b, fixed)
		if err != nil {
			return nil, err
		}
		b = rest
		f := Flow{
			FlowKey: FlowKey{Table: entry[4], Priority: binary.BigEndian.Uint16(entry[6:])},
			Cookie:  binary.BigEndian.Uint64(entry[16:]),
		}
		match, entry, err := takeTLV(entry[fixed:])
		if err != nil {
			return nil, err
		}
		f.Match = string(match)
		statistics, instructions, err := takeTLV(entry)
		if err != nil {
			return nil, err
		}
		f.Packets = packetsOf(statistics)
		f.Actions = Actions(instructions)
		if len(instructions) >= 8 && instructions[1] == instructionApply && int(binary.BigEndian.Uint16(instructions[2:])) == len(instructions) {
			f.Actions = Actions(instructions[8:])
		}
		flows = append(flows, f)
	}
	return flows, nil
}

// packetsOf returns the number of packets in the statistics of a flow.
func packetsOf(statistics []byte) uint64 {
	const packets = classStatistics<<16 | 4<<9 | 8
	for b := statistics; len(b) >= 4; {
		value, rest, err := take(b[4:], int(b[3]))
		if err != nil {
			break
		}
		if binary.BigEndian.Uint32(b) == packets {
			return packetCount(value)
		}
		b = rest
	}
	return 0
}

// packetCount returns a number of packets. A number that is not known is 0.
func packetCount(b []byte) uint64 {
	if n := binary.BigEndian.Uint64(b); n <= math.MaxInt64 {
		return n
	}
	return 0
}

// parseGroupCounts returns the number of packets of each bucket of a group. The result is
// nil if b is not the answer for this group.
func parseGroupCounts(id uint32, b []byte) (packets []uint64) {
	const fixed, bucket = 40, 16
	entry, rest, err := takeEntry(b, fixed)
	if err != nil || len(rest) > 0 || binary.BigEndian.Uint32(entry[4:]) != id {
		return nil
	}
	packets = make([]uint64, 0, (len(entry)-fixed)/bucket)
	for b := entry[fixed:]; len(b) >= bucket; b = b[bucket:] {
		packets = append(packets, packetCount(b))
	}
	return packets
}

// takeTLV returns the value of an element with type and length, and the bytes after its
// padding.
func takeTLV(b []byte) (value, rest []byte, err error) {
	if len(b) < 4 {
		return nil, nil, errTruncated
	}
	size := int(binary.BigEndian.Uint16(b[2:]))
	all, rest, err := take(b, (size+7)/8*8)
	if err != nil || size < 4 {
		return nil, nil, errTruncated
	}
	return all[4:size], rest, nil
}

// parseGroup parses the only group of a listing.
func parseGroup(b []byte) (g Group, err error) {
	const fixed, seed = 16, 32 // the size of the fixed part; the position in the property
	entry, rest, err := takeEntry(b, fixed)
	if err == nil && len(rest) > 0 {
		err = errors.New("two groups have the same ID")
	}
	if err != nil {
		return g, err
	}
	g.ID = binary.BigEndian.Uint32(entry[4:])
	buckets, properties, err := take(entry[fixed:], int(binary.BigEndian.Uint16(entry[8:])))
	if err != nil {
		return g, err
	}
	if len(properties) >= seed+8 {
		g.Seed = binary.BigEndian.Uint64(properties[seed:])
	}
	g.ByClient = !bytes.Equal(properties, g.selection())
	if entry[2] != groupSelect || g.ByClient && !bytes.Equal(properties, g.selection()) {
		g.Foreign = true
		return g, nil
	}
	for len(buckets) > 0 {
		const fixed = 8
		bucket, rest, err := takeEntry(buckets, fixed)
		if err != nil {
			return g, err
		}
		actions, properties, err := take(bucket[fixed:], int(binary.BigEndian.Uint16(bucket[2:])))
		if err != nil {
			return g, err
		}
		one := Bucket{ID: binary.BigEndian.Uint32(bucket[4:]), Actions: Actions(actions)}
		if weight, _, err := takeTLV(properties); err == nil && binary.BigEndian.Uint16(properties) == 0 && len(weight) >= 2 {
			one.Weight = binary.BigEndian.Uint16(weight)
		}
		g.Buckets = append(g.Buckets, one)
		buckets = rest
	}
	return g, nil
}

// Error is an error that the switch reports.
type Error struct{ Type, Code uint16 }

// errorNames has the names of likely errors.
var errorNames = map[Error]string{
	{1, 1}:   "the switch does not support the message",
	{1, 3}:   "the switch does not support the message",
	{1, 4}:   "the switch does not support the message",
	{1, 5}:   "permission denied",
	{2, 0}:   "the switch does not support an action",
	{2, 9}:   "no such group",
	{5, 1}:   "the table is full",
	{5, 2}:   "no such table",
	{5, 4}:   "permission denied",
	{6, 3}:   "no room for more groups",
	{6, 4}:   "no room for more buckets",
	{6, 8}:   "no such group",
	{6, 15}:  "no such bucket",
	{6, 16}:  "the bucket exists",
	{17, 5}:  "too many bundles",
	{17, 12}: "too many messages in the bundle",
	{17, 13}: "a message of the bundle failed",
	{17, 14}: "the bundle timed out",
}

func (e Error) Error() string {
	text := fmt.Sprintf("OpenFlow error type %d code %d", e.Type, e.Code)
	if name := errorNames[e]; name != "" {
		text += " (" + name + ")"
	}
	return text
}
