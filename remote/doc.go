// SPDX-License-Identifier: Apache-2.0

// Package remote lets the sinks of nodes run in other processes than the cluster's state.
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
// A [Client] is a [sink.Source] for any sink:
//
//	client, err := remote.NewClient(remote.ClientOptions{NodeName: node})
//	…
//	go client.Run(ctx)
//	err = sink.Run(ctx, client, mySink, sink.Options{})
//
// A sink receives the same changes as a sink in the server's process. Only trigger times
// are missing, because they are not transmitted. A client that loses its server keeps its
// state, and so its dataplane. When it reconnects, it resumes from its position. From a
// restarted server it receives only the differences.
//
// docs/wire.md describes the protocol. Servers also serve clients of the original kpng,
// and clients follow its servers.
//
// # What a stream costs
//
// For each stream the server keeps only a position: a revision, and the state's snapshot
// at that revision until it is too old. The server computes and marshals each view once
// for all nodes that see a service alike, and shares the bytes. It disconnects a client
// that does not read its messages.
package remote
