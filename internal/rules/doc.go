// SPDX-License-Identifier: Apache-2.0

// Package rules has tests of rules that the packages of this module keep: which packages
// they import, and in which groups.
package rules
