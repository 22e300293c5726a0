// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// errNoSets means that the node cannot use sets.
var errNoSets = errors.New("sets cannot be used")

// findIPSet returns the path of the program ipset. Its error wraps [errNoSets] if ipset
// is not installed, or if ipset cannot list sets, usually because the kernel lacks ip_set.
func findIPSet(ctx context.Context, opts *options) (string, error) {
	path, err := opts.findProgram("ipset", "ipset")
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("%w: %w", errNoSets, err)
	}
	if err != nil {
		return "", err
	}
	r := &runner{netNS: opts.NetNS}
	if _, err := r.command(ctx, "", path, "list", "-name"); err != nil {
		if ctx.Err() != nil {
			return "", err
		}
		return "", fmt.Errorf("%w: %w", errNoSets, err)
	}
	return path, nil
}

// maxElements limits the elements of each set. A set uses memory only for its present
// elements.
const maxElements = 1 << 20

// createLine returns the line that creates a set. If an equal set exists, the line does
// nothing.
func (r *runner) createLine(name, setType string) string {
	familyName := map[api.Family]string{api.IPv4: "inet", api.IPv6: "inet6"}[r.family]
	return fmt.Sprintf("create %s %s family %s maxelem %d -exist\n", name, setType, familyName, maxElements)
}

// createSets creates the sets that do not exist. The map sets has the type of each set.
// If a set exists with other properties, ipset refuses to create it, and createSets
// returns a [kernelnode.Difference].
func (r *runner) createSets(ctx context.Context, sets map[string]string) error {
	var input strings.Builder
	for name, setType := range sets {
		input.WriteString(r.createLine(name, setType))
	}
	_, err := r.command(ctx, input.String(), r.ipset, "restore")
	var failed *programError
	if errors.As(err, &failed) {
		return kernelnode.Differs("a set has another type or size: %v", failed)
	}
	return err
}

// replaceSets is like createSets, but replaces the sets that have other properties. It
// creates a new set and swaps it with the old one, because the kernel does not delete a
// set in use. The new sets have the elements of the old ones, unless the kernel refuses
// these elements.
func (r *runner) replaceSets(ctx context.Context, sets map[string]string) error {
	var d kernelnode.Difference
	if err := r.createSets(ctx, sets); !errors.As(err, &d) {
		return err
	}
	for name, setType := range sets {
		if _, err := r.command(ctx, r.createLine(name, setType), r.ipset, "restore"); err == nil {
			continue
		}
		elements, err := r.elements(ctx, name)
		if err != nil {
			return err
		}
		other := name + "NEW"
		var copied strings.Builder
		for _, e := range elements {
			fmt.Fprintf(&copied, "add %s %s\n", other, e)
		}
		for _, lines := range []string{copied.String(), ""} {
			r.command(ctx, "", r.ipset, "destroy", other) // a failed attempt or an earlier process may have left this set
			input := r.createLine(other, setType) + lines + fmt.Sprintf("swap %s %s\n", name, other)
			if _, err = r.command(ctx, input, r.ipset, "restore"); err == nil {
				break
			}
		}
		r.command(ctx, "", r.ipset, "destroy", other)
		if err != nil {
			return fmt.Errorf("replace set %s: %w (if another program created this set, delete it: ipset destroy %s)", name, err, name)
		}
	}
	return nil
}

// changeSets adds or deletes elements. Each item of list has the form "SET ELEMENT".
func (r *runner) changeSets(ctx context.Context, action string, list []string) error {
	if len(list) == 0 {
		return nil
	}
	slices.Sort(list)
	var input strings.Builder
	for _, item := range list {
		fmt.Fprintf(&input, "%s %s -exist\n", action, item)
	}
	_, err := r.command(ctx, input.String(), r.ipset, "restore")
	return err
}

// elements returns the elements of a set. It reads them over netlink, because the program
// ipset needs several times as long for large sets.
func (r *runner) elements(ctx context.Context, name string) (list []string, err error) {
	err = r.conn.Query(ctx, func(w *netfilter.Builder) {
		at := w.Begin(listSet, unix.NLM_F_DUMP, netfilter.Family(r.family))
		w.Bytes(attrProtocol, setProtocol)
		w.String(attrSetName, name)
		w.End(at)
	}, func(attributes []byte) {
		for _, data := range netfilter.Attributes(netfilter.Attribute(attributes, attrElements)) {
			list = append(list, elementText(data))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read set %s: %w", name, err)
	}
	return list, nil
}

// Parts of messages, from linux/netfilter/ipset/ip_set.h.
const (
	destroySet  = unix.NFNL_SUBSYS_IPSET<<8 | 3 // IPSET_CMD_DESTROY
	listSet     = unix.NFNL_SUBSYS_IPSET<<8 | 7 // IPSET_CMD_LIST
	setProtocol = 6                             // the version of the messages since Linux 2.6.39

	attrProtocol, attrSetName, attrFlags = 1, 2, 6 // IPSET_ATTR_PROTOCOL, _SETNAME, _FLAGS
	attrData, attrElements               = 7, 8    // IPSET_ATTR_DATA, _ADT
	attrCount                            = 24      // IPSET_ATTR_ELEMENTS, in attrData
	listHeader                           = 1 << 2  // IPSET_FLAG_LIST_HEADER: list no elements

	attrIP, attrCIDR, attrPort, attrProto, attrIP2 = 1, 3, 4, 7, 20 // IPSET_ATTR_IP, _CIDR, _PORT, _PROTO, _IP2
)

// elementText returns the element with these attributes, as an argument of the program
// ipset.
func elementText(data []byte) string {
	text := appendAddress(nil, netfilter.Attribute(data, attrIP))
	if bits := netfilter.Attribute(data, attrCIDR); len(bits) == 1 {
		text = strconv.AppendUint(append(text, '/'), uint64(bits[0]), 10)
	}
	protocol, port := netfilter.Attribute(data, attrProto), netfilter.Attribute(data, attrPort)
	if len(protocol) == 1 && len(port) == 2 {
		text = appendPort(append(text, ','), protocol[0], binary.BigEndian.Uint16(port))
	}
	if other := netfilter.Attribute(data, attrIP2); other != nil {
		text = appendAddress(append(text, ','), other)
	}
	return string(text)
}

// appendAddress appends the address in a nested attribute.
func appendAddress(text, nested []byte) []byte {
	for _, octets := range netfilter.Attributes(nested) {
		a, _ := netip.AddrFromSlice(octets)
		text = a.AppendTo(text)
	}
	return text
}

// appendPort appends a protocol and port. The backend adds only elements with TCP, UDP or
// SCTP.
func appendPort(text []byte, protocol byte, port uint16) []byte {
	switch protocol {
	case unix.IPPROTO_TCP:
		text = append(text, "tcp:"...)
	case unix.IPPROTO_UDP:
		text = append(text, "udp:"...)
	case unix.IPPROTO_SCTP:
		text = append(text, "sctp:"...)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6: // the port has a type and a code
		return fmt.Appendf(text, "%d:%d/%d", protocol, port>>8, port&0xff)
	default:
		text = fmt.Appendf(text, "%d:", protocol)
	}
	return strconv.AppendUint(text, uint64(port), 10)
}

// destroyWait limits the wait for the kernel to release a set.
const destroyWait = 5 * time.Second

// destroySets destroys the sets whose names isOwn accepts. In flavour nft, the kernel
// releases the sets of deleted rules some time later, so destroySets waits for each set.
func (r *runner) destroySets(ctx context.Context, isOwn func(string) bool) error {
	names, err := r.command(ctx, "", r.ipset, "list", "-name")
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range strings.Fields(names) {
		if !isOwn(name) {
			continue
		}
		begin := time.Now()
		for {
			_, err := r.command(ctx, "", r.ipset, "destroy", name)
			if err == nil || !strings.Contains(err.Error(), "in use") || time.Since(begin) > destroyWait {
				if err != nil {
					err = fmt.Errorf("destroy set %s (rules and sets of other programs may use it): %w", name, err)
				}
				errs = append(errs, err)
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return errors.Join(errs...)
}
