// SPDX-License-Identifier: Apache-2.0

// Command kpng-json prints what its node has to proxy, one JSON object a
// service, at the start and again, as a whole, whenever something changes. It prints
// nothing before every service is known.
package main

import (
	"os"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
)

func main() { app.Main(sink.JSON(os.Stdout)) }
