// SPDX-License-Identifier: Apache-2.0

// Package importer tests the cost of importing kpng as a library: the linked packages,
// and the modules whose versions kpng raises. The programs are modules outside this
// repository, so the go command does not know that the results depend on kpng: run with
// -count=1.
package importer
