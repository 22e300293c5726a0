// SPDX-License-Identifier: Apache-2.0

// Package localv1 is the wire form of one node's view: the messages that a
// server sends to backends in other processes, and their conversion from and to
// package api.
//
// docs/wire.md describes the protocol. What a backend sees survives the way over
// the wire unchanged; trigger times do not travel.
//
// hack/generate generates the code of the messages.
package localv1
