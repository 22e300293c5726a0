// SPDX-License-Identifier: Apache-2.0

package transport

// IsRefused is isRefused, for tests with errors of other systems.
var IsRefused = isRefused
