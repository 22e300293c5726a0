// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

//go:embed skeleton.nft
var skeletonText string

// skeletonChains are the names of the chains that the skeleton has.
var skeletonChain = regexp.MustCompile(`(?m)^\tchain ([a-z-]+) \{ `)

type skeletonFamily struct {
	N        int
	IP, Type string
}

// skeleton returns what the table has whatever the services are, in nft's
// language. Loaded into a table that has it, it changes nothing but what was edited.
func (o *Options) skeleton() string {
	data := struct {
		*Options
		Table              string
		Mark               string
		Families           []skeletonFamily
		Here               []string
		Chains             []string
		PodMatches         []string
		OutsiderMatches    []string
		RejectUnknownPorts bool
	}{
		Options:            o,
		Table:              o.table(),
		Mark:               fmt.Sprintf("%#x", o.MasqueradeMark),
		Families:           []skeletonFamily{{4, "ip", "ipv4_addr"}, {6, "ip6", "ipv6_addr"}},
		Here:               []string{"", "here-"},
		Chains:             skeletonChains(),
		PodMatches:         o.podMatches(),
		OutsiderMatches:    o.outsiderMatches(),
		RejectUnknownPorts: !o.AcceptUnknownPorts,
	}
	var b bytes.Buffer
	if err := template.Must(template.New("skeleton").Parse(skeletonText)).Execute(&b, data); err != nil {
		panic(err) // the template is ours, and its data too
	}
	return b.String()
}

func skeletonChains() []string {
	var chains []string
	for _, m := range skeletonChain.FindAllStringSubmatch(skeletonText, -1) {
		chains = append(chains, m[1])
	}
	return chains
}

// podMatches returns what matches packets of this node's pods.
func (o *Options) podMatches() []string {
	var matches []string
	for _, name := range o.PodInterfaces {
		matches = append(matches, fmt.Sprintf("iifname %q", name))
	}
	for _, cidr := range o.ClusterCIDRs {
		ip := "ip"
		if cidr.Addr().Is6() {
			ip = "ip6"
		}
		matches = append(matches, fmt.Sprintf("%s saddr %s", ip, cidr.Masked()))
	}
	return matches
}

// outsiderMatches returns what matches packets, none of pods, that come from outside the
// pod network: of a family that nothing tells the pods of, none do.
func (o *Options) outsiderMatches() []string {
	if len(o.PodInterfaces) > 0 {
		return []string{""}
	}
	var matches []string
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		if slices.ContainsFunc(o.ClusterCIDRs, func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == family }) {
			matches = append(matches, fmt.Sprintf("meta nfproto ipv%d ", family))
		}
	}
	return matches
}

// loadSkeleton makes the table and its skeleton, or mends it. The elements of maps
// that are there stay, unless a map or chain is of another kind than it should be:
// then the table has to go first.
func (b *Backend) loadSkeleton(ctx context.Context) error {
	text := b.opts.skeleton()
	err := b.nft(ctx, text)
	if isMismatch(err) {
		klog.FromContext(ctx).Info("Making the table anew, as it has maps or chains of another kind", "table", b.opts.table(), "reason", err.Error())
		err = b.nft(ctx, fmt.Sprintf("table inet %[1]s\ndelete table inet %[1]s\n%[2]s", b.opts.table(), text))
	}
	if err != nil {
		return err
	}
	if b.loaded, err = b.conn.generation(ctx); err != nil {
		return err
	}
	rules, err := b.readChains(ctx)
	if err != nil {
		return err
	}
	b.skeleton = map[string]digest{}
	for _, name := range skeletonChains() {
		b.skeleton[name] = rules[name]
	}
	return nil
}

// refreshSkeleton loads the skeleton for a pass, unless Start has just done so and
// nobody has changed any table since.
func (b *Backend) refreshSkeleton(ctx context.Context) error {
	if b.fresh {
		b.fresh = false
		if now, err := b.conn.generation(ctx); err != nil || now == b.loaded {
			return err
		}
	}
	return b.loadSkeleton(ctx)
}

// isMismatch reports whether the skeleton could not be loaded because of what
// there is.
func isMismatch(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "File exists") || strings.Contains(err.Error(), "mismatch"))
}

// nft runs the nft program on commands, in the backend's network namespace.
func (b *Backend) nft(ctx context.Context, commands string) error {
	cmd := exec.CommandContext(ctx, b.opts.NFT, "-f", "-")
	cmd.Stdin = strings.NewReader(commands)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stderr, &stderr
	err := inNetNS(b.opts.NetNS, cmd.Run)
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("table inet %s cannot be made without the nft program (package nftables): %w", b.opts.table(), err)
	case strings.Contains(stderr.String(), "Operation not permitted"):
		return fmt.Errorf("making table inet %s with %s: %w", b.opts.table(), b.opts.NFT, &netfilter.Failure{Errno: unix.EPERM})
	case err != nil:
		return fmt.Errorf("making table inet %s with %s: %w: %s", b.opts.table(), b.opts.NFT, err, firstLine(stderr.String()))
	}
	return nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}
