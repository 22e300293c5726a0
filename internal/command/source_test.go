// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
)

// The shipped ClusterRole allows to list services, but not to get one.
func TestGetServiceOnlyLists(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		items := ""
		switch {
		case r.URL.Path != "/api/v1/namespaces/ns/services":
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
			return
		case r.URL.Query().Get("fieldSelector") == "metadata.name=web":
			items = `{"metadata":{"namespace":"ns","name":"web","labels":{"a":"b"}}}`
		}
		fmt.Fprintf(w, `{"kind":"ServiceList","apiVersion":"v1","items":[%s]}`, items)
	}))
	defer server.Close()
	for name, want := range map[string]bool{"web": true, "missing": false} {
		got, err := getService(t.Context(), &rest.Config{Host: server.URL}, "ns", fields.OneTermEqualSelector("metadata.name", name), func(*corev1.Service) bool { return true })
		if err != nil || (got != nil) != want || want && got.Labels["a"] != "b" {
			t.Errorf("service %s: %v, error %v", name, got, err)
		}
	}
}
