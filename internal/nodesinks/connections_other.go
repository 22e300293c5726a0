// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package nodesinks

import (
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// connections returns nil, because only backends for Linux use connection tracking.
func connections(*Options, nodeaddr.Source) sink.Sink { return nil }
