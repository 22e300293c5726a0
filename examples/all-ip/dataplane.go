// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	_ "embed"
	"fmt"
	"hash/crc32"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/reconcile"
	"golang.org/x/sys/unix"
)

// dataplane is a pair of nftables tables, one for each IP family, and the connections through
// them. all-ip changes only elements of sets and maps. It never changes the rules.
type dataplane struct {
	name string // of both tables
	// keep has the destinations to which pods keep their own address.
	keep []net.IPNet
	// pods has, for each IP of a service, the pods to which existing flows may continue. See
	// flowPart.
	pods map[netip.Addr]string
	// stale has the IPs whose flows must be checked. If the value is true, the filter of
	// the IP has changed, so all its flows are deleted. Otherwise, only the flows to pods
	// that d.pods does not have are deleted.
	stale map[netip.Addr]bool
}

// table is a table without elements.
//
//go:embed table.nft
var table string

// addressTypes are the types of addresses, by the families of tables.
var addressTypes = map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}

// layout is the comment of every rule, before a checksum of --keep-source. Change it whenever
// you change the rules, so that all-ip recreates tables that other versions of all-ip made.
const layout = "kpng all-ip 2"

// Start fails if this process cannot use nft.
func (d *dataplane) Start(ctx context.Context) error {
	_, err := nft(ctx, "list tables")
	return err
}

// elements matches a set or map that is not empty.
var elements = regexp.MustCompile(`(?s)\t(?:set|map) (\w+) \{[^}]*?elements = \{(.*?)\}`)

// List creates a table if it is missing, or if its rules or elements are not those of this
// version.
func (d *dataplane) List(ctx context.Context, emit func(object, string)) error {
	lines := map[object][]string{}
	for family := range addressTypes {
		create, comment := d.create(family)
		out, err := nft(ctx, fmt.Sprintf("list table %s %s", family, d.name))
		switch {
		case err != nil:
			_, err = nft(ctx, create) // fails if the table exists
		case strings.Count(out, comment) != strings.Count(create, comment) || !parse(out, lines):
			_, err = nft(ctx, fmt.Sprintf("delete table %s %s\n%s", family, d.name, create))
			maps.DeleteFunc(lines, func(o object, _ []string) bool { return o.ip.Is4() == (family == "ip") })
		}
		if err != nil {
			return err
		}
	}
	for o, l := range lines {
		emit(o, join(l))
	}
	for ip, pods := range d.pods {
		emit(object{flowPart, ip}, pods)
	}
	return nil
}

// parse adds the elements of a table to lines. It reports whether all-ip can have written them.
func parse(table string, lines map[object][]string) bool {
	for _, set := range elements.FindAllStringSubmatch(table, -1) {
		for element := range strings.SplitSeq(set[2], ",") {
			element = canonical(element)
			first, _, _ := strings.Cut(element, " ")
			ip, err := netip.ParseAddr(first)
			if err != nil {
				return false
			}
			o := object{addressPart, ip}
			if set[1] == hairpinSet || set[1] == egressSet {
				o.part = set[1]
			}
			lines[o] = append(lines[o], fmt.Sprintf("%s { %s }", set[1], element))
		}
	}
	return true
}

// create returns a script that creates the table of a family, and the comment of its rules.
func (d *dataplane) create(f string) (script, comment string) {
	keep := []string{map[string]string{"ip": "224.0.0.0/4", "ip6": "ff00::/8"}[f]}
	for _, p := range d.keep {
		if (p.IP.To4() != nil) == (f == "ip") {
			keep = append(keep, p.String())
		}
	}
	list := strings.Join(keep, ", ")
	comment = fmt.Sprintf("%s %08x", layout, crc32.ChecksumIEEE([]byte(list)))
	return fmt.Sprintf(table, f, d.name, addressTypes[f], comment, list), comment
}

// canonical writes the addresses of an element as Plan does.
func canonical(element string) string {
	parts := strings.Fields(element)
	for i, part := range parts {
		if ip, err := netip.ParseAddr(part); err == nil {
			parts[i] = ip.String()
		} else if p, err := netip.ParsePrefix(part); err == nil && p.IsSingleIP() {
			parts[i] = p.Addr().String()
		} else if n, err := strconv.ParseUint(part, 0, 32); err == nil {
			parts[i] = strconv.FormatUint(n, 10)
		}
	}
	return strings.Join(parts, " ")
}

// Apply changes elements in one transaction. Then it deletes the connection-tracking entries
// that no longer lead to the pods of the changed IPs.
func (d *dataplane) Apply(ctx context.Context, ops []reconcile.Op[object, string]) error {
	var deletes, adds strings.Builder
	for _, op := range ops {
		if op.Key.part == flowPart {
			continue
		}
		was, will := lines(op.Old), lines(op.New)
		write := func(to *strings.Builder, verb string, lines, except []string) {
			for _, line := range lines {
				if _, found := slices.BinarySearch(except, line); !found {
					set, element, _ := strings.Cut(line, " ")
					fmt.Fprintf(to, "%s element %s %s %s %s\n", verb, family(op.Key.ip), d.name, set, element)
				}
			}
		}
		write(&deletes, "delete", was, will)
		write(&adds, "add", will, was)
	}
	if deletes.Len()+adds.Len() > 0 {
		if _, err := nft(ctx, deletes.String()+adds.String()); err != nil {
			return err
		}
	}
	for _, op := range ops {
		switch ip := op.Key.ip; {
		case op.Key.part == hairpinSet || op.Key.part == egressSet:
			continue
		case op.Key.part == flowPart && op.New != nil:
			d.pods[ip] = *op.New
		case op.Key.part == flowPart:
			delete(d.pods, ip)
		}
		changed := op.Key.part == addressPart && !slices.Equal(limits(op.Old), limits(op.New))
		d.stale[op.Key.ip] = d.stale[op.Key.ip] || changed
	}
	return d.deleteFlows()
}

func lines(value *string) []string {
	if value == nil {
		return nil
	}
	return strings.Split(*value, "\n")
}

// limits returns the elements for filters and source ranges.
func limits(value *string) []string {
	return slices.DeleteFunc(lines(value), func(l string) bool {
		return strings.HasPrefix(l, "pod") || strings.HasPrefix(l, "rejected") || strings.HasPrefix(l, "dropped")
	})
}

// Cleanup deletes the tables.
func (d *dataplane) Cleanup(ctx context.Context) error {
	var script strings.Builder
	for family := range addressTypes { // nft cannot delete a missing table
		fmt.Fprintf(&script, "add table %[1]s %[2]s\ndelete table %[1]s %[2]s\n", family, d.name)
	}
	_, err := nft(ctx, script.String())
	return err
}

// nft runs a script as one transaction. Because the script is a file, a killed all-ip cannot
// leave a part of it to nft. When all-ip is killed, nft is killed, too. So nft cannot overwrite
// what the next all-ip writes.
func nft(ctx context.Context, script string) (string, error) {
	fd, err := unix.MemfdCreate("nft", unix.MFD_CLOEXEC)
	if err != nil {
		return "", fmt.Errorf("write nft script: %w", err)
	}
	file := os.NewFile(uintptr(fd), "nft")
	defer file.Close()
	if _, err := file.WriteAt([]byte(script), 0); err != nil {
		return "", fmt.Errorf("write nft script: %w", err)
	}
	runtime.LockOSThread() // the kernel sends Pdeathsig when this thread ends
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "nft", "-n", "-f", "-")
	cmd.Stdin = file
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("run nft: %w: %.500s", err, out)
		if ctx.Err() == nil {
			err = reconcile.Refused(err) // the kernel has changed nothing
		}
	}
	return string(out), err
}
