// SPDX-License-Identifier: Apache-2.0

// Package winuserspace tests the Windows program winuserspace.exe under Wine in a network
// namespace. A real API server provides the services through kpng. A replacement of netsh
// adds addresses to an interface of the namespace. The program proxies between Linux
// programs.
package winuserspace
