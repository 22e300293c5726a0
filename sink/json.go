// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"encoding/json"
	"io"

	"github.com/kpng-project/kpng/api"
)

// JSON returns a sink that writes to w what its node has to proxy, one JSON
// object a service and line: at the start and again, as a whole, whenever
// something changes.
func JSON(w io.Writer) Sink {
	out := json.NewEncoder(w)
	return FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
		for _, service := range services {
			if err := out.Encode(service); err != nil {
				return err
			}
		}
		return nil
	})
}
