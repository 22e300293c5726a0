// SPDX-License-Identifier: Apache-2.0

// Package deploy tests the files in cmd/kpng/deploy.
package deploy
