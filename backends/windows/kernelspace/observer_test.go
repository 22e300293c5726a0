// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// eventLog is an observer that records its events.
type eventLog struct{ events []string }

func (l *eventLog) Wrote(size int, err error) {
	l.events = append(l.events, fmt.Sprintf("wrote %d %v", size, err))
}
func (l *eventLog) Holds(kind string, n int) {
	l.events = append(l.events, fmt.Sprintf("holds %d %s", n, kind))
}
func (l *eventLog) Drifted(now bool) {
	l.events = append(l.events, map[bool]string{true: "drifted", false: "repaired"}[now])
}

// expect compares the events since the last call.
func (l *eventLog) expect(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, l.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	l.events = nil
}

func TestOnlyChangesByOthersAreDrift(t *testing.T) {
	var log eventLog
	addresses := nodeaddrs.Of(addr("192.168.0.1"))
	w := newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{Options: backends.Options{Observer: &log, NodeAddresses: addresses}})
	w.must(w.syncAll())
	w.must(w.set(view(service("web"), "10.1.2.1")))
	holds := []string{"holds 1 endpoints", "holds 1 load_balancers"}
	log.events = slices.DeleteFunc(log.events, func(e string) bool { return e == "holds 0 endpoints" || e == "holds 0 load_balancers" })
	log.expect(t, append([]string{"wrote 1 <nil>", "wrote 1 <nil>"}, holds...)...)

	w.must(w.backend.Verify(t.Context()))
	log.expect(t, holds...)

	addresses.Set(addr("192.168.0.2"))
	w.verify()
	log.expect(t, append([]string{"wrote 1 <nil>", "wrote 1 <nil>"}, holds...)...) // the load balancer is replaced
	w.mustHave("10.96.0.1 source 192.168.0.2 protocol 6 port 80->8080 to 10.1.2.1")

	lbs, _ := w.hns.LoadBalancers()
	w.must(w.hns.DeleteLoadBalancer(lbs[0].ID))
	w.must(w.backend.Verify(t.Context()))
	log.expect(t, append([]string{"drifted", "wrote 1 <nil>", "repaired"}, holds...)...)
}

// nodeSource is a source of addresses. It records the Node objects that it gets.
type nodeSource struct {
	nodeaddr.Source
	nodes []*api.Node
}

func (s *nodeSource) SetNode(node *api.Node) { s.nodes = append(s.nodes, node) }

// TestSourceGetsOnlyChangedNodes checks that NodeAddresses get a Node only if it has
// changed. Otherwise, after a failed Sync, they would get the Node from before the change.
func TestSourceGetsOnlyChangedNodes(t *testing.T) {
	source := &nodeSource{Source: nodeaddr.Of(addr("192.168.0.1"))}
	w := newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{Options: backends.Options{NodeAddresses: source}})
	w.must(w.syncAll())
	w.must(w.syncBatch(false, false, view(service("web"), "10.1.2.1")))
	if len(source.nodes) != 1 {
		t.Errorf("the source got %d Node objects, want 1", len(source.nodes))
	}
}
