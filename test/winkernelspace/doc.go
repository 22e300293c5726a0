// SPDX-License-Identifier: Apache-2.0

// Package winkernelspace tests the Windows program examples/winkernelspace under Wine.
// The program is unchanged and uses hcsshim. Replaced libraries pass each call of the
// Host Compute Network API to an HNS in the test. A kpng on Linux and a real API server
// provide the services.
package winkernelspace
