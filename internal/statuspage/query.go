// SPDX-License-Identifier: Apache-2.0

package statuspage

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/internal/explain"
	"k8s.io/apimachinery/pkg/types"
)

// maxServices limits the services in a response, and the failing services of each sink, so
// that the response stays small.
const maxServices = 1000

// query has the parameters of a request.
type query struct {
	json        bool
	about       explain.Question // the question is about one service or about all
	after       types.NamespacedName
	node, match string
	limit       int
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
	if after := values.Get("after"); after != "" { // a value of Report.Next, which is the name of a service
		var ok bool
		if q.after.Namespace, q.after.Name, ok = strings.Cut(after, "/"); !ok {
			return q, fmt.Errorf("after %q is not NAMESPACE/NAME", after)
		}
	}
	if service := values.Get("service"); service != "" {
		var err error
		if q.about, err = explain.Parse(service); err != nil || q.about.Service().Name == "" {
			return q, fmt.Errorf("service %q is not [NAMESPACE/]NAME", service)
		}
	}
	return q, nil
}
