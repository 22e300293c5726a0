// SPDX-License-Identifier: Apache-2.0

// Package integration tests kpng as a whole with a real API server. It runs kpng-json as
// a process, and also runs proxies in the test's process.
//
// Most tests share an API server, on which each test has its own namespace, node and
// proxy name. Tests that stop a server or create many objects have their own server. No
// test sleeps. A test waits until a proxy prints, logs or applies the expected state, and
// fails if that takes longer than [patience].
package integration
