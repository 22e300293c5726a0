// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools imports Helm, with which the tests install kpng's chart, so that go.mod
// lists the modules that it needs.
package tools

import _ "helm.sh/helm/v4/cmd/helm"
