// SPDX-License-Identifier: Apache-2.0

// Package importer tests the cost of importing kpng as a library. It checks the linked
// packages, and the modules whose versions kpng raises. Run the tests with -count=1. They
// build modules outside this repository, so the go command does not notice that their
// results depend on kpng.
package importer
