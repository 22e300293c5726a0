// SPDX-License-Identifier: Apache-2.0

// Package winkernelspace tests the Windows program examples/winkernelspace under
// Wine: as it is released, with hcsshim, against libraries that hand each call of
// the Host Compute Network API to an HNS in the test, with a kpng on Linux and a
// real API server behind it.
package winkernelspace
