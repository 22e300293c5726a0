// SPDX-License-Identifier: Apache-2.0

// Package integration tests kpng as a whole with a real API server. It runs the command
// kpng-json as a process, and proxies in the process of the test.
//
// Most tests share a server. Each has its own namespace, node and proxy name there. Tests
// that stop a server or create many objects have their own server. No test sleeps. Tests
// wait until a proxy prints, logs or applies the expected state. They fail if that takes
// longer than [patience].
package integration
