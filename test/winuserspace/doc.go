// SPDX-License-Identifier: Apache-2.0

// Package winuserspace tests the Windows program winuserspace.exe under Wine in a network
// namespace. The services come from a real API server through kpng. A replacement of
// netsh adds addresses to an interface of the namespace. Clients and pods are Linux code
// of the test.
package winuserspace
