// SPDX-License-Identifier: Apache-2.0

package watcher_test

import (
	"fmt"

	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A specialised proxy selects its services by their label.
func Example() {
	converter, err := watcher.New(watcher.Options{ServiceProxyName: "my-proxy"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, name := range []string{"", "my-proxy", "other-proxy"} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{watcher.LabelServiceProxyName: name}}}
		fmt.Printf("%q: %t\n", name, converter.WantsService(s))
	}
	// Output:
	// "": false
	// "my-proxy": true
	// "other-proxy": false
}
