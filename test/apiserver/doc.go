// SPDX-License-Identifier: Apache-2.0

// Package apiserver runs a real etcd and a real kube-apiserver for tests.
//
// Both are built from Go modules by the go command when they are first asked
// for, which takes minutes, and come from its build cache from then on. What is
// started listens on loopback and unix sockets alone, has a certificate
// authority of its own, authorises by RBAC, serves dual-stack services and
// otherwise has kube-apiserver's defaults. No controller runs: nobody but the
// test writes EndpointSlices, and namespaces are not emptied when they go.
//
// A test that wants a server to itself starts one:
//
//	server := apiserver.Start(t, apiserver.Options{})
//	server.Client().CoreV1().Services(server.Namespace(t)).Create(…)
//	server.APIServer.Kill(t)
//	server.APIServer.Start(t)
//
// The tests of a package share one, started by the first that asks:
//
//	var shared apiserver.Shared
//
//	func TestMain(m *testing.M) { os.Exit(shared.Run(m)) }
//
//	func TestServices(t *testing.T) {
//		server := shared.Get(t)
//		…
//	}
//
// On Linux the processes die with the test process, however it ends. When a
// test fails, the ends of both logs are in its output, and the whole of them in
// its artifact directory (go test -artifacts).
package apiserver
