// SPDX-License-Identifier: Apache-2.0

// Package integration tests kpng as a whole against a real API server: the
// command kpng-json as a process, and proxies in the test's own process.
//
// The tests share a server, each with a namespace, a node and a proxy name of
// its own; those that take a server down, or fill it, have their own. Nothing
// sleeps: a test waits for what a proxy prints, logs or applies, and fails if
// that does not come within [patience].
package integration
