// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// maxServices limits the services in a response, and the failing services of each sink, so
// that the response stays small.
const maxServices = 1000

// query has the parameters of a request.
type query struct {
	json           bool
	service, after types.NamespacedName
	node, match    string
	limit          int
}

func parseQuery(values url.Values) (query, error) {
	q := query{node: values.Get("node"), match: values.Get("match"), limit: maxServices}
	switch output := values.Get("output"); output {
	case "", "html":
	case "json":
		q.json = true
	default:
		return q, fmt.Errorf("output %q is not html or json", output)
	}
	if limit := values.Get("limit"); limit != "" {
		n, err := strconv.Atoi(limit)
		if err != nil || n < 0 {
			return q, fmt.Errorf("limit %q is not a number of services", limit)
		}
		q.limit = min(n, maxServices)
	}
	for name, to := range map[string]*types.NamespacedName{"service": &q.service, "after": &q.after} {
		text := values.Get(name)
		if text == "" {
			continue
		}
		namespace, rest, ok := strings.Cut(text, "/")
		if !ok || namespace == "" || rest == "" {
			return q, fmt.Errorf("%s %q is not NAMESPACE/NAME", name, text)
		}
		*to = types.NamespacedName{Namespace: namespace, Name: rest}
	}
	return q, nil
}
