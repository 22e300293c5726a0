// SPDX-License-Identifier: Apache-2.0

// Package winkernelspace tests the Windows program examples/winkernelspace under Wine.
// The program is unchanged and uses hcsshim. The DLLs of the Host Compute Network API are
// replaced by DLLs that send each call to a simulated HNS in the test. The services come
// from a real API server and a kpng server on Linux.
package winkernelspace
