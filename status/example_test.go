// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/status"
)

func ExampleHandler() {
	state := cluster.New(cluster.Options{}) // a real program passes the State of its *kpng.Proxy
	state.Update(func(tx *cluster.Tx) { tx.SetService(&api.Service{Namespace: "default", Name: "web"}) })
	state.SetSynced()

	answer := httptest.NewRecorder()
	handler := &status.Handler{NodeName: "node-1", State: state}
	handler.ServeHTTP(answer, httptest.NewRequest("GET", "/status?output=json&match=we", nil))
	var page struct{ Services []struct{ Service string } }
	if err := json.Unmarshal(answer.Body.Bytes(), &page); err != nil {
		fmt.Println(err)
	}
	fmt.Println(answer.Code, page.Services)
	// Output:
	// 200 [{default/web}]
}
