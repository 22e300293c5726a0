// SPDX-License-Identifier: Apache-2.0

package transport

// IsRefused is isRefused, for tests of what other systems return.
var IsRefused = isRefused
