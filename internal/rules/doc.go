// SPDX-License-Identifier: Apache-2.0

// Package rules has tests of rules for the packages of this module, such as the rules
// about imports.
package rules
