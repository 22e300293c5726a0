// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// ruleset has the rules of one family: those that the services need, and those in the
// kernel. A change first modifies the needed rules. Then commit writes the differences.
type ruleset struct {
	renderer
	run *runner

	// records has what each service needs. Until a pass has programmed a service, the
	// service's record has the entries that the kernel had when the pass began.
	records map[types.NamespacedName]*record
	// chains has the rules of each needed chain.
	chains map[chainID]string
	// claims has the entries of each dispatch chain by their matches. If several services
	// need the same match, claims has the entry of the service that was delivered last.
	claims map[chainID]map[string]claim
	// branches has the children of each dispatch chain.
	branches map[chainID]map[string]bool
	// subchains has, for each dispatch chain, the chains of addresses with many ports.
	subchains map[chainID][]chainID
	// lingering has removed entries of table mangle. They stay until table nat is written.
	// Otherwise table nat would still translate packets whose sources are not admitted.
	lingering map[chainID]map[string]string
	// users has a reference count for each element: the number of services that need it.
	users map[element]int
	// sources has the needed source lists by their names.
	sources map[string]sourceUsers
	// undo has functions that restore the fields above if services fail. They are called in
	// reverse order.
	undo []func()

	// inKernel has the digest of each chain in the kernel, or 0 if the digest is unknown.
	inKernel map[chainID]uint64
	// inSets are the elements of the sets in the kernel. The value is false if the kernel may
	// lack the element, because a change has failed.
	inSets map[element]bool
	// sure has the number of elements of each kind of set for which inSets has true.
	sure map[string]int
	// inSources has the digest of the elements of each set of a source list in the kernel, or
	// 0 if the digest is unknown.
	inSources map[string]uint64
	// changedChains, changedElements and changedSources may differ from the kernel's chains,
	// elements and sets of source lists.
	changedChains   map[chainID]bool
	changedElements map[element]bool
	changedSources  map[string]bool
	// jumpLines has, for each table, lines for iptables-restore. These lines insert or
	// delete the jumps in the kernel's own chains.
	jumpLines map[string][]string
	// foreign has the rules of other programs that lead to chains of the instance, and that
	// deleteForeign could not delete. The kernel keeps a chain while such a rule exists.
	foreign []foreignRule
	// The map held has the elements that existed when the pass began, by address. Until the
	// call of prune, the map users counts one additional reference to each of these
	// elements.
	held map[string][]element
	// The map delivered has the services that this pass has delivered until now. It is nil
	// while there is no pass; see holding.
	delivered map[types.NamespacedName]bool
	// The field broken is the error of the last call of begin, or nil. While broken is not
	// nil, all services of this family fail. The field failures is the number of consecutive
	// calls of begin that failed.
	broken   error
	failures int
	// inexact has the chains whose rules iptables-save prints in another form than this
	// package writes them. The value is the digest of the printed rules. For one of the
	// kernel's own chains, it is the digest of only the jump to the instance's chain. A chain
	// is not in inexact from the time at which it is written to the next call of verifyRules.
	inexact map[chainID]uint64
	// rewords is true if checkEdited found that iptables-save prints rules in another form.
	// Then written has the chains that were written since the rules were last compared.
	rewords bool
	written map[chainID]bool
	// edited is true if verify found edited rules and no pass has ended since.
	edited bool
	// verified is a generation of nf_tables in which the rules in the kernel are known, or
	// 0. Another generation means that another program may have changed them. The field
	// verifiedAt has the number of transactions that the backend had made by then.
	verified, verifiedAt uint32
	// checked is the generation of nf_tables at the last checkChains that found no loss.
	checked uint32
	// entries has the number of entries of each table in flavour legacy at the last call of
	// checkEntries. It is empty after a change by the backend.
	entries map[string]int
}

// record is what a service needs.
type record struct {
	*rendered
	view *api.View
	// old is true if the record has no view. Then it has the entries and elements that the
	// kernel had when the pass began.
	old bool
}

// claim is an entry of a dispatch chain.
type claim struct {
	owner types.NamespacedName
	rest  string // the part of the rule after its match
}

// skeletonKey is the key of the skeleton in the map of records. No service has this key.
var skeletonKey = types.NamespacedName{Name: "/skeleton"}

var digestSeed = maphash.MakeSeed()

func digest(rules string) uint64 { return maphash.String(digestSeed, rules) | 1 }

// attempts is the number of consecutive failures of begin after which their cause counts
// as permanent.
const attempts = 3

// setAttempts is the number of attempts to read and repair the sets before a pass uses
// rules in place of sets. Without sets, the pass does not reject or drop the packets of
// services that it has not delivered yet.
const setAttempts = 2

// beginPass starts a pass. If sets are the cause of a failure, the ruleset uses rules in
// place of sets. If an error is permanent and affects only this family, beginPass stores it
// in t.broken and returns nil.
func (t *ruleset) beginPass(ctx context.Context) error {
	t.broken, t.withSets = nil, t.run.ipset != ""
	err := t.begin(ctx)
	if t.setsFailed(ctx, err) {
		t.withSets = false
		setErr := err
		if err = t.begin(ctx); err == nil {
			klog.FromContext(ctx).Error(setErr, "Cannot use sets; using rules in place of sets until another pass", "family", t.family)
		}
	}
	switch {
	case err == nil:
		t.failures = 0
	case isGeneral(err) || ctx.Err() != nil:
		return err
	default:
		if t.failures++; t.failures < attempts {
			return err
		}
		t.broken = fmt.Errorf("%s: %w", t.family, err)
	}
	return nil
}

// setsFailed reports whether sets may be the cause of err, the result of begin. If a
// program refuses sets, the text of its error need not say so. But if the kernel has a rule
// with a set, sets are not the cause.
func (t *ruleset) setsFailed(ctx context.Context, err error) bool {
	var failed *programError
	if !t.withSets || ctx.Err() != nil || isGeneral(err) || !errors.As(err, &failed) {
		return false
	}
	if failed.program == t.run.ipset {
		return true
	}
	text, err := t.run.save(ctx, filter)
	return err == nil && !strings.Contains(text, t.setMatch(dropSet, "dst,dst"))
}

// begin reads the rules and sets in the kernel, and creates the skeleton. Existing chains,
// entries and elements stay until prune.
func (t *ruleset) begin(ctx context.Context) error {
	elements, inSources := map[element]bool{}, map[string]uint64{}
	if t.withSets {
		var err error
		for range setAttempts {
			if err = t.run.replaceSets(ctx, t.allSets()); err == nil {
				elements, err = t.readSets(ctx)
			}
			if err == nil {
				inSources, err = t.readSources(ctx)
			}
			if err == nil || ctx.Err() != nil {
				break
			}
		}
		if err != nil {
			return err
		}
	}
	generation, err := t.run.generation(ctx)
	if err != nil {
		return err
	}
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	*t = ruleset{
		verified: generation, verifiedAt: *t.run.transactions,
		renderer: t.renderer, run: t.run, failures: t.failures, edited: t.edited,
		inexact: t.inexact, rewords: t.rewords, written: map[chainID]bool{},
		records:         map[types.NamespacedName]*record{},
		chains:          map[chainID]string{},
		claims:          map[chainID]map[string]claim{},
		branches:        map[chainID]map[string]bool{},
		subchains:       map[chainID][]chainID{},
		lingering:       map[chainID]map[string]string{},
		users:           map[element]int{},
		sources:         map[string]sourceUsers{},
		inKernel:        map[chainID]uint64{},
		inSets:          elements,
		sure:            map[string]int{},
		inSources:       inSources,
		held:            map[string][]element{},
		delivered:       map[types.NamespacedName]bool{},
		changedChains:   map[chainID]bool{},
		changedElements: map[element]bool{},
		changedSources:  map[string]bool{},
		jumpLines:       map[string][]string{},
	}
	missing := t.jumps()
	t.foreign = saved.foreign(missing, t.inexact)
	for id, rule := range missing {
		t.jumpLines[id.table] = append(t.jumpLines[id.table], "-I "+id.name+" "+rule)
	}
	for e := range elements {
		addr, _, _ := strings.Cut(e.text, ",")
		t.held[addr] = append(t.held[addr], e)
		t.users[e]++
		t.sure[e.set]++
	}
	for name := range inSources {
		t.changedSources[name] = true // prune destroys the sets that no service needs
	}
	for id, rules := range saved.chains {
		t.inKernel[id] = digest(rules)
		if !t.isDispatch(id) {
			t.chains[id] = rules
			continue
		}
		t.changedChains[id] = true
		if !hasEntries.MatchString(t.suffix(id)) {
			continue // renderDispatch computes the rules of the chain again
		}
		for rule := range strings.SplitSeq(rules, "\n") {
			match, rest := splitEntry(rule)
			if rest == "" || addressChain.MatchString(strings.TrimPrefix(rest, jump(t.opts.prefix()))) {
				continue
			}
			entry := entryID{t.home(id, match), match}
			owner := ownerOf(rest)
			t.claim(entry, claim{owner, rest}, true)
			t.oldRecord(owner).entries[entry] = rest
		}
	}
	for _, table := range tables {
		t.changedChains[chainID{table, t.name(services)}] = true
	}
	t.replace(skeletonKey, &record{rendered: t.skeleton()}, false)
	t.undo = nil
	if err := t.commit(ctx); err != nil {
		return err
	}
	return t.deleteForeign(ctx)
}

// deleteForeign deletes the rules of t.foreign. It keeps and logs those that iptables
// refuses to delete.
func (t *ruleset) deleteForeign(ctx context.Context) error {
	rules := t.foreign
	t.foreign = nil
	for _, r := range rules {
		err := t.run.restore(ctx, fmt.Sprintf("*%s\n-D %s %s\nCOMMIT\n", r.chain.table, r.chain.name, r.rule))
		if err != nil {
			if isGeneral(err) || ctx.Err() != nil {
				return err
			}
			t.foreign = append(t.foreign, r)
			klog.FromContext(ctx).Error(err, "Cannot delete a rule that leads to a chain of this instance; delete it by its number",
				"family", t.family, "table", r.chain.table, "chain", r.chain.name, "rule", r.rule)
		}
		t.changedChains[r.target()] = true
	}
	return nil
}

// splitEntry splits a rule of a dispatch chain after its match.
func splitEntry(rule string) (match, rest string) {
	at := strings.Index(rule, "-j ")
	for _, match := range []string{"-m comment ", "-m set "} {
		if i := strings.Index(rule, match); i >= 0 {
			at = min(at, i)
		}
	}
	if at < 0 {
		return rule, ""
	}
	return strings.TrimSuffix(rule[:at], " "), rule[at:]
}

var commentPattern = regexp.MustCompile(`--comment "?([^"/:]+)/([^"/: ]+)`)

// ownerOf returns the service that the comment of an entry names. Without such a comment,
// it returns the empty key.
func ownerOf(rest string) (owner types.NamespacedName) {
	if m := commentPattern.FindStringSubmatch(rest); m != nil {
		owner.Namespace, owner.Name = strings.Clone(m[1]), strings.Clone(m[2])
	}
	return owner
}

// oldRecord returns the record of a service that this pass has not programmed.
func (t *ruleset) oldRecord(key types.NamespacedName) *record {
	if t.records[key] == nil {
		t.records[key] = &record{rendered: newRendered(), old: true}
	}
	return t.records[key]
}

func (t *ruleset) allSets() map[string]string {
	sets := map[string]string{}
	for kind, setType := range setTypes {
		sets[t.setName(kind)] = setType
	}
	return sets
}

// record returns the record for a view. The argument last is the previous record of the
// service in the same environment, or nil.
func (t *ruleset) record(view *api.View, last *record) *record {
	return &record{rendered: t.service(view, last), view: view}
}

// setEnvironment renders the skeleton and all services again if env differs from the
// present environment.
func (t *ruleset) setEnvironment(ctx context.Context, env environment) error {
	if t.broken != nil || t.env.equal(&env) {
		return nil
	}
	t.env = env
	t.replace(skeletonKey, &record{rendered: t.skeleton()}, false)
	for _, table := range tables {
		t.changedChains[chainID{table, t.name(services)}] = true
	}
	for key, r := range t.records {
		if r.view != nil {
			next := t.record(r.view, nil)
			if err := t.checkSources(next); err != nil {
				return err
			}
			t.replace(key, next, false)
		}
	}
	t.undo = nil
	return t.commit(ctx)
}

// service is a service to program. If it was deleted, its record is empty.
type service struct {
	key types.NamespacedName
	*record
}

// largeService is the number of rules from which a service is large. The driver delivers
// services with large objects alone, see [sink.LargeSize]. A service with small objects may
// also have many rules, because each port may need its own list of all endpoints.
const largeService = 2_000

// bySize divides list into the services that are not large, in the same order, and the
// large services in order of their size. The size of a service is the number of its new
// rules or of its rules in the kernel, whichever is larger.
func (t *ruleset) bySize(list []service) (others, large []service) {
	size := func(s service) int {
		if last := t.records[s.key]; last != nil {
			return max(s.rules, last.rules)
		}
		return s.rules
	}
	for _, s := range list {
		if size(s) < largeService {
			others = append(others, s)
		} else {
			large = append(large, s)
		}
	}
	slices.SortStableFunc(large, func(a, b service) int { return cmp.Compare(size(a), size(b)) })
	return others, large
}

// render renders changed services, and adds to failed those whose rendering panics.
func (t *ruleset) render(changes iter.Seq[sink.Change], failed *sink.Failed) (list []service) {
	for c := range changes {
		failed.Do(c.Key, func() error {
			t.takeElements(c.Key, c.New)
			list = append(list, service{c.Key, t.record(c.New, t.records[c.Key])})
			return nil
		})
	}
	return list
}

// takeElements adds the held elements with an address of a service to the service's old
// record. Therefore prune keeps these elements if the service fails. Elements contain no
// service name, only an address. If this pass has already programmed the service,
// takeElements adds none.
func (t *ruleset) takeElements(key types.NamespacedName, view *api.View) {
	if t.holding() {
		t.delivered[key] = true
	}
	r := t.records[key]
	if len(t.held) == 0 || view == nil || r != nil && !r.old {
		return
	}
	ips := &view.Service.IPs
	for _, set := range []*api.IPSet{&ips.ClusterIPs, &ips.ExternalIPs, &ips.LoadBalancerIPs} {
		for _, a := range set.Family(t.family) {
			for _, e := range t.held[a.String()] {
				if r := t.oldRecord(key); !r.elements[e] {
					r.elements[e] = true
					t.users[e]++
				}
			}
		}
	}
}

// holding reports whether a pass has begun and prune was not called yet. During this
// time, no chain of a service is deleted, because rules of an earlier process may lead
// to that chain.
func (t *ruleset) holding() bool { return t.delivered != nil }

// apply programs services. If the kernel refuses the rules of some services, apply finds
// these services, keeps their old rules and adds the services to failed. It returns an
// error if the cause is not in the rules of a service.
func (t *ruleset) apply(ctx context.Context, list []service, failed *sink.Failed) error {
	if t.broken != nil {
		for _, s := range list {
			if !s.isEmpty() {
				failed.Add(s.key, t.broken)
			}
		}
		return nil
	}
	if len(list) == 0 {
		return t.commitOld(ctx)
	}
	for _, s := range list {
		if err := t.checkSources(s.record); err != nil {
			failed.Add(s.key, err)
			continue
		}
		t.replace(s.key, s.record, true)
	}
	err := t.commit(ctx)
	if err == nil {
		t.undo = nil
		return nil
	}
	for _, undo := range slices.Backward(t.undo) {
		undo()
	}
	t.undo = nil
	if isGeneral(err) || ctx.Err() != nil {
		return err
	}
	// If the kernel accepts the old rules, the new rules of a service are the cause.
	if oldErr := t.commitOld(ctx); oldErr != nil {
		return errors.Join(err, oldErr)
	}
	if len(list) == 1 {
		failed.Add(list[0].key, err)
		return nil
	}
	if refuses(err, matchRecent) {
		// The kernel or iptables lacks the match for session affinity, so all services with
		// session affinity fail.
		var others []service
		for _, s := range list {
			if s.hasAffinity() {
				failed.Add(s.key, err)
			} else {
				others = append(others, s)
			}
		}
		if len(others) < len(list) {
			return t.apply(ctx, others, failed)
		}
	}
	half := len(list) / 2
	if err := t.apply(ctx, list[:half], failed); err != nil {
		return err
	}
	return t.apply(ctx, list[half:], failed)
}

// commitOld commits rules that the kernel has accepted before. If the kernel refuses
// them, another program has changed the rules in the kernel, and only a new pass can
// repair them.
func (t *ruleset) commitOld(ctx context.Context) error {
	err := t.commit(ctx)
	if err == nil || isGeneral(err) || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("the kernel refuses rules that it had: %w (%w)", err, sink.ErrStartOver)
}

// replace replaces the record of a service. If other services have entries with the same
// matches, the service takes these matches only if take is true.
func (t *ruleset) replace(key types.NamespacedName, next *record, take bool) {
	last := t.records[key]
	if last == nil {
		last = &record{rendered: newRendered()}
	}
	for id := range last.chains {
		if _, ok := next.chains[id]; !ok && !t.holding() {
			t.setChain(id, "", false)
		}
	}
	for id, rules := range next.chains {
		t.setChain(id, rules, true)
	}
	for id := range last.entries {
		if _, ok := next.entries[id]; !ok {
			t.unclaim(id, key)
		}
	}
	for id, rest := range next.entries {
		t.claim(id, claim{key, rest}, take)
	}
	for e := range last.elements {
		if !next.elements[e] {
			t.use(e, -1)
		}
	}
	for e := range next.elements {
		if !last.elements[e] {
			t.use(e, 1)
		}
	}
	t.replaceSources(last.sources, next.sources)
	t.setRecord(key, next)
}

func (t *ruleset) setRecord(key types.NamespacedName, next *record) {
	last, had := t.records[key]
	t.undo = append(t.undo, func() { put(t.records, key, last, had) })
	put(t.records, key, next, !next.isEmpty())
}

// put sets the value of a key, or deletes the key if keep is false.
func put[K comparable, V any](m map[K]V, key K, value V, keep bool) {
	if keep {
		m[key] = value
	} else {
		delete(m, key)
	}
}

// hasForeign reports whether a rule of t.foreign leads to a chain.
func (t *ruleset) hasForeign(id chainID) bool {
	return slices.ContainsFunc(t.foreign, func(r foreignRule) bool { return r.target() == id })
}

// setChain sets the rules of a chain. If keep is false, it removes the chain unless a
// rule of t.foreign leads to the chain.
func (t *ruleset) setChain(id chainID, rules string, keep bool) {
	keep = keep || t.hasForeign(id)
	last, had := t.chains[id]
	if had == keep && last == rules {
		return
	}
	t.undo = append(t.undo, func() {
		put(t.chains, id, last, had)
		t.changedChains[id] = true
	})
	put(t.chains, id, rules, keep)
	t.changedChains[id] = true
}

// The method use adds n to the reference count of an element.
func (t *ruleset) use(e element, n int) {
	t.undo = append(t.undo, func() { t.addUsers(e, -n) })
	t.addUsers(e, n)
}

func (t *ruleset) addUsers(e element, n int) {
	users := t.users[e] + n
	put(t.users, e, users, users > 0)
	t.changedElements[e] = true
}

// claim sets the entry of a match. If take is true, the service takes the match from
// another service. If c.rest is empty, the match gets no entry.
func (t *ruleset) claim(id entryID, c claim, take bool) {
	is, had := t.claims[id.chain][id.match]
	if is != c && (take || is.owner == c.owner) && (had || c.rest != "") {
		t.setClaim(id, c, c.rest != "")
	}
}

// unclaim removes the entry of a service from a dispatch chain.
func (t *ruleset) unclaim(id entryID, owner types.NamespacedName) {
	if is, had := t.claims[id.chain][id.match]; had && is.owner == owner {
		t.setClaim(id, claim{}, false)
	}
}

func (t *ruleset) setClaim(id entryID, c claim, keep bool) {
	last, had := t.claims[id.chain][id.match]
	if id.chain.table == mangle && had && !keep {
		if t.lingering[id.chain] == nil {
			t.lingering[id.chain] = map[string]string{}
		}
		t.lingering[id.chain][id.match] = last.rest
	}
	t.undo = append(t.undo, func() { t.putClaim(id, last, had) })
	t.putClaim(id, c, keep)
}

func (t *ruleset) putClaim(id entryID, c claim, keep bool) {
	if t.claims[id.chain] == nil {
		t.claims[id.chain] = map[string]claim{}
	}
	put(t.claims[id.chain], id.match, c, keep)
	t.growOrPrune(id.chain, len(t.claims[id.chain]) > 0)
}

// growOrPrune adds a dispatch chain to its parent, or removes it from there.
func (t *ruleset) growOrPrune(id chainID, exists bool) {
	t.changedChains[id] = true
	up := parent(t.suffix(id))
	if up == "" {
		return
	}
	suffix := t.suffix(id)
	upID := chainID{id.table, t.name(up)}
	if t.branches[upID] == nil {
		t.branches[upID] = map[string]bool{}
	}
	if t.branches[upID][suffix] != exists {
		put(t.branches[upID], suffix, true, exists)
		t.growOrPrune(upID, len(t.branches[upID]) > 0)
	}
}

func (t *ruleset) suffix(id chainID) string { return strings.TrimPrefix(id.name, t.opts.prefix()) }

func (t *ruleset) isDispatch(id chainID) bool {
	s := t.suffix(id)
	return s == services || s == nodePorts || len(s) == 2 && s[0] == 'D' || dispatchName.MatchString(s) || subchain.MatchString(s)
}

// home returns the dispatch chain of an entry that the kernel has in the chain id.
func (t *ruleset) home(id chainID, match string) chainID {
	if !subchain.MatchString(t.suffix(id)) {
		return id
	}
	address, _, _ := strings.Cut(strings.TrimPrefix(match, "-d "), " ")
	prefix, err := netip.ParsePrefix(address)
	if err != nil {
		return id // another program has added the rule; no service has this entry
	}
	return chainID{id.table, t.name(dispatchChain(&nodeview.FrontendKey{Addr: prefix.Addr()}))}
}

// renderDispatch updates the rules of a dispatch chain and of its subchains.
func (t *ruleset) renderDispatch(id chainID) {
	rests := make(map[string]string, len(t.claims[id]))
	maps.Copy(rests, t.lingering[id])
	for match, c := range t.claims[id] {
		rests[match] = c.rest
	}
	entries, subchains := t.arrange(rests)
	children := slices.Sorted(maps.Keys(t.branches[id]))
	exists := len(entries)+len(children) > 0 || t.suffix(id) == services || t.hasForeign(id)
	put(t.chains, id, t.dispatch(id, entries, children), exists)
	for _, sub := range t.subchains[id] {
		put(t.chains, sub, "", t.hasForeign(sub))
		t.changedChains[sub] = true
	}
	var list []chainID
	for name, rules := range subchains {
		sub := chainID{id.table, name}
		list = append(list, sub)
		t.chains[sub] = strings.Join(rules, "\n")
		t.changedChains[sub] = true
	}
	put(t.subchains, id, list, len(list) > 0)
}

// commit writes the changed elements and chains if they differ from those in the kernel.
// If it fails, the kernel may have some of the changes. Then the next commit writes these
// elements and chains again.
func (t *ruleset) commit(ctx context.Context) error {
	var add, remove []element
	for e := range t.changedElements {
		sure, ok := t.inSets[e]
		switch {
		case t.users[e] > 0 && !sure:
			add = append(add, e)
		case t.users[e] == 0 && ok:
			remove = append(remove, e)
		}
	}
	if err := t.changeSets(ctx, "add", add); err != nil {
		return err
	}
	if t.withSets {
		if err := t.fillSources(ctx); err != nil {
			return err
		}
	}
	if err := t.writeChains(ctx); err != nil {
		return err
	}
	if len(t.lingering) > 0 {
		for id := range t.lingering {
			t.changedChains[id] = true
		}
		clear(t.lingering)
		if err := t.writeChains(ctx); err != nil {
			return err
		}
	}
	if err := t.changeSets(ctx, "del", remove); err != nil {
		return err
	}
	clear(t.changedElements)
	if t.withSets {
		return t.destroySources(ctx)
	}
	return nil
}

// changeSets adds or deletes elements.
func (t *ruleset) changeSets(ctx context.Context, action string, list []element) error {
	var items []string
	for _, e := range list {
		items = append(items, t.setName(e.set)+" "+e.text)
		if t.inSets[e] {
			t.sure[e.set]--
		}
		t.inSets[e] = false
	}
	if err := t.run.changeSets(ctx, action, items); err != nil {
		return err
	}
	for _, e := range list {
		if put(t.inSets, e, true, action == "add"); action == "add" {
			t.sure[e.set]++
		}
	}
	return nil
}

// writeChains writes the changed chains.
func (t *ruleset) writeChains(ctx context.Context) error {
	for id := range maps.Clone(t.changedChains) {
		switch _, needed := t.chains[id]; {
		case !t.isDispatch(id):
		case !subchain.MatchString(t.suffix(id)):
			t.renderDispatch(id)
		case !needed:
			put(t.chains, id, "", t.hasForeign(id))
		}
	}
	var write, later []chainID
	for id := range t.changedChains {
		rules, needed := t.chains[id]
		if !needed && id.table == mangle && len(t.lingering) > 0 {
			later = append(later, id) // a lingering entry may lead to this chain
		} else if is, exists := t.inKernel[id]; needed != exists || needed && is != digest(rules) {
			write = append(write, id)
		}
	}
	if err := t.run.restore(ctx, t.restoreInput(write)); err != nil {
		for _, id := range write {
			t.inKernel[id] = 0
		}
		return err
	}
	t.entries = nil
	for _, id := range write {
		rules, needed := t.chains[id]
		put(t.inKernel, id, digest(rules), needed)
		if t.rewords {
			delete(t.inexact, id)
			put(t.written, id, true, needed)
		}
	}
	clear(t.jumpLines)
	clear(t.changedChains)
	for _, id := range later {
		t.changedChains[id] = true
	}
	return nil
}

// maxLines limits the lines of a transaction in flavour nft, unless one chain has more.
// Therefore changes of other programs need not wait for all rules of a large service. In
// flavour legacy, each transaction replaces the whole table, so one transaction per table
// is best.
const maxLines = 10_000

// restoreInput returns the input for iptables-restore that writes these chains. It is
// empty if there is nothing to write. A chain is written after the chains to which it
// leads. A chain is removed after the chains that led to it were written.
func (t *ruleset) restoreInput(write []chainID) string {
	order := func(id chainID) int {
		if _, needed := t.chains[id]; !needed {
			return lastRank + 1
		}
		return rank(t.suffix(id))
	}
	slices.SortFunc(write, func(a, b chainID) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), strings.Compare(a.name, b.name))
	})
	var b strings.Builder
	for _, table := range tables {
		var part, remove []chainID
		lines := 0
		for _, id := range write {
			if id.table != table {
				continue
			}
			n := 1 + countRules(t.chains[id])
			if lines > 0 && lines+n > maxLines && t.run.flavour == flavourNFT {
				t.restorePart(&b, table, part, nil, nil)
				part, lines = nil, 0
			}
			part, lines = append(part, id), lines+n
			if _, needed := t.chains[id]; !needed {
				remove = append(remove, id)
			}
		}
		t.restorePart(&b, table, part, t.jumpLines[table], remove)
	}
	return b.String()
}

// restorePart writes the input for a transaction to b. It writes nothing if the transaction
// is empty.
func (t *ruleset) restorePart(b *strings.Builder, table string, write []chainID, jumpLines []string, remove []chainID) {
	if len(write)+len(jumpLines)+len(remove) == 0 {
		return
	}
	fmt.Fprintf(b, "*%s\n", table)
	// In flavour nft, iptables-restore 1.8.9 inserts each chain into a sorted list. This is
	// fastest if each new chain belongs at the beginning of the list.
	slices.SortFunc(write, func(a, b chainID) int { return strings.Compare(b.name, a.name) })
	// A line with a colon creates a chain, or removes the rules of an existing one.
	for _, id := range write {
		fmt.Fprintf(b, ":%s - [0:0]\n", id.name)
	}
	for _, id := range write {
		if rules := t.chains[id]; rules != "" {
			for rule := range strings.SplitSeq(rules, "\n") {
				b.WriteString("-A " + id.name + " " + rule + "\n")
			}
		}
	}
	for _, line := range jumpLines {
		b.WriteString(line + "\n")
	}
	for _, id := range remove {
		fmt.Fprintf(b, "-X %s\n", id.name)
	}
	b.WriteString("COMMIT\n")
}

// prune removes the chains, entries and elements that existed when the pass began and
// that no service needs. Failing services keep their entries and the chains to which the
// entries lead. If a failing service was not delivered in this pass, prune keeps all
// elements, because any of them may belong to this service.
func (t *ruleset) prune(ctx context.Context, failing map[types.NamespacedName]bool) error {
	if t.broken != nil {
		return nil
	}
	needed := map[chainID]bool{}
	for key, r := range t.records {
		if r.old && !failing[key] {
			t.replace(key, t.record(nil, nil), false)
			continue
		}
		for id := range r.chains {
			needed[id] = true
		}
		if r.old {
			for id, rest := range r.entries {
				t.reach(id.chain.table, rest, needed)
			}
		}
	}
	for name := range t.sources {
		needed[chainID{mangle, name}] = true
	}
	for id := range t.chains {
		if !t.isDispatch(id) && !needed[id] {
			t.setChain(id, "", false)
		}
	}
	for key := range failing {
		if !t.delivered[key] {
			clear(t.held) // so the loop below keeps the reference counts of these elements one too high
		}
	}
	for _, list := range t.held {
		for _, e := range list {
			// The address of such an element is that of an endpoint, and any failing service may
			// need it.
			if e.set != hairpinSet || len(failing) == 0 {
				t.use(e, -1)
			}
		}
	}
	clear(t.held)
	t.delivered, t.undo = nil, nil
	if err := t.commitOld(ctx); err != nil {
		return err
	}
	return t.checkEdited(ctx)
}

var jumpPattern = regexp.MustCompile(`-j (\S+)`)

// reach sets needed[c] to true for each chain c to which the rules lead.
func (t *ruleset) reach(table, rules string, needed map[chainID]bool) {
	for _, m := range jumpPattern.FindAllStringSubmatch(rules, -1) {
		id := chainID{table, m[1]}
		if next, ok := t.chains[id]; ok && !needed[id] {
			needed[id] = true
			t.reach(table, next, needed)
		}
	}
}

// verify compares the kernel with what commit has written. It returns a
// [kernelnode.Difference] if another program has changed something.
func (t *ruleset) verify(ctx context.Context) error {
	if t.broken != nil {
		return nil
	}
	generation, err := t.run.generation(ctx)
	if err != nil {
		return err
	}
	if generation == 0 || generation != t.verified {
		if err := t.verifyRules(ctx); err != nil {
			return err
		}
		t.setVerified(generation)
	}
	if !t.withSets {
		return nil
	}
	if err := t.run.createSets(ctx, t.allSets()); err != nil {
		return err
	}
	elements, err := t.readSets(ctx)
	if err != nil {
		return err
	}
	for e := range elements {
		if _, ok := t.inSets[e]; !ok {
			return kernelnode.Differs("%s was added to set %s", e.text, t.setName(e.set))
		}
	}
	for e, sure := range t.inSets {
		if sure && !elements[e] {
			return kernelnode.Differs("%s was removed from set %s", e.text, t.setName(e.set))
		}
	}
	return t.verifySources(ctx)
}

// setVerified records that the rules in the kernel are known in a generation.
func (t *ruleset) setVerified(generation uint32) {
	t.verified, t.verifiedAt = generation, *t.run.transactions
}

func (t *ruleset) verifyRules(ctx context.Context) error {
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	for _, c := range t.comparisons(saved) {
		for id := range c.is {
			if _, ok := c.want[id]; !ok && !t.changedChains[id] {
				return kernelnode.Differs("%s was added", t.describe(id))
			}
		}
		for id, rules := range c.want {
			text, exists := c.is[id]
			switch {
			case t.changedChains[id]: // a Sync failed, so the kernel may have other rules
			case !exists:
				return kernelnode.Differs("%s was deleted", t.describe(id))
			case text == rules:
				delete(t.inexact, id)
			case !sameLength(text, rules):
				return kernelnode.Differs("%s has another number of rules", t.describe(id))
			case t.inexact[id] == digest(text):
			case t.written[id]:
				t.inexact[id] = digest(text)
			default:
				t.edited = true
				return kernelnode.Differs("%s was changed", t.describe(id))
			}
			delete(t.written, id)
		}
	}
	return nil
}

// comparison has the rules of chains in the kernel, and the rules that these chains
// should have.
type comparison struct{ is, want map[chainID]string }

// comparisons returns the comparisons for the chains of the instance, and for the rules
// that lead to them. It omits the rules of t.foreign.
func (t *ruleset) comparisons(s *saved) [2]comparison {
	jumps := map[chainID]string{}
	for id, rules := range s.jumps {
		list := slices.DeleteFunc(strings.Split(rules, "\n"), func(rule string) bool {
			return slices.Contains(t.foreign, foreignRule{id, rule})
		})
		put(jumps, id, strings.Join(list, "\n"), len(list) > 0)
	}
	return [2]comparison{{s.chains, t.chains}, {jumps, t.jumps()}}
}

func (t *ruleset) describe(id chainID) string {
	if t.opts.isOwn(id.name) {
		return fmt.Sprintf("chain %s of table %s", id.name, id.table)
	}
	return fmt.Sprintf("the jump from chain %s of table %s", id.name, id.table)
}

func sameLength(a, b string) bool {
	return (a == "") == (b == "") && strings.Count(a, "\n") == strings.Count(b, "\n")
}

// checkEdited is called after a pass. If verify found edited rules before the pass,
// checkEdited reads the rules again. If iptables-save still prints other rules for a
// chain, checkEdited adds the chain to inexact, because the pass has written the right
// rules.
func (t *ruleset) checkEdited(ctx context.Context) error {
	if !t.edited {
		return nil
	}
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	t.edited, t.inexact, t.written = false, map[chainID]uint64{}, map[chainID]bool{}
	var example string
	for _, c := range t.comparisons(saved) {
		for id, rules := range c.want {
			if text, exists := c.is[id]; exists && text != rules && sameLength(text, rules) {
				t.inexact[id] = digest(text)
				example = t.describe(id)
			}
		}
	}
	if t.rewords = example != ""; t.rewords {
		klog.FromContext(ctx).Info("iptables prints rules of some chains in another form; until the next comparison, a change of a new chain by another program is found only if it changes the number of rules",
			"family", t.family, "chains", len(t.inexact), "example", example)
	}
	return nil
}

// saved has the rules of one family in the kernel.
type saved struct {
	// chains has the rules of the instance's chains.
	chains map[chainID]string
	// jumps has the rules of other chains that lead to the instance's chains.
	jumps map[chainID]string
}

// readRules reads the rules in the kernel.
func (t *ruleset) readRules(ctx context.Context) (*saved, error) {
	return t.readTables(ctx, tables[:])
}

// readTables reads the rules in the tables of list.
func (t *ruleset) readTables(ctx context.Context, list []string) (*saved, error) {
	s := &saved{map[chainID]string{}, map[chainID]string{}}
	for _, table := range list {
		text, err := t.run.save(ctx, table)
		if err != nil {
			return nil, err
		}
		s.parse(text, table, t.opts.isOwn)
	}
	return s, nil
}

// readSets reads the elements of the instance's sets.
func (t *ruleset) readSets(ctx context.Context) (map[element]bool, error) {
	elements := map[element]bool{}
	for kind := range setTypes {
		list, err := t.run.elements(ctx, t.setName(kind))
		if err != nil {
			return nil, err
		}
		for _, text := range list {
			elements[element{kind, text}] = true
		}
	}
	return elements, nil
}

// parse adds the rules of a table from the output of iptables-save.
func (s *saved) parse(text, table string, isOwn func(string) bool) {
	own, jumps := map[string][]string{}, map[string][]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if name, ok := strings.CutPrefix(line, ":"); ok {
			if name, _, _ = strings.Cut(name, " "); isOwn(name) {
				own[name] = nil
			}
			continue
		}
		rest, ok := strings.CutPrefix(line, "-A ")
		if !ok {
			continue
		}
		name, rule, _ := strings.Cut(rest, " ")
		if _, ok := own[name]; ok {
			own[name] = append(own[name], rule)
		} else if at := strings.LastIndexByte(rule, ' '); at > 0 && isOwn(rule[at+1:]) && (strings.HasSuffix(rule[:at], "-j") || strings.HasSuffix(rule[:at], "-g")) {
			jumps[name] = append(jumps[name], rule)
		}
	}
	// Without the copies, the strings would keep the whole output in memory.
	for name, rules := range own {
		s.chains[chainID{table, strings.Clone(name)}] = joinCopy(rules)
	}
	for name, rules := range jumps {
		s.jumps[chainID{table, strings.Clone(name)}] = joinCopy(rules)
	}
}

// joinCopy joins rules in newly allocated memory. Given one string, strings.Join returns
// that string itself.
func joinCopy(rules []string) string {
	if len(rules) == 1 {
		return strings.Clone(rules[0])
	}
	return strings.Join(rules, "\n")
}

// foreignRule is a rule that leads from another chain to a chain of the instance.
type foreignRule struct {
	chain chainID
	rule  string
}

// target returns the chain of the instance to which the rule leads.
func (r foreignRule) target() chainID {
	return chainID{r.chain.table, r.rule[strings.LastIndexByte(r.rule, ' ')+1:]}
}

// foreign returns the rules that lead to chains of the instance in addition to the given
// jumps. It deletes from the map jumps the jumps that the kernel has. A rule also counts
// as the jump of its chain if inexact has the digest of the rule.
func (s *saved) foreign(jumps map[chainID]string, inexact map[chainID]uint64) (list []foreignRule) {
	for id, rules := range s.jumps {
		for rule := range strings.SplitSeq(rules, "\n") {
			want := jumps[id]
			if want != "" && (rule == want || digest(rule) == inexact[id]) {
				delete(jumps, id)
			} else {
				list = append(list, foreignRule{id, rule})
			}
		}
	}
	return list
}

// remove removes the instance's chains and the rules that lead to them. In flavour nft,
// it also deletes the tables that are empty after that.
func (t *ruleset) remove(ctx context.Context) error {
	if t.run.flavour == flavourLegacy {
		s, err := t.readLoadedRules(ctx)
		if err != nil {
			return err
		}
		return t.removeChains(ctx, s)
	}
	has, err := t.hasChains(ctx)
	if has {
		var s *saved
		if s, err = t.readRules(ctx); err == nil {
			err = t.removeChains(ctx, s)
		}
	}
	if err != nil {
		return err
	}
	return deleteEmptyTables(ctx, t.opts.NetNS, t.family)
}

// removeChains removes the chains in s and the rules that lead to them.
func (t *ruleset) removeChains(ctx context.Context, s *saved) error {
	missing := t.jumps()
	t.foreign = s.foreign(missing, nil)
	t.chains, t.changedChains, t.jumpLines = map[chainID]string{}, map[chainID]bool{}, map[string][]string{}
	if err := t.deleteForeign(ctx); err != nil {
		return err
	}
	for id, rule := range t.jumps() {
		if _, ok := missing[id]; !ok {
			t.jumpLines[id.table] = append(t.jumpLines[id.table], "-D "+id.name+" "+rule)
		}
	}
	return t.run.restore(ctx, t.restoreInput(slices.Collect(maps.Keys(s.chains))))
}
