// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/status"
)

func ExampleHandler() {
	write := sink.FullState(func(context.Context, []*api.View) error { return nil })
	proxy, err := kpng.New(kpng.Options{
		Manifests: "../examples/demo.yaml", NodeName: "vm-002",
		Sinks: []kpng.Sink{{Sink: write, Options: sink.Options{Once: true}}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := proxy.Run(context.Background()); err != nil {
		fmt.Println(err)
		return
	}
	answer := httptest.NewRecorder()
	status.Handler(proxy).ServeHTTP(answer, httptest.NewRequest("GET", "/status?output=json&match=we", nil))
	var page struct{ Services []struct{ Service string } }
	if err := json.Unmarshal(answer.Body.Bytes(), &page); err != nil {
		fmt.Println(err)
	}
	fmt.Println(answer.Code, page.Services)
	// Output:
	// 200 [{default/web}]
}
