// SPDX-License-Identifier: Apache-2.0

// Package conformance checks with real packets that a service proxy does on a
// node what docs/semantics.md says. It is for the authors of backends:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
//			return mybackend.New(mybackend.Options{Table: site.Instance, NodePortAddresses: site.NodePortCIDRs})
//		}, conformance.Options{
//			Unsupported: map[conformance.Feature]string{conformance.SCTP: "the load balancer knows no SCTP"},
//		})
//	}
//
// Run builds a small world of network namespaces (a node with pods, a second
// node, a client outside, a router between them, all with IPv4 and IPv6), starts
// the sink in a process in the node's namespace, feeds it through the real
// pipeline, and sees what becomes of connections. Nothing of it touches the
// namespace of the test. It takes Linux, the rights of root, and nft, with which the kit
// puts rules of others beside those of the proxy and looks whether they stay.
//
// The process is the test binary once more, told by its environment and by
// -test.run to run the calling test: there Run becomes the proxy and does not
// return. What the test does before it calls Run is done in that process too, so
// it should be little. The process can be killed, as some cases do.
//
// RunSubject does the same with a [Subject] of the caller's: any proxy, written in
// whatever language, that can be started as a process. [Command] is one that is a
// command:
//
//	manifests := filepath.Join(t.TempDir(), "manifests.json")
//	conformance.RunSubject(t, &conformance.Command{
//		Publisher: conformance.Manifests(manifests),
//		Proxy: func(site conformance.Site) *exec.Cmd {
//			return exec.Command("my-proxy", "--manifests", manifests, "--node-name", site.NodeName)
//		},
//	}, conformance.Options{})
//
// One that reads an API server has a [Publisher] that writes there.
//
// # What comes of it
//
// Each case, named as a sentence, is a subtest for each IP family. All results
// together are a [Matrix], which is logged, returned, and written as Markdown if
// Options.Matrix says where. A proxy that does not support something declares
// the [Feature] with a reason. Cases that need it do not fail then; they run all
// the same, and the matrix tells which of them pass.
//
// # When a case is checked
//
// The kit waits until what it published is programmed, and then checks once: a
// proxy that is late fails. A Subject that is a [Settler] says when that is; for
// others the kit publishes a marker service with everything else, after everything
// else, and waits until that answers.
package conformance
