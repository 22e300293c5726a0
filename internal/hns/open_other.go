// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package hns

import (
	"errors"
	"runtime"
)

func open() (HNS, error) {
	return nil, errors.New("open HNS: the Host Networking Service exists only on Windows, not on " + runtime.GOOS)
}
