// SPDX-License-Identifier: Apache-2.0

// Package openflow speaks the part of OpenFlow 1.5 that the backend needs, with
// extensions of Open vSwitch: bundles of flows and groups, listings of both, and deletion
// of tracked connections.
//
// Matches and actions are in their wire form. The functions of this package encode them
// in the same order and form as Open vSwitch. So the flows of a listing can be compared
// with the written flows, byte by byte.
package openflow
