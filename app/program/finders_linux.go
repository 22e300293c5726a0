// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// kubeProxyChain is a chain of kube-proxy in its modes iptables and ipvs. Packets reach
// kube-proxy's other chains for services only through this chain.
const kubeProxyChain = "KUBE-SERVICES"

// iptablesChain matches a chain of the backend iptables. The chain has the same role as
// kubeProxyChain, and its name contains the name of the instance.
var iptablesChain = regexp.MustCompile(`^KPNG-(?:([A-Za-z0-9]{1,6})-)?SERVICES$`)

// ofChain returns the leftover to which a chain of a table belongs. The argument flavour
// is the variant of iptables.
func ofChain(chain, flavour, table string) (l leftover, ok bool) {
	if chain == kubeProxyChain {
		return leftover{what: "chain " + chain + " of " + flavour + " in table " + table, remove: "kube-proxy --cleanup"}, true
	}
	if name := iptablesChain.FindStringSubmatch(chain); name != nil {
		return ofKpng(instance{"iptables", name[1]}, "chain "+chain+" of "+flavour+" in table "+table), true
	}
	return leftover{}, false
}

func ofKpng(i instance, what string) leftover {
	return leftover{what: what, remove: i.cleanupCommand(), by: i}
}

// kpngTable matches the tables of the backends nftables and ipvs. The backend ipvs has two.
var kpngTable = regexp.MustCompile(`^(kpng-ipvs|kpng2?-of-ipvs|kpng2?)(?:-(.+))?$`)

// ofTable returns the leftover to which a table of nftables belongs.
func ofTable(family, name string) (l leftover, ok bool) {
	table := "nftables table " + family + " " + name
	if family != "inet" {
		return leftover{what: table, remove: "nft delete table " + family + " " + name}, name == "kube-proxy"
	}
	parts := kpngTable.FindStringSubmatch(name)
	if parts == nil {
		return leftover{}, false
	}
	backend := "nftables"
	if strings.HasSuffix(parts[1], "ipvs") {
		backend = "ipvs"
	}
	return ofKpng(instance{backend, parts[2]}, table), true
}

// nftablesLeftovers finds tables of nftables, and chains that were made with iptables-nft.
func nftablesLeftovers(ctx context.Context) ([]leftover, error) {
	var found []leftover
	err := eachChain(ctx, func(c chain) (isNew bool) {
		l, ok := leftover{}, false
		if c.family != "inet" {
			l, ok = ofChain(c.name, "iptables-nft", c.family+" "+c.table)
		}
		if !ok {
			l, ok = ofTable(c.family, c.table)
		}
		if !ok || slices.Contains(found, l) {
			return false
		}
		found = append(found, l)
		return true
	})
	return found, err
}

// chain is a chain of nf_tables.
type chain struct {
	family, table, name string
	dropsForwarded      bool // it is a base chain of hook forward with policy DROP
}

// eachChain calls visit for each chain of the families ip, ip6 and inet. It may call visit
// several times with the same chain. The function visit returns true for a chain that
// concerns the caller and that the caller has not seen before; see Conn.ListChains.
func eachChain(ctx context.Context, visit func(chain) (isNew bool)) error {
	// from linux/netfilter/nf_tables.h
	const (
		chainTable, chainName, chainHook, chainPolicy = 1, 3, 4, 5
		hookNumber, drop                              = 1, 0
	)
	c := netfilter.NewConn(0)
	defer c.Close()
	var errs []error
	for _, family := range []struct {
		name   string
		number byte
	}{{"ip", unix.NFPROTO_IPV4}, {"ip6", unix.NFPROTO_IPV6}, {"inet", unix.NFPROTO_INET}} {
		errs = append(errs, c.ListChains(ctx, family.number, func(attributes []byte) (isNew bool) {
			hook := netfilter.Attribute(netfilter.Attribute(attributes, chainHook), hookNumber)
			policy := netfilter.Attribute(attributes, chainPolicy)
			return visit(chain{
				family: family.name, table: netfilter.String(netfilter.Attribute(attributes, chainTable)), name: netfilter.String(netfilter.Attribute(attributes, chainName)),
				dropsForwarded: hook != nil && netfilter.Uint32(hook) == unix.NF_INET_FORWARD && policy != nil && netfilter.Uint32(policy) == drop,
			})
		}))
	}
	return errors.Join(errs...)
}

// legacyLeftovers finds chains that were made with iptables-legacy.
func legacyLeftovers(context.Context) ([]leftover, error) {
	var found []leftover
	err := eachLegacyTable(func(table string, entries []byte, _ bool) {
		for _, name := range legacyName.FindAllSubmatch(entries, -1) {
			if l, ok := ofChain(string(name[1]), "iptables-legacy", table); ok && !slices.Contains(found, l) {
				found = append(found, l)
			}
		}
	})
	return found, err
}

// eachLegacyTable calls visit with the results of legacyTable for each table of
// iptables-legacy, such as "ip filter".
func eachLegacyTable(visit func(table string, entries []byte, dropsForwarded bool)) error {
	var errs []error
	for _, f := range []struct {
		family        api.Family
		name          string
		socket, level int
	}{
		{api.IPv4, "ip", unix.AF_INET, unix.SOL_IP},
		{api.IPv6, "ip6", unix.AF_INET6, unix.SOL_IPV6},
	} {
		tables, err := netfilter.LegacyTables(f.family)
		errs = append(errs, err)
		for _, table := range tables {
			entries, dropsForwarded, err := legacyTable(f.socket, f.level, table)
			if err != nil {
				errs = append(errs, fmt.Errorf("read table %s %s of iptables-legacy: %w", f.name, table, err))
			}
			visit(f.name+" "+table, entries, dropsForwarded)
		}
	}
	return errors.Join(errs...)
}

// legacyName matches the names of chains that ofChain may know. The byte before a name is
// the revision of a target, 0.
var legacyName = regexp.MustCompile(`\x00((?:KUBE|KPNG)-(?:[A-Za-z0-9]{1,6}-)?SERVICES)\x00`)

// legacyTable returns the rules of a table of iptables-legacy. The rules contain the
// names of the table's chains. The result dropsForwarded says whether the table has the
// chain FORWARD with policy DROP.
func legacyTable(family, level int, table string) (entries []byte, dropsForwarded bool, err error) {
	// The numbers are from linux/netfilter_ipv4/ip_tables.h, and ip6_tables.h has the same
	// numbers. In ipt_getinfo, the last field is the size of the rules. In ipt_get_entries,
	// the second field is this size, and the rules come after that field. The rules of each
	// chain begin with the name of the chain.
	// The last rule of a base chain is the policy, at the offset that ipt_getinfo has for
	// each hook. The target of this rule is a header of 32 bytes and a verdict.
	const (
		getInfo, infoSize, infoSizeAt           = 64, 84, 80
		infoHooks, infoForwardPolicyAt          = 32, 64
		getEntries, entriesSizeAt, entriesStart = 65, 32, 40
		targetHeader                            = 32
		verdictDrop                             = ^uint32(0)
	)
	targetOffsetAt := map[int]int{unix.AF_INET: 88, unix.AF_INET6: 140}[family]
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, false, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	get := func(option int, buffer []byte) error {
		copy(buffer, table)
		n := uint32(len(buffer))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
			uintptr(unsafe.Pointer(&buffer[0])), uintptr(unsafe.Pointer(&n)), 0)
		if errno != 0 {
			return os.NewSyscallError("getsockopt", errno)
		}
		return nil
	}
	for attempt := 0; ; attempt++ {
		info := make([]byte, infoSize)
		if err := get(getInfo, info); err != nil {
			return nil, false, err
		}
		size := binary.NativeEndian.Uint32(info[infoSizeAt:])
		entries = make([]byte, entriesStart+int(size))
		binary.NativeEndian.PutUint32(entries[entriesSizeAt:], size)
		err := get(getEntries, entries)
		if errors.Is(err, unix.EAGAIN) && attempt < 10 {
			continue // after getInfo, another program changed the size of the table
		}
		if err == nil && binary.NativeEndian.Uint32(info[infoHooks:])&(1<<unix.NF_INET_FORWARD) != 0 {
			policy := entries[entriesStart+int(binary.NativeEndian.Uint32(info[infoForwardPolicyAt:])):]
			target := policy[binary.NativeEndian.Uint16(policy[targetOffsetAt:]):]
			dropsForwarded = binary.NativeEndian.Uint32(target[targetHeader:]) == verdictDrop
		}
		return entries, dropsForwarded, err
	}
}

// interfaceLeftovers finds the interface of kube-proxy's mode ipvs.
func interfaceLeftovers(context.Context) ([]leftover, error) {
	const device = "kube-ipvs0"
	_, err := netlink.LinkByName(device)
	switch {
	case err == nil:
		return []leftover{{what: "interface " + device, remove: "ip link delete " + device}}, nil
	case errors.As(err, &netlink.LinkNotFoundError{}):
		return nil, nil
	default:
		return nil, fmt.Errorf("look for interface %s: %w", device, err)
	}
}

// serverLeftovers finds virtual servers of IPVS.
func serverLeftovers(context.Context) ([]leftover, error) {
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list virtual servers of IPVS: %w", err)
	}
	// Each line that begins with a protocol describes a virtual server.
	for line := range strings.Lines(string(text)) {
		if slices.ContainsFunc([]string{"TCP ", "UDP ", "SCTP "}, func(p string) bool { return strings.HasPrefix(line, p) }) {
			return []leftover{{what: ipvsServers, remove: "ipvsadm --clear"}}, nil
		}
	}
	return nil, nil
}

const ipvsServers = "virtual servers of IPVS"

// userspaceProtocol is the protocol number of routes that the backend userspace makes.
const userspaceProtocol = 107

// routeLeftovers finds routes of the backend userspace.
func routeLeftovers(context.Context) ([]leftover, error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family,
			&netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: userspaceProtocol},
			netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		if len(routes) > 0 {
			return []leftover{ofKpng(instance{backend: "userspace"}, fmt.Sprintf("local routes of protocol %d", userspaceProtocol))}, nil
		}
	}
	return nil, nil
}

// ebpfLeftovers finds the maps of the backend ebpf, if this process sees the BPF file
// system.
func ebpfLeftovers(bpffs string) (found []leftover, err error) {
	entries, err := os.ReadDir(bpffs)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), "kpng-ebpf")
		name, named := strings.CutPrefix(rest, "-")
		if ok && (named || rest == "") {
			found = append(found, ofKpng(instance{"ebpf", name}, "eBPF maps in "+filepath.Join(bpffs, e.Name())))
		}
	}
	return found, err
}
