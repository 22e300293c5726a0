// SPDX-License-Identifier: Apache-2.0

// Package importer tests what a program takes on that imports kpng as a
// library: which packages it links, and which modules it gets at another
// version than it would have without. The programs are modules of their own,
// outside this repository, so the go command does not know that the results
// depend on kpng: run with -count=1.
package importer
