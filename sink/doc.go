// SPDX-License-Identifier: Apache-2.0

// Package sink is the contract between a source and a sink, and the driver
// between them.
package sink
