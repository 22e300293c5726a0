// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/backends/windows/kernelspace/winhns"
)

func platformBackends() []*program.Backend {
	return []*program.Backend{
		program.Kernelspace(winhns.HNS{}),
		program.WindowsUserspace(),
	}
}
