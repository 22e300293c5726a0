// SPDX-License-Identifier: Apache-2.0

// Package importer tests the cost of importing kpng as a library. It checks which
// packages a program links, and which modules get a newer version because of kpng. Run
// the tests with -count=1. The tests build modules outside this repository, so the go
// command's cache does not know that their results depend on kpng.
package importer
