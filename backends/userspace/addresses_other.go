// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"

	"github.com/kpng-project/kpng/backends/userspace/internal/netif"
)

// platformOptions are the names of the shared options that the dataplane supports only on
// this platform.
var platformOptions []string

// hostAddresses returns what makes addresses local as the options say, or nil if they do
// not enable that. It sets the default of Interface.
func hostAddresses(o *Options) (addresses, error) {
	if !o.AddAddresses {
		return nil, nil
	}
	if runtime.GOOS != "windows" {
		return nil, fmt.Errorf("option AddAddresses on %s: %w", runtime.GOOS, errors.ErrUnsupported)
	}
	o.Interface = cmp.Or(o.Interface, "vEthernet (HNS Internal NIC)")
	a, err := netif.New(o.Interface, o.StateFile)
	if err != nil {
		return nil, err
	}
	return a, nil
}
