// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

// NewWatcher is New with a clock.
var NewWatcher = newWatcher
