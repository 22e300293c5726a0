// SPDX-License-Identifier: Apache-2.0

// Package apiserver runs a real etcd and a real kube-apiserver for tests.
//
// The go command builds both from Go modules on first use, which takes minutes. Later it
// takes them from its build cache. The processes listen only on loopback and unix
// sockets. The API server has its own certificate authority, uses RBAC and supports
// dual-stack services; most other flags have their defaults. No controller runs. So only
// the test writes EndpointSlices, and the objects of a deleted namespace remain.
//
// A test that needs its own server starts one:
//
//	server := apiserver.Start(t, apiserver.Options{})
//	server.Client().CoreV1().Services(server.Namespace(t)).Create(…)
//	server.APIServer.Kill(t)
//	server.APIServer.Start(t)
//
// The tests of a package can share a server, which starts on first use:
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
// On Linux the processes end when the test process ends, even after a panic or SIGKILL.
// The output of a failed test includes the last lines of both logs. The artifact
// directory of the test (go test -artifacts) has the complete logs.
package apiserver
