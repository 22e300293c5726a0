// SPDX-License-Identifier: Apache-2.0

// Package manifest checks and writes manifests, which package watcher/file reads.
package manifest

// Stdin is the path that means standard input or output.
const Stdin = "-"
