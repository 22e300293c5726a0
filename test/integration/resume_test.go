// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	corev1 "k8s.io/api/core/v1"
)

// TestReconnectedClientsReceiveChangesOnly disconnects a client and a relay from a server
// while some of 200 services change. It counts the bytes that the client or the relay
// receives after a reconnect. A restarted server does not know the resume tokens: a client
// continues by digests, and a relay gets the whole state.
func TestReconnectedClientsReceiveChangesOnly(t *testing.T) {
	const (
		services = 200
		replaced = 600 // maximum number of bytes for a changed service
	)
	t.Parallel()
	server := shared.Get(t)
	n := newTenant(t, server)
	var all []*corev1.Service
	for i := range services {
		s := newService(fmt.Sprintf("s%03d", i), n.name, servicePort("", 80, 80))
		slice := newSlice(s.Name, s, slicePorts("", 80))
		for e := range 10 {
			slice.Endpoints = append(slice.Endpoints, newEndpoint(fmt.Sprintf("10.1.%d.%d", i, e), ""))
		}
		n.put(s, slice)
		all = append(all, s)
	}
	stamp := newService("zzz-stamp", n.name, servicePort("", 1, 1))
	n.put(stamp)

	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	served := socket(t)
	serving := serve(n, kubeconfig, served)
	printer := func(api string) *prints {
		out := newPrints(n.name, stamp.Name)
		launch(t, out, quickKpngJSON(t), "--api", api, "--node-name", n.name)
		return out
	}
	direct := printer(served)
	for _, test := range []struct {
		name string
		// start starts a process that reads from the kpng server at address, and returns the
		// process's prints.
		start     func(address string) *prints
		continues bool // with a restarted server
	}{
		{"a client", printer, true},
		{"a relay", func(address string) *prints {
			relayed := socket(t)
			relay(n, address, relayed)
			return printer(relayed)
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			gate := newGate(t, served)
			out := test.start(gate.address)
			expect := func(out *prints, who string) {
				t.Helper()
				out.expect(t, n.print(n.name, n.list()), who)
			}
			// closeAndChange closes the gate. Then it changes the given number of services. Its
			// last change is to the service stamp.
			closeAndChange := func(changes int) {
				t.Helper()
				gate.close()
				for _, s := range all[:changes] {
					s.Spec.Ports[0].Port++
					n.put(s)
				}
				stamp.Spec.Ports[0].Port++
				n.put(stamp)
			}
			expect(direct, "a client that stays connected")
			expect(out, test.name)
			everything := gate.received.Load()

			for _, changes := range []int{0, 1, 10, 100} {
				closeAndChange(changes)
				expect(direct, "a client that stays connected")
				gate.reopen()
				expect(out, test.name)
				if got, most := gate.received.Load(), int64(500+changes*replaced); got > most {
					t.Errorf("%d bytes after %d changes, want at most %d", got, changes, most)
				}
			}

			closeAndChange(0)
			serving.kill(t)
			serving = serve(n, kubeconfig, served)
			expect(direct, "a client that stays connected")
			gate.reopen()
			expect(out, test.name)
			least, most := everything*3/4, everything*5/4
			if test.continues {
				least, most = 0, 500+3*replaced
			}
			if got := gate.received.Load(); got < least || got > most {
				t.Errorf("%d bytes from a restarted server, want %d to %d", got, least, most)
			}
		})
	}
}
