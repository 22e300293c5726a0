// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"fmt"
	"net/http/httptest"

	"github.com/kpng-project/kpng/health"
)

func ExampleHandler() {
	// A real program passes the method Health of its *kpng.Proxy.
	// This report says that not all services are programmed yet.
	h := health.Handler(func() health.Report { return health.Report{NodeEligible: true} })
	for _, path := range []string{"/livez", "/readyz"} {
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, httptest.NewRequest("GET", path, nil))
		fmt.Println(path, answer.Code)
	}
	// Output:
	// /livez 200
	// /readyz 503
}
