// SPDX-License-Identifier: Apache-2.0

// Package integration tests kpng as a whole with a real API server: the command kpng-json
// as a process, and proxies in the test's own process.
//
// The tests share a server, each with its own namespace, node and proxy name. Tests that
// stop a server, or fill it, have their own. Nothing sleeps: a test waits for what a
// proxy prints, logs or applies, and fails if that takes longer than [patience].
package integration
