// SPDX-License-Identifier: Apache-2.0

package sink

import "github.com/kpng-project/kpng/internal/updates"

// Source provides a node's views of all services to a driver. Only packages of this module
// make sources: package feed reads a state of this process, and package remote reads a
// server. A source has one reader, usually a driver. [Driver.Run] returns an error if
// another driver is reading the source.
type Source interface {
	updates.Source
	// Close releases the source's resources. The code that created the source calls Close,
	// after the driver has ended.
	Close()
}
