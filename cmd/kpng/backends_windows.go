// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/kpng-project/kpng/app/program"

func platformBackends() []*program.Backend {
	return []*program.Backend{
		program.Kernelspace(),
		program.WindowsUserspace(),
	}
}
