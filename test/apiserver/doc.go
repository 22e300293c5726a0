// SPDX-License-Identifier: Apache-2.0

// Package apiserver runs a real etcd and a real kube-apiserver for tests.
//
// The go command builds both from Go modules on first use, which takes minutes. Later it
// takes them from its build cache. The processes listen only on loopback and unix
// sockets. They have their own certificate authority, use RBAC, support dual-stack
// services, and otherwise have kube-apiserver's defaults. No controller runs. So only the
// test writes EndpointSlices, and no controller deletes the objects of deleted
// namespaces.
//
// A test that needs its own server starts one:
//
//	server := apiserver.Start(t, apiserver.Options{})
//	server.Client().CoreV1().Services(server.Namespace(t)).Create(…)
//	server.APIServer.Kill(t)
//	server.APIServer.Start(t)
//
// The tests of a package can share one, which starts on first use:
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
// On Linux the processes end with the test process, however it ends. When a test fails,
// its output includes the ends of both logs, and its artifact directory (go test
// -artifacts) has the complete logs.
package apiserver
