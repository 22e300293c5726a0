// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools imports Helm, so that go.mod lists the modules that Helm needs. The
// tests install kpng's chart with Helm.
package tools

import _ "helm.sh/helm/v4/cmd/helm"
