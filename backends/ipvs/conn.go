// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netns"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// conn is a connection to IPVS by generic netlink. The zero value is closed. The first
// request opens it.
type conn struct {
	netNS  int
	nl     *netlink.Conn
	family uint16
}

// serverID identifies a virtual server.
type serverID struct {
	netip.AddrPort
	protocol api.Protocol
}

func (id serverID) String() string { return fmt.Sprintf("%s/%s", id.AddrPort, id.protocol) }

// server is a virtual server in the kernel.
type server struct {
	settings
	// destinations are the endpoints.
	destinations map[netip.AddrPort]destination
}

// settings are the settings of a virtual server.
type settings struct {
	scheduler string
	// flags are the flags of the virtual server, except the flag that the kernel sets
	// itself.
	flags uint32
}

// owner returns the flags that identify an instance. The kernel has no names of virtual
// servers, but it also stores the flags that it does not use. The kernel uses only the
// lowest six bits.
func owner(table string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(table))
	return h.Sum32()&ownerMask | 1<<31
}

// ownerMask has the flags that contain the owner.
const ownerMask = 0xffffff00

// fallbackFlag returns a flag for the schedulers sh and mh, and 0 for others. The flag
// affects clients whose endpoint gets no new connections. With the flag, the scheduler
// selects another endpoint for such a client. Without the flag, it refuses the client.
func fallbackFlag(scheduler string) uint32 {
	if scheduler == "sh" || scheduler == "mh" {
		return flagScheduler1
	}
	return 0
}

type destination struct {
	// weight is 0 if the destination gets no new connections.
	weight uint32
	// edited is true if the destination has another forwarding method or other thresholds
	// than setDestination sets.
	edited bool
	// connections is the number of connections in all states.
	connections uint32
	// established is the number of established connections. It does not count UDP.
	established uint32
	// total counts connections. bytesIn and bytesOut count the bytes of IP packets from clients
	// and to clients.
	total, bytesIn, bytesOut uint64
}

// Numbers of linux/ip_vs.h and linux/genetlink.h.
const (
	newService, setService, delService, getService = 1, 2, 3, 4
	newDest, setDest, delDest, getDest             = 5, 6, 7, 8

	attrService, attrDest = 1, 2

	svcFamily, svcProtocol, svcAddr, svcPort              = 1, 2, 3, 4
	svcScheduler, svcFlags, svcTimeout, svcNetmask        = 6, 7, 8, 9
	destAddr, destPort, destMethod, destWeight, destUpper = 1, 2, 3, 4, 5
	destLower, destActive, destInactive, destFam          = 6, 7, 8, 11

	destStats                                     = 12 // with numbers of 64 bits
	statsConnections, statsBytesIn, statsBytesOut = 1, 4, 5

	flagHashed, flagScheduler1 = 2, 8

	methodMasquerade, methodMask = 0, 7 // masquerading is IPVS's name for translation

	controlFamily, getFamily, controlVersion = 0x10, 3, 1
	controlFamilyID, controlFamilyName       = 1, 2
)

// errNoIPVS is the error of requests if the kernel has no IPVS.
var errNoIPVS = errors.New("the kernel lacks IPVS: load the module ip_vs")

// errNoScheduler is the error of set if the kernel lacks the scheduler.
var errNoScheduler = errors.New("the kernel lacks the scheduler")

func (c *conn) open() error {
	if c.nl != nil {
		return nil
	}
	nl, err := netlink.Dial(unix.NETLINK_GENERIC, &netlink.Config{NetNS: c.netNS})
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	e := netlink.NewAttributeEncoder()
	e.String(controlFamilyName, "IPVS")
	answers, err := execute(nl, controlFamily, getFamily, 0, e)
	if errors.Is(err, unix.ENOENT) {
		err = errNoIPVS
	}
	if err != nil {
		nl.Close()
		return err
	}
	for _, d := range answers {
		for d.Next() {
			if d.Type() == controlFamilyID {
				c.family = d.Uint16()
			}
		}
	}
	c.nl = nl
	return nil
}

func (c *conn) close() error {
	if c.nl == nil {
		return nil
	}
	nl := c.nl
	c.nl = nil
	return nl.Close()
}

// checkConntrack returns an error if IPVS does not use connection tracking. Without
// connection tracking, nothing can be masqueraded.
func (c *conn) checkConntrack() error {
	const name = "net.ipv4.vs.conntrack"
	var value int
	var err error
	if nsErr := netns.Do(c.netNS, func() { value, err = sysctl.Kernel.Read(name) }); nsErr != nil {
		return nsErr
	}
	if err == nil && value != 1 {
		err = fmt.Errorf("sysctl %s is %d and must be 1: set it on the node", name, value)
	}
	return err
}

// execute sends a request and returns the attributes of each answer. If the kernel
// answers a command only with an acknowledgement, the flags must contain Acknowledge.
func execute(nl *netlink.Conn, family uint16, command uint8, flags netlink.HeaderFlags, e *netlink.AttributeEncoder) ([]*netlink.AttributeDecoder, error) {
	attributes, err := e.Encode()
	if err != nil {
		return nil, err
	}
	m := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(family), Flags: netlink.Request | flags},
		Data:   append([]byte{command, controlVersion, 0, 0}, attributes...),
	}
	messages, err := nl.Execute(m)
	if err != nil {
		return nil, err
	}
	var answers []*netlink.AttributeDecoder
	for _, m := range messages {
		if len(m.Data) < 4 || m.Header.Type == netlink.Error {
			continue // an acknowledgement
		}
		d, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return nil, err
		}
		answers = append(answers, d)
	}
	return answers, nil
}

// request sends a request about a virtual server. The arguments service and dest are
// functions that encode further attributes. Each function may be nil.
func (c *conn) request(command uint8, flags netlink.HeaderFlags, id serverID, service, dest func(*netlink.AttributeEncoder)) ([]*netlink.AttributeDecoder, error) {
	if err := c.open(); err != nil {
		return nil, err
	}
	e := netlink.NewAttributeEncoder()
	if id != (serverID{}) {
		e.Nested(attrService, func(e *netlink.AttributeEncoder) error {
			e.Uint16(svcFamily, afOf(id.Addr()))
			e.Uint16(svcProtocol, uint16(id.protocol.Number()))
			e.Bytes(svcAddr, id.Addr().AsSlice())
			e.Bytes(svcPort, portBytes(id.Port()))
			if service != nil {
				service(e)
			}
			return nil
		})
	}
	if dest != nil {
		e.Nested(attrDest, func(e *netlink.AttributeEncoder) error {
			dest(e)
			return nil
		})
	}
	answers, err := execute(c.nl, c.family, command, flags, e)
	if errors.Is(err, unix.ENOENT) {
		// The module may have been unloaded. When it is loaded again, the family gets another
		// number.
		family := c.family
		c.close()
		if err := c.open(); err != nil {
			return nil, err
		}
		if c.family != family {
			answers, err = execute(c.nl, c.family, command, flags, e)
		}
	}
	if err != nil && !isErrno(err) {
		c.close() // the socket may have answers to earlier requests
	}
	return answers, err
}

// isErrno reports whether err is an answer of the kernel to a request.
func isErrno(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno)
}

func afOf(a netip.Addr) uint16 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func portBytes(port uint16) []byte { return []byte{byte(port >> 8), byte(port)} }

// set creates a virtual server or changes its settings, but not its destinations.
func (c *conn) set(id serverID, create bool, s settings) error {
	command := uint8(setService)
	if create {
		command = newService
	}
	_, err := c.request(command, netlink.Acknowledge, id, func(e *netlink.AttributeEncoder) {
		e.String(svcScheduler, s.scheduler)
		const all = ^uint32(0) // the mask of the flags to set
		e.Bytes(svcFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.flags), all))
		e.Uint32(svcTimeout, 0) // the kernel requires this attribute and the next one
		e.Uint32(svcNetmask, hostMask(id.Addr()))
	}, nil)
	if errors.Is(err, unix.ENOENT) {
		err = fmt.Errorf("%w %s: load the module ip_vs_%s", errNoScheduler, s.scheduler, s.scheduler)
	}
	return wrap(err, "set virtual server %s", id)
}

// hostMask returns the mask of a single client, which has an effect only with persistence.
func hostMask(a netip.Addr) uint32 {
	if a.Is4() {
		return 0xffffffff
	}
	return 128
}

// setDestination adds a destination to a virtual server or changes its weight.
func (c *conn) setDestination(id serverID, at netip.AddrPort, create bool, weight uint32) error {
	command := uint8(setDest)
	if create {
		command = newDest
	}
	_, err := c.request(command, netlink.Acknowledge, id, nil, func(e *netlink.AttributeEncoder) {
		encodeDestination(e, at)
		e.Uint32(destMethod, methodMasquerade)
		e.Uint32(destWeight, weight)
		e.Uint32(destUpper, 0)
		e.Uint32(destLower, 0)
	})
	return wrap(err, "set endpoint %s of virtual server %s", at, id)
}

func encodeDestination(e *netlink.AttributeEncoder, at netip.AddrPort) {
	e.Bytes(destAddr, at.Addr().AsSlice())
	e.Bytes(destPort, portBytes(at.Port()))
	e.Uint16(destFam, afOf(at.Addr()))
}

func (c *conn) deleteDestination(id serverID, at netip.AddrPort) error {
	_, err := c.request(delDest, netlink.Acknowledge, id, nil, func(e *netlink.AttributeEncoder) { encodeDestination(e, at) })
	return wrap(err, "delete endpoint %s of virtual server %s", at, id)
}

// delete deletes a virtual server if it exists.
func (c *conn) delete(id serverID) error {
	_, err := c.request(delService, netlink.Acknowledge, id, nil, nil)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return wrap(err, "delete virtual server %s", id)
}

func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// list returns all virtual servers, without destinations. It omits virtual servers that a
// packet mark identifies. The kernel may omit other virtual servers too if virtual
// servers are deleted meanwhile.
func (c *conn) list() (map[serverID]*server, error) {
	answers, err := c.request(getService, netlink.Dump, serverID{}, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	all := map[serverID]*server{}
	for _, d := range answers {
		if id, s, ok := decodeServer(d); ok {
			all[id] = s
		}
	}
	return all, nil
}

// read returns a virtual server, or nil if it does not exist.
func (c *conn) read(id serverID) (*server, error) {
	answers, err := c.request(getService, 0, id, nil, nil)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read virtual server %s: %w", id, err)
	}
	for _, d := range answers {
		if _, s, ok := decodeServer(d); ok {
			return s, c.readDestinations(id, s)
		}
	}
	return nil, nil
}

// readDestinations reads the destinations of a virtual server into s.
func (c *conn) readDestinations(id serverID, s *server) error {
	answers, err := c.request(getDest, netlink.Dump, id, nil, nil)
	if err != nil {
		return fmt.Errorf("list endpoints of virtual server %s: %w", id, err)
	}
	s.destinations = make(map[netip.AddrPort]destination, len(answers))
	for _, d := range answers {
		for d.Next() {
			if d.Type() == attrDest {
				d.Nested(func(d *netlink.AttributeDecoder) error {
					var port uint16
					var addr []byte
					var to destination
					for d.Next() {
						switch d.Type() {
						case destAddr:
							addr = d.Bytes()
						case destPort:
							port = decodePort(d.Bytes())
						case destWeight:
							to.weight = d.Uint32()
						case destMethod:
							to.edited = to.edited || d.Uint32()&methodMask != methodMasquerade
						case destUpper, destLower:
							to.edited = to.edited || d.Uint32() != 0
						case destActive:
							to.established = d.Uint32()
							to.connections += to.established
						case destInactive:
							to.connections += d.Uint32()
						case destStats:
							d.Nested(to.decodeStats)
						}
					}
					if a, ok := decodeAddr(id.Addr().Is4(), addr); ok {
						s.destinations[netip.AddrPortFrom(a, port)] = to
					}
					return nil
				})
			}
		}
	}
	return nil
}

func (to *destination) decodeStats(d *netlink.AttributeDecoder) error {
	for d.Next() {
		switch d.Type() {
		case statsConnections:
			to.total = d.Uint64()
		case statsBytesIn:
			to.bytesIn = d.Uint64()
		case statsBytesOut:
			to.bytesOut = d.Uint64()
		}
	}
	return nil
}

func decodeServer(d *netlink.AttributeDecoder) (id serverID, s *server, ok bool) {
	s = &server{destinations: map[netip.AddrPort]destination{}}
	for d.Next() {
		if d.Type() != attrService {
			continue
		}
		d.Nested(func(d *netlink.AttributeDecoder) error {
			var family, port uint16
			var addr []byte
			for d.Next() {
				switch d.Type() {
				case svcFamily:
					family = d.Uint16()
				case svcProtocol:
					id.protocol = kernelnode.ProtocolOf(uint8(d.Uint16()))
				case svcAddr:
					addr = d.Bytes()
				case svcPort:
					port = decodePort(d.Bytes())
				case svcScheduler:
					s.scheduler = d.String()
				case svcFlags:
					if b := d.Bytes(); len(b) >= 4 {
						s.flags = binary.NativeEndian.Uint32(b) &^ flagHashed
					}
				}
			}
			var a netip.Addr
			a, ok = decodeAddr(family == unix.AF_INET, addr)
			id.AddrPort = netip.AddrPortFrom(a, port)
			return nil
		})
	}
	return id, s, ok && id.protocol != 0
}

// decodeAddr decodes an address, which has 16 octets in both families.
func decodeAddr(is4 bool, b []byte) (netip.Addr, bool) {
	if is4 && len(b) >= 4 {
		return netip.AddrFromSlice(b[:4])
	}
	return netip.AddrFromSlice(b)
}

func decodePort(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return uint16(b[0])<<8 | uint16(b[1])
}
