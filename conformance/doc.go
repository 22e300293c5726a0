// SPDX-License-Identifier: Apache-2.0

// Package conformance checks with real packets that a service proxy follows
// docs/reference/semantics.md on a node. It is for the authors of backends:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
//			return mybackend.New(mybackend.Options{Table: site.Instance, NodePortAddresses: site.NodePortCIDRs})
//		}, conformance.Options{
//			Unsupported: map[conformance.Feature]string{conformance.SCTP: "the load balancer knows no SCTP"},
//		})
//	}
//
// Run builds a test world of network namespaces: a node with pods, a second node, a client
// outside, and a router between them, all with IPv4 and IPv6. It starts the sink in a
// process in the node's namespace and delivers services through kpng's own pipeline, from
// watcher to sink. Then it checks connections. Run does not change the network namespace of
// the test itself. Run requires Linux, root, and nft. The kit uses nft to add rules that do
// not belong to the proxy. The kit checks that the proxy does not change these rules. If
// iptables-legacy-save, ip6tables-legacy-save and ipset are installed, it also checks that
// clean-up leaves no rules and sets of these programs.
//
// The process with the sink is another run of the test binary, with only the test that
// calls Run. In this process, Run runs the proxy and does not return. The code of the
// test before the call of Run runs in both processes, so it should be short. Some cases
// kill the process with the sink.
//
// RunSubject tests any [Subject]. A Subject can run a proxy that is written in any
// language. The type [Command] is a Subject for programs:
//
//	manifests := filepath.Join(t.TempDir(), "manifests.json")
//	conformance.RunSubject(t, &conformance.Command{
//		Publisher: conformance.Manifests(manifests),
//		Proxy: func(site conformance.Site) *exec.Cmd {
//			return exec.Command("my-proxy", "--manifests", manifests, "--node-name", site.NodeName)
//		},
//	}, conformance.Options{})
//
// For a proxy that reads from an API server, write a [Publisher] that writes to the API
// server.
//
// # Results
//
// The name of each case is a sentence. A case has a subtest for each IP family. The
// results of all cases form a [Matrix]. The kit logs and returns it, and writes it as
// Markdown to the file Options.Matrix and as YAML to the file Options.Report. If a proxy lacks a [Feature], the test declares
// this in Options.Unsupported, with a reason. Cases that require the feature still run,
// but they do not fail the test. The matrix shows which of them pass.
//
// # Time of the checks
//
// The kit waits until the published objects are programmed. Then it checks connections
// only once, so a case fails if the proxy reports success too early. A Subject that
// implements [Settler] reports when the objects are programmed. For other subjects, the
// kit publishes a marker service after all other objects and waits until the marker
// answers.
package conformance
