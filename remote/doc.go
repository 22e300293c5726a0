// SPDX-License-Identifier: Apache-2.0

// Package remote lets sinks and the watcher of the cluster run in different processes.
//
// A [Server] serves any number of nodes from one state:
//
//	server, err := remote.NewServer(state, remote.ServerOptions{})
//	…
//	listener, err := remote.Listen(remote.DefaultAddress, 0)
//	…
//	err = server.Serve(ctx, listener)
//
// A [Client] has sources for any number of sinks:
//
//	client, err := remote.NewClient(remote.ClientOptions{NodeName: node})
//	…
//	go client.Run(ctx)
//	err = sink.Run(ctx, client.Source(), mySink, sink.Options{})
//
// A client's sink receives the same changes as a sink in the server's process, but
// without trigger times. If the connection fails, the client and the dataplane keep their
// state. When the client reconnects, it resumes from its position. A restarted server
// sends everything again, but the client delivers only the differences to the sink.
//
// The function [Watch] reads the whole cluster from another server into a state, like the
// sources in the packages below watcher.
//
// docs/reference/wire.md describes the protocol. A Server also serves clients of the
// original kpng, and a Client can follow a server of the original kpng.
//
// # What a stream costs
//
// For each stream, the server keeps only a revision and the snapshot of the state at that
// revision. The server drops a snapshot that is too old. If a service looks the same to
// several nodes, the server computes and marshals the view only once. The server
// disconnects a client that does not read messages.
package remote
