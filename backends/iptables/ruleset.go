// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"hash/maphash"

	"k8s.io/apimachinery/pkg/types"
)

// ruleset has the rules of one family: the rules that services need, and the rules in the
// kernel. A change first modifies the needed rules. Then commit writes the differences.
type ruleset struct {
	renderer
	run *runner

	// records has the record of each service. Until a pass has programmed a service, the
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
	// sharers has the services whose records have a shared entry, see isShared.
	sharers map[entryID]map[types.NamespacedName]bool
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
	// For each kind of set, sure has the number of elements whose value in inSets is
	// true.
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
	// foreign has rules of other programs that deleteForeign could not delete. They lead
	// to chains of the instance. The kernel keeps a chain while such a rule exists.
	foreign []foreignRule
	// held has the elements that existed when the pass began, by address. Until the
	// call of prune, the map users counts one additional reference to each of these
	// elements.
	held map[string][]element
	// delivered has the services that this pass has delivered until now. It is nil
	// while there is no pass; see holding.
	delivered map[types.NamespacedName]bool
	// counted has the chains that counted connections when the pass began. It is nil
	// while there is no pass.
	counted map[string]counted
	// beginErr is the error of the last call of begin, or nil. While beginErr is not
	// nil, all services of this family fail. failures is the number of consecutive
	// calls of begin that failed.
	beginErr error
	failures int
	// inexact has the chains for which iptables-save prints the rules in another form
	// than this package. The value is the digest of the printed rules. For one of the
	// kernel's own chains, it is the digest of only the jump to the instance's chain. A
	// chain is absent from inexact between a write of the chain and the next call of
	// verifyRules.
	inexact map[chainID]uint64
	// rewords is true if checkEdited found that iptables-save prints rules in another form.
	// Then written has the chains that were written since the rules were last compared.
	rewords bool
	written map[chainID]bool
	// edited is true if verify found edited rules and no pass has ended since.
	edited bool
	// verified is a generation of nf_tables in which the rules in the kernel are known, or
	// 0. Another generation means that another program may have changed them. The field
	// verifiedAt is the number of the backend's transactions when the field verified was
	// set.
	verified, verifiedAt uint32
	// checked is the generation of nf_tables at the last checkChains that found no loss.
	checked uint32
	// entries has the number of entries of each table in flavour legacy at the last call of
	// checkEntries. It is empty after a change by the backend.
	entries map[string]int
}

// skeletonKey is the key of the skeleton in the map of records. No service has this key.
var skeletonKey = types.NamespacedName{Name: "/skeleton"}

var digestSeed = maphash.MakeSeed()

func digest(rules string) uint64 { return maphash.String(digestSeed, rules) | 1 }

// setEnvironment renders the skeleton and all services again if env differs from the
// present environment.
func (t *ruleset) setEnvironment(ctx context.Context, env environment) error {
	if t.beginErr != nil || t.env.equal(&env) {
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
