// SPDX-License-Identifier: Apache-2.0

// Package conformance checks with real packets that a service proxy follows
// docs/semantics.md on a node. It is for the authors of backends:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
//			return mybackend.New(mybackend.Options{Table: site.Instance, NodePortAddresses: site.NodePortCIDRs})
//		}, conformance.Options{
//			Unsupported: map[conformance.Feature]string{conformance.SCTP: "the load balancer knows no SCTP"},
//		})
//	}
//
// Run builds a test world of network namespaces: a node with pods, a second node, a
// client outside, and a router between them, all with IPv4 and IPv6. It starts the sink
// in a process in the node's namespace, feeds it through the real pipeline, and checks
// connections. It does not change the namespace of the test. It needs Linux, root, and
// nft. With nft, the kit adds rules of another owner and checks that the proxy does not
// change them.
//
// The process is the test binary again. Its environment and -test.run make it run the
// calling test, where Run becomes the proxy and does not return. The code before the call
// of Run also runs in that process, so it should be short. Some cases kill the process.
//
// RunSubject tests a [Subject] of the caller: a proxy in any language that runs as a
// process. [Command] is a Subject that runs commands:
//
//	manifests := filepath.Join(t.TempDir(), "manifests.json")
//	conformance.RunSubject(t, &conformance.Command{
//		Publisher: conformance.Manifests(manifests),
//		Proxy: func(site conformance.Site) *exec.Cmd {
//			return exec.Command("my-proxy", "--manifests", manifests, "--node-name", site.NodeName)
//		},
//	}, conformance.Options{})
//
// A proxy that reads an API server needs a [Publisher] that writes to it.
//
// # Results
//
// Each case has a sentence as its name and is a subtest for each IP family. All results
// form a [Matrix]. The kit logs and returns it, and writes it as Markdown to the file
// Options.Matrix. A proxy that lacks a feature declares the [Feature] with a reason.
// Cases that need it still run but do not fail, and the matrix shows which of them pass.
//
// # Time of the checks
//
// The kit waits until the published objects are programmed and then checks once: a proxy
// that is late fails. A Subject that is a [Settler] reports when they are programmed. For
// others, the kit publishes a marker service after all other objects and waits until the
// marker answers.
package conformance
