// SPDX-License-Identifier: Apache-2.0

// Package remote puts a process boundary between a cluster's state and the sinks
// of its nodes.
//
// A [Server] serves any number of nodes from one state:
//
//	server, err := remote.NewServer(state, remote.ServerOptions{})
//	…
//	address, err := transport.ParseAddress(transport.DefaultAddress)
//	…
//	listener, err := address.Listen(0)
//	…
//	err = server.Serve(ctx, listener)
//
// A [Client] is a [sink.Source], so that any sink runs over it:
//
//	client, err := remote.NewClient(remote.ClientOptions{NodeName: node})
//	…
//	go client.Run(ctx)
//	err = sink.Run(ctx, client, mySink, sink.Options{})
//
// What a sink is told is what it would be told in process, but for trigger times,
// which do not travel. A client that loses its server keeps its state and so its
// dataplane, comes back, and goes on from where it was; a server that has been
// started anew is a minimal difference.
//
// docs/wire.md has the protocol. Servers also serve clients of the first kpng, and
// clients follow servers of it.
//
// # What a stream costs
//
// A server keeps a position for each stream and nothing else: a revision, and the
// state's snapshot there for as long as that does not lag too far. Views are
// computed and marshalled once for all nodes that see a service alike, and their
// bytes are shared. A client that does not take what it is sent is cut off.
package remote
