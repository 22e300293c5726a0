// SPDX-License-Identifier: Apache-2.0

package healthcheck

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// answer is the JSON body of every response.
type answer struct {
	Service             name `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

type name struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// writeTo sends the response. The header of the response has a weight for load balancers
// (KEP 3836).
func (a answer) writeTo(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(a.LocalEndpoints))
	if a.LocalEndpoints == 0 || !a.ServiceProxyHealthy {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	json.NewEncoder(w).Encode(a)
}
