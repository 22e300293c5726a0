// SPDX-License-Identifier: Apache-2.0

// Package winuserspace tests the Windows program winuserspace.exe under Wine in a network
// namespace. A real API server provides the services through kpng, and a replaced netsh
// really adds addresses. The program proxies between Linux programs.
package winuserspace
