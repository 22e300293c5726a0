// SPDX-License-Identifier: Apache-2.0

package transport

// Tests call IsRefused with errors of other operating systems.
var IsRefused = isRefused
