// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command port-range is the proxier of docs/build/specialised.md. It serves Services that have a range
// of ports in an annotation, over TCP and UDP, and logs new connections. It is the command
// reconcile with other keys, rules and maps.
package main

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

const annotation = "example.com/ports"

// parsePorts reads FIRST-LAST or a single port, and writes it as nft does.
func parsePorts(s string) (string, error) {
	from, to, isRange := strings.Cut(s, "-")
	if !isRange {
		to = from
	}
	first, err1 := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	switch {
	case err1 != nil || err2 != nil || first == 0 || first > last:
		return "", fmt.Errorf("annotation %s: %.40q is no range of ports, want for example 30000-30100", annotation, s)
	case first == last:
		return fmt.Sprint(first), nil
	}
	return fmt.Sprintf("%d-%d", first, last), nil
}

// selection skips services without a range of ports. It logs each wrong range once.
type selection struct {
	mu     sync.Mutex
	logged map[types.NamespacedName]string
}

func (l *selection) skip(s *corev1.Service) bool {
	value, annotated := s.Annotations[annotation]
	if !annotated {
		return true
	}
	_, err := parsePorts(value)
	l.mu.Lock()
	defer l.mu.Unlock()
	key := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	switch {
	case err == nil:
		delete(l.logged, key)
	case l.logged[key] != err.Error():
		if len(l.logged) == 1000 { // limits the memory for services that were deleted
			clear(l.logged)
		}
		l.logged[key] = err.Error()
		klog.Background().Error(err, "Service ignored", "service", key)
	}
	return err != nil
}

// dataplane is an nftables table. It has a chain for each address and protocol, and maps that
// lead to these chains. For each service, another chain logs connections. The key of a chain of
// an address is the IP family and the element of the map without the ports. The key of a chain
// that logs is "log" and the service.
type dataplane struct{ table string }

// chain has the rules of a chain, and the ports that lead to it. List knows only the ports and
// a digest of both.
type chain struct{ ports, rules, digest string }

func newChain(ports, rules string) chain {
	return chain{ports, rules, fmt.Sprintf("%x", sha256.Sum256([]byte(ports+"\n"+rules)))}
}

// skeleton is the table without services.
//
//go:embed table.nft
var skeleton string

// Plan emits the chains of a service.
func (dataplane) Plan(view *api.View, emit func(string, chain)) error {
	ports, err := parsePorts(view.Service.Annotations[annotation])
	if err != nil {
		return err
	}
	name := view.Key().String()
	for f, why := range nodeview.Unserved(view) {
		klog.Background().Info("Address not served", "service", name, "frontend", f.String(), "reason", why)
	}
	// At most 10 lines in a second (rate and burst), and 5 a second for long. The kernel allows a
	// prefix of 127 bytes.
	emit("log "+name, newChain("", fmt.Sprintf("limit rate 5/second burst 5 packets log prefix \"%.125s: \"", name)))
	for f := range nodeview.Frontends(view) {
		if f.Port != 0 || f.Sources.Restricted {
			continue // not supported
		}
		ip := "ip"
		if f.Family == api.IPv6 {
			ip = "ip6"
		}
		rules := "jump log-" + name + "\n"
		rules += traffic("fib saddr type local", ip, f.Node, f.Masquerade != nodeview.MasqueradeIfConfigured)
		rules += traffic("", ip, f.Elsewhere, f.Masquerade == nodeview.MasqueradeAll)
		for _, protocol := range []string{"tcp", "udp"} {
			emit(fmt.Sprintf("%s %s . %s", ip, f.Addr, protocol), newChain(ports, rules))
		}
	}
	return nil
}

// masquerade marks a packet. The chain postrouting of table.nft replaces the source address of
// such packets. kube-proxy uses the bit 0x4000, and old kubelets drop packets with 0x8000.
const masquerade = "meta mark set meta mark | 0x2000"

// traffic returns rules for traffic to a frontend. The argument match selects this traffic.
func traffic(match, ip string, t nodeview.Traffic, masqueradeAll bool) string {
	var rules strings.Builder
	for i, e := range t.Endpoints {
		// The rule for the first of 3 endpoints matches 1 in 3 connections, the next rule 1 in 2
		// of the others, and the last rule all others.
		random := fmt.Sprintf("numgen random mod %d 0", len(t.Endpoints)-i)
		dnat := fmt.Sprintf("dnat %s to %s", ip, e.Addr) // the port stays
		if masqueradeAll {
			fmt.Fprintln(&rules, match, random, masquerade, dnat)
			continue
		}
		fmt.Fprintln(&rules, match, ip, "saddr ==", e.Addr, random, masquerade, dnat) // hairpin
		fmt.Fprintln(&rules, match, ip, "saddr !=", e.Addr, random, dnat)
	}
	if t.Verdict == nodeview.Drop {
		fmt.Fprintln(&rules, match, "drop")
	} else {
		fmt.Fprintln(&rules, match, "reject") // after endpoints, no connection gets here
	}
	return rules.String()
}

// List creates the table if it does not exist.
func (d dataplane) List(ctx context.Context, emit func(string, chain)) error {
	out, err := nft(ctx, "list table inet "+d.table)
	if err != nil {
		_, err = nft(ctx, fmt.Sprintf(skeleton, d.table))
	}
	for _, m := range element.FindAllStringSubmatch(out, -1) {
		match, ports, digest, ip := m[1], m[2], m[3], m[4]
		emit(ip+" "+match, chain{ports: ports, digest: digest})
	}
	for _, m := range logging.FindAllStringSubmatch(out, -1) {
		name, digest := m[1], m[2]
		emit("log "+name, chain{digest: digest})
	}
	return err
}

var (
	element = regexp.MustCompile(`(\S+ \. \w+) \. ([\d-]+) comment "(\w+)" : goto (ip6?)-`)
	logging = regexp.MustCompile(`chain log-(\S+) \{\n.* comment "(\w+)"\n`)
)

// Apply writes one script, which the kernel applies completely or not at all.
func (d dataplane) Apply(ctx context.Context, ops []reconcile.Op[string, chain]) error {
	var s strings.Builder
	for _, op := range ops {
		kind, match, _ := strings.Cut(op.Key, " ")
		name := strings.NewReplacer(" . ", "-", " ", "-", ":", "_").Replace(op.Key)
		if kind != "log" && op.Old != nil { // first, because ranges of an address must not overlap
			fmt.Fprintf(&s, "delete element inet %s frontends_%s { %s . %s }\n", d.table, kind, match, op.Old.ports)
		}
		fmt.Fprintf(&s, "add chain inet %[1]s %[2]s\nflush chain inet %[1]s %[2]s\n", d.table, name)
		switch {
		case op.New == nil:
			fmt.Fprintf(&s, "delete chain inet %s %s\n", d.table, name)
		case kind == "log":
			fmt.Fprintf(&s, "add rule inet %s %s %s comment %q\n", d.table, name, op.New.rules, op.New.digest)
		default:
			fmt.Fprintf(&s, "table inet %s {\nchain %s {\n%s}\n}\n", d.table, name, op.New.rules)
			fmt.Fprintf(&s, "add element inet %s frontends_%s { %s . %s comment %q : goto %s }\n", d.table, kind, match, op.New.ports, op.New.digest, name)
		}
	}
	_, err := nft(ctx, s.String())
	return err
}

// Cleanup deletes the table.
func (d dataplane) Cleanup(ctx context.Context) error {
	_, err := nft(ctx, fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", d.table))
	return err
}

// nft runs a script. It does not write the script to a pipe: if this process were killed, nft
// would run a part of the script. A script that is too long is refused, so it is divided.
func nft(ctx context.Context, script string) (string, error) {
	out, err := exec.CommandContext(ctx, "nft", strings.SplitAfter(script, "\n")...).CombinedOutput()
	if err != nil && ctx.Err() == nil { // the kernel has changed nothing
		err = reconcile.Refused(fmt.Errorf("run nft: %w: %.500s", err, out))
	}
	return string(out), err
}

func equal(is, want chain) bool { return is.digest == want.digest }

// depth makes reconcile write the chains that log before the chains that jump to them.
func depth(key string) int {
	if strings.HasPrefix(key, "log ") {
		return 1
	}
	return 0
}

func main() {
	l := selection{logged: map[types.NamespacedName]string{}}
	app.Execute(app.Command(app.Options{
		Name: "port-range",
		Sink: reconcile.New(dataplane{"port-range"}, reconcile.Options[string, chain]{Equal: equal, Depth: depth}),
		Services: watcher.Options{
			ServiceProxyName: "port-range",
			KeepAnnotations:  []string{annotation}, // otherwise, views have no annotations
			Skip:             l.skip,
			AllPorts:         func(*corev1.Service) bool { return true },
		},
	}))
}
