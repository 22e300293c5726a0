// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools imports the programs of containerd that the test cluster runs, so that
// go.mod lists the modules that they need.
package tools

import (
	_ "github.com/containerd/containerd/v2/cmd/containerd"
	_ "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
	_ "github.com/containerd/containerd/v2/cmd/ctr"
)
