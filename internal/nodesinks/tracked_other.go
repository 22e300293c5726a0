// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package nodesinks

import "github.com/kpng-project/kpng/sink"

// Only Linux has connection tracking, and the backends that use it.
func (n *Node) connections() sink.Sink        { return nil }
func (n *Node) tracked(s sink.Sink) sink.Sink { return s }
