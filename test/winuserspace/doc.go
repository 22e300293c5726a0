// SPDX-License-Identifier: Apache-2.0

// Package winuserspace tests the Windows program winuserspace.exe, which runs
// under Wine in a network namespace: fed by a real API server through kpng, with a
// netsh that really adds addresses, it proxies between Linux programs.
package winuserspace
