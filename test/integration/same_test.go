// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
)

// TestAllSourcesPrintTheSame runs kpng-json with the same 200 services from the API
// server, from manifests, and from another kpng. At the beginning and after each of 500
// changes, all prints must equal, byte for byte, a print that the test computes from the
// API server's objects.
func TestAllSourcesPrintTheSame(t *testing.T) {
	const services, changes = 200, 500
	t.Parallel()
	server := shared.Get(t)
	n := newTenant(t, server)
	r := &randomizer{n, newRandom(t), []string{n.name}, "192.0.2", services, 300}
	n.put(n.node("a"))
	for i := range services {
		n.put(r.service(i))
	}
	for range services {
		n.put(r.slice())
	}
	stamp := newService("zzz-stamp", n.name, servicePort("", 1, 1)) // the test changes the stamp, so that no print equals an earlier print
	n.put(stamp)

	printer := func(args ...string) *prints {
		out := newPrints(n.name, stamp.Name)
		launch(t, out, quickKpngJSON(t), append(args, "--node-name", n.name)...)
		return out
	}
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	watching := printer("--service-proxy-name", n.name, "--kubeconfig", kubeconfig)
	api := socket(t)
	serve(n, kubeconfig, api)
	served := printer("--api", api)
	// kpng-json reads a changed manifest after a delay. To save time, the test runs several
	// processes (type following), and changes their manifests in turn.
	type following struct {
		manifest string
		out      *prints
		want     []byte
	}
	var manifests [3]following
	for i := range manifests {
		all := n.list()
		path := n.manifest(filepath.Join(t.TempDir(), "list.json"), all)
		manifests[i] = following{path, printer("--service-proxy-name", n.name, "--manifests", path), n.print(n.name, all)}
	}

	for change := range changes + len(manifests) {
		f := &manifests[change%len(manifests)]
		f.out.expect(t, f.want, fmt.Sprintf("--manifests, %d changes ago", len(manifests)))
		if change > changes {
			continue
		}
		all := n.list()
		f.want = n.print(n.name, all)
		n.manifest(f.manifest, all)
		watching.expect(t, f.want, fmt.Sprintf("--kubeconfig after %d changes", change))
		served.expect(t, f.want, fmt.Sprintf("--api after %d changes", change))
		r.operate()
		stamp.Spec.Ports[0].Port++
		n.put(stamp)
	}
}
