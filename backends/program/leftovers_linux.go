// SPDX-License-Identifier: Apache-2.0

package program

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// leftover describes rules or devices that another service proxy has left in the kernel.
// They may handle connections to services before the rules of kpng do.
type leftover struct {
	what, remove string
}

// kubeProxyChain is a chain of kube-proxy in its modes iptables and ipvs. Packets reach
// kube-proxy's other chains for services only through this chain.
const kubeProxyChain = "KUBE-SERVICES"

// leftoverFinder finds leftovers of one kind in the network namespace of the calling
// thread.
type leftoverFinder func(context.Context) ([]leftover, error)

// reportLeftovers logs the leftovers of kube-proxy in the network namespace of the
// calling thread. Without finders, it searches for leftovers of all kinds.
func reportLeftovers(ctx context.Context, finders ...leftoverFinder) {
	log := klog.FromContext(ctx)
	found, err := findLeftovers(ctx, finders...)
	for _, l := range found {
		log.Info("Rules of kube-proxy are still there and may take connections to services; stop kube-proxy and remove them",
			"found", l.what, "remove", l.remove)
	}
	if err != nil {
		log.Error(err, "Cannot look for rules that kube-proxy left")
	}
}

// findLeftovers searches the network namespace of the calling thread. If a part of the
// search fails, findLeftovers returns the results of the other parts and an error.
func findLeftovers(ctx context.Context, finders ...leftoverFinder) ([]leftover, error) {
	var found []leftover
	var errs []error
	if len(finders) == 0 {
		finders = []leftoverFinder{nftablesLeftovers, legacyLeftovers, interfaceLeftovers, serverLeftovers}
	}
	for _, find := range finders {
		some, err := find(ctx)
		found = append(found, some...)
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}

// nftablesLeftovers finds the tables of kube-proxy's mode nftables. It also finds the
// chains that kube-proxy's other modes made with iptables-nft.
func nftablesLeftovers(ctx context.Context) ([]leftover, error) {
	// from linux/netfilter/nf_tables.h
	const chainTable, chainName = 1, 3
	c := netfilter.NewConn(0)
	defer c.Close()
	var found []leftover
	var errs []error
	for _, family := range []struct {
		name   string
		number byte
	}{{"ip", unix.NFPROTO_IPV4}, {"ip6", unix.NFPROTO_IPV6}} {
		errs = append(errs, c.ListChains(ctx, family.number, func(attributes []byte) (isNew bool) {
			table, chain := family.name, ""
			for attr, data := range netfilter.Attributes(attributes) {
				switch attr {
				case chainTable:
					table += " " + netfilter.String(data)
				case chainName:
					chain = netfilter.String(data)
				}
			}
			l := leftover{"nftables table " + table, "nft delete table " + table}
			if chain == kubeProxyChain {
				l = leftover{"chain " + chain + " of iptables-nft in table " + table, "kube-proxy --cleanup"}
			} else if table != family.name+" kube-proxy" {
				return false
			}
			if slices.Contains(found, l) {
				return false
			}
			found = append(found, l)
			return true
		}))
	}
	return found, errors.Join(errs...)
}

// legacyLeftovers finds the chains that kube-proxy's modes iptables and ipvs made with
// iptables-legacy.
func legacyLeftovers(context.Context) ([]leftover, error) {
	var found []leftover
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
			has, err := legacyTableHas(f.socket, f.level, table, kubeProxyChain)
			if err != nil {
				errs = append(errs, fmt.Errorf("read table %s %s of iptables-legacy: %w", f.name, table, err))
			} else if has {
				found = append(found, leftover{"chain " + kubeProxyChain + " of iptables-legacy in table " + f.name + " " + table, "kube-proxy --cleanup"})
			}
		}
	}
	return found, errors.Join(errs...)
}

// legacyTableHas reports whether a table of iptables-legacy has a chain.
func legacyTableHas(family, level int, table, chain string) (bool, error) {
	// The numbers are from linux/netfilter_ipv4/ip_tables.h, and ip6_tables.h has the same
	// numbers. In ipt_getinfo, the last field is the size of the rules. In ipt_get_entries,
	// the second field is this size, and the rules come after that field. The rules of each
	// chain begin with the name of the chain.
	const (
		getInfo, infoSize, infoSizeAt           = 64, 84, 80
		getEntries, entriesSizeAt, entriesStart = 65, 32, 40
	)
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("open a socket: %w", err)
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
			return false, err
		}
		size := binary.NativeEndian.Uint32(info[infoSizeAt:])
		entries := make([]byte, entriesStart+int(size))
		binary.NativeEndian.PutUint32(entries[entriesSizeAt:], size)
		err := get(getEntries, entries)
		if errors.Is(err, unix.EAGAIN) && attempt < 10 {
			continue // after getInfo, another program changed the size of the table
		}
		return err == nil && bytes.Contains(entries, append([]byte(chain), 0)), err
	}
}

// interfaceLeftovers finds the interface of kube-proxy's mode ipvs.
func interfaceLeftovers(context.Context) ([]leftover, error) {
	const device = "kube-ipvs0"
	_, err := netlink.LinkByName(device)
	switch {
	case err == nil:
		return []leftover{{"interface " + device, "ip link delete " + device}}, nil
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
	n := 0
	for line := range strings.Lines(string(text)) {
		if slices.ContainsFunc([]string{"TCP ", "UDP ", "SCTP "}, func(p string) bool { return strings.HasPrefix(line, p) }) {
			n++
		}
	}
	if n == 0 {
		return nil, nil
	}
	return []leftover{{fmt.Sprintf("%d virtual servers of IPVS", n), "ipvsadm --clear"}}, nil
}
