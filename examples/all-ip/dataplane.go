// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	_ "embed"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/reconcile"
	"golang.org/x/sys/unix"
)

// dataplane is a pair of nftables tables, one for each IP family, and the connections through
// them. all-ip changes only elements of sets and maps. It never changes the rules.
type dataplane struct {
	name string // of both tables
	// pods has, for each external IP, the pods to which existing flows may continue. See
	// flowSet.
	pods map[netip.Addr]string
	// stale has the external IPs whose flows have to be checked.
	stale map[netip.Addr]bool
}

// object is an element of a set or map. Its value is the value of the map, or empty.
type object struct{ family, set, key string }

// table is a table without elements.
//
//go:embed table.nft
var table string

// addressTypes are the types of addresses, by the families of tables.
var addressTypes = map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}

const (
	// layout is the comment of every rule. Change it whenever you change the rules, so that
	// all-ip recreates tables that other versions of all-ip made.
	layout = "kpng all-ip 1"
	// rules is the number of rules in a table.
	rules = 8
)

// Start fails if this process cannot use nft.
func (d *dataplane) Start(ctx context.Context) error {
	_, err := nft(ctx, "list tables")
	return err
}

// elements matches a set or map that is not empty.
var elements = regexp.MustCompile(`(?s)\t(?:set|map) (\w+) \{[^}]*?elements = \{(.*?)\}`)

// List creates tables that are missing or do not have the rules of this version.
func (d *dataplane) List(ctx context.Context, emit func(object, string)) error {
	for family, address := range addressTypes {
		create := fmt.Sprintf(table, family, d.name, address, layout)
		out, err := nft(ctx, fmt.Sprintf("list table %s %s", family, d.name))
		switch {
		case err != nil:
			_, err = nft(ctx, create) // fails if the table exists
		case strings.Count(out, layout) != rules:
			out = ""
			_, err = nft(ctx, fmt.Sprintf("delete table %s %s\n%s", family, d.name, create))
		}
		if err != nil {
			return err
		}
		for _, set := range elements.FindAllStringSubmatch(out, -1) {
			for element := range strings.SplitSeq(set[2], ",") {
				key, value, _ := strings.Cut(strings.TrimSpace(element), " : ")
				emit(object{family, set[1], canonical(key)}, canonical(value))
			}
		}
	}
	for ip, pods := range d.pods {
		emit(object{family(ip), flowSet, ip.String()}, pods)
	}
	return nil
}

// canonical writes the addresses and numbers of a key as Plan does.
func canonical(key string) string {
	parts := strings.Split(key, " . ")
	for i, part := range parts {
		if ip, err := netip.ParseAddr(part); err == nil {
			parts[i] = ip.String()
		} else if n, err := strconv.ParseUint(part, 0, 32); err == nil {
			parts[i] = strconv.FormatUint(n, 10)
		}
	}
	return strings.Join(parts, " . ")
}

// Apply changes elements in one transaction. Then it deletes the connection-tracking entries
// that no longer lead to the pods of the changed external IPs.
func (d *dataplane) Apply(ctx context.Context, ops []reconcile.Op[object, string]) error {
	var script strings.Builder
	for _, op := range ops {
		of := fmt.Sprintf("element %s %s %s { %s", op.Key.family, d.name, op.Key.set, op.Key.key)
		if op.Key.set != flowSet && op.Old != nil {
			fmt.Fprintf(&script, "delete %s }\n", of)
		}
		if op.Key.set != flowSet && op.New != nil {
			fmt.Fprintf(&script, "add %s%s }\n", of, strings.TrimSuffix(" : "+*op.New, " : "))
		}
	}
	if script.Len() > 0 {
		if _, err := nft(ctx, script.String()); err != nil {
			return err
		}
	}
	for _, op := range ops {
		if op.Key.set == hairpinSet {
			continue
		}
		first, _, _ := strings.Cut(op.Key.key, " ")
		ip := netip.MustParseAddr(first)
		d.stale[ip] = true
		switch {
		case op.Key.set != flowSet:
		case op.New != nil:
			d.pods[ip] = *op.New
		default:
			delete(d.pods, ip)
		}
	}
	return d.deleteFlows()
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
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
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
