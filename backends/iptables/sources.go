// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// sourceList is a list of admitted sources. Equal lists have equal names, and all frontends
// with an equal list share one set or, without sets, one chain of table mangle. The content
// of a list never changes: a frontend whose sources change gets another list.
type sourceList struct {
	name string // the name of the set or of the chain
	// content has the elements of the set in the order of their texts or, without sets, the
	// rules of the chain. Each line has one element or rule.
	content string
}

// sourceType has the type and the initial size of a set for a source list.
const sourceType = "hash:net hashsize 64"

// mangleTarget returns the rest of a rule of table mangle. The rule drops packets to f
// from sources that f does not admit. It returns "" if f admits all sources. Table mangle
// is before table nat, so a rule of another program cannot translate such packets first.
func (s *serviceRenderer) mangleTarget(f *nodeview.Frontend) string {
	if !f.Sources.Restricted {
		return ""
	}
	list := s.sources(f)
	switch {
	case list.content == "":
		return "-j DROP"
	case s.withSets:
		return "-m set ! --match-set " + list.name + " src -j DROP"
	}
	return jump(list.name)
}

// sources returns the list of the sources that f admits. If the previous record is of the
// same Service object, it has the same list.
func (s *serviceRenderer) sources(f *nodeview.Frontend) *sourceList {
	list := s.out.sources[f.Addr]
	if list == nil && s.last != nil && s.last.view != nil && s.last.view.Service == s.view.Service {
		list = s.last.sources[f.Addr]
	}
	if list == nil {
		list = s.shared(f)
	}
	s.out.sources[f.Addr] = list
	return list
}

// shared returns the list of the sources that f admits. It computes the list once for all
// addresses that share their source ranges.
func (s *serviceRenderer) shared(f *nodeview.Frontend) *sourceList {
	id := frontends.SourcesOf(f)
	list := s.ranges[id]
	if list == nil {
		list = s.sourceList(f.Sources.Prefixes(s.env.node))
		s.ranges[id] = list
	}
	return list
}

func (r *renderer) sourceList(prefixes []netip.Prefix) *sourceList {
	lines := make([]string, len(prefixes))
	for i, p := range prefixes {
		lines[i] = p.Masked().String()
	}
	slices.Sort(lines)
	lines = slices.Compact(lines)
	if r.withSets || len(lines) == 0 {
		content := strings.Join(lines, "\n")
		return &sourceList{r.hashed("S", content) + strconv.Itoa(int(r.family)), content}
	}
	for i, prefix := range lines {
		lines[i] = "-s " + prefix + " -j RETURN"
	}
	content := strings.Join(append(lines, "-j DROP"), "\n")
	return &sourceList{r.hashed("F", content), content}
}

// sourceUsers is a source list that frontends need.
type sourceUsers struct {
	*sourceList
	users int
}

// checkSources returns an error if a list of r has the name of another list. The name has a
// hash of the sources, and users may choose sources with equal hashes. The check keeps the
// sources of one service from admitting clients to another service.
func (t *ruleset) checkSources(r *record) error {
	for addr, list := range r.sources {
		if other, ok := t.sources[list.name]; ok && other.content != list.content {
			return fmt.Errorf("source ranges of %s: their set or chain %s has the source ranges of another service", addr, list.name)
		}
	}
	return nil
}

// useSources adds n to the reference count of a source list.
func (t *ruleset) useSources(list *sourceList, n int) {
	t.undo = append(t.undo, func() { t.addSourceUsers(list, -n) })
	t.addSourceUsers(list, n)
	if id := (chainID{mangle, list.name}); !t.withSets && (n > 0 || !t.holding()) {
		t.setChain(id, list.content, t.sources[list.name].users > 0)
	}
}

func (t *ruleset) addSourceUsers(list *sourceList, n int) {
	users := t.sources[list.name].users + n
	put(t.sources, list.name, sourceUsers{list, users}, users > 0)
	if t.withSets {
		t.changedSources[list.name] = true
	}
}

// replaceSources replaces the source lists of a service.
func (t *ruleset) replaceSources(last, next map[netip.Addr]*sourceList) {
	for addr, list := range next {
		if last[addr] != list && list.content != "" {
			t.useSources(list, 1)
		}
	}
	for addr, list := range last {
		if next[addr] != list && list.content != "" {
			t.useSources(list, -1)
		}
	}
}

// fillSources creates and fills the needed sets that the kernel lacks. No rule uses a new
// set before the set has all its elements. If another program has changed a set,
// fillSources flushes it first, so the set never admits other sources.
func (t *ruleset) fillSources(ctx context.Context) error {
	var input strings.Builder
	var names []string
	for _, name := range slices.Sorted(maps.Keys(t.changedSources)) {
		list, needed := t.sources[name]
		is, exists := t.inSources[name]
		if !needed || is == digest(list.content) {
			continue
		}
		names = append(names, name)
		input.WriteString(t.run.createLine(name, sourceType))
		if exists {
			fmt.Fprintf(&input, "flush %s\n", name)
		}
		for element := range strings.SplitSeq(list.content, "\n") {
			input.WriteString("add " + name + " " + element + "\n")
		}
	}
	if len(names) == 0 {
		return nil
	}
	for _, name := range names {
		t.inSources[name] = 0
	}
	if _, err := t.run.command(ctx, input.String(), t.run.ipset, "restore"); err != nil {
		return err
	}
	for _, name := range names {
		t.inSources[name] = digest(t.sources[name].content)
	}
	return nil
}

// destroySources destroys the sets of source lists that no service needs. The kernel
// refuses to destroy a set that a rule uses. In flavour nft, the kernel releases the sets
// of deleted rules some time later. The next commit or Verify tries to destroy the
// remaining sets.
func (t *ruleset) destroySources(ctx context.Context) error {
	if t.holding() {
		return nil // rules of an earlier process may use them
	}
	var names []string
	for name := range t.changedSources {
		list, needed := t.sources[name]
		is, exists := t.inSources[name]
		switch {
		case needed && is != digest(list.content): // a Sync failed, and the next commit fills the set
		case needed || !exists:
			delete(t.changedSources, name)
		default:
			names = append(names, name)
		}
	}
	next := 0
	return t.run.conn.Each(ctx, func(w *netfilter.Builder) {
		for _, name := range names {
			at := w.Begin(destroySet, 0, unix.NFPROTO_UNSPEC)
			w.Bytes(attrProtocol, setProtocol)
			w.String(attrSetName, name)
			w.End(at)
		}
	}, func(err error) {
		name := names[next]
		next++
		if err == nil || errors.Is(err, unix.ENOENT) {
			delete(t.inSources, name)
			delete(t.changedSources, name)
		}
	})
}

var sourceSetName = regexp.MustCompile(`^S[A-Z2-7]{15}[46]$`)

// sourceSets returns the names of the sets of source lists in the kernel.
func (t *ruleset) sourceSets(ctx context.Context) (names []string, err error) {
	counts, err := t.run.countElements(ctx)
	for name := range counts {
		suffix, ok := strings.CutPrefix(name, t.opts.prefix())
		if ok && sourceSetName.MatchString(suffix) && strings.HasSuffix(suffix, strconv.Itoa(int(t.family))) {
			names = append(names, name)
		}
	}
	return names, err
}

// readSources reads the sets of source lists.
func (t *ruleset) readSources(ctx context.Context) (map[string]uint64, error) {
	names, err := t.sourceSets(ctx)
	if err != nil {
		return nil, err
	}
	sets := map[string]uint64{}
	for _, name := range names {
		elements, err := t.run.elements(ctx, name)
		if err != nil {
			return nil, err
		}
		slices.Sort(elements)
		sets[name] = digest(strings.Join(elements, "\n"))
	}
	return sets, nil
}

// verifySources compares the sets of source lists with those that commit has written.
func (t *ruleset) verifySources(ctx context.Context) error {
	sets, err := t.readSources(ctx)
	if err != nil {
		return err
	}
	for name := range sets {
		if _, ok := t.inSources[name]; !ok {
			return kernelnode.Differs("set %s was added", name)
		}
	}
	for name, want := range t.inSources {
		is, exists := sets[name]
		switch {
		case t.changedSources[name]: // a Sync failed, or no service needs the set
		case !exists:
			return kernelnode.Differs("set %s was deleted", name)
		case is != want:
			return kernelnode.Differs("the elements of set %s were changed", name)
		}
	}
	return nil
}
