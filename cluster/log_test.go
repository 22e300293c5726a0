// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/klog/v2"
)

// TestTooLargeServicesAreLogged checks that an Update logs at most ten services.
func TestTooLargeServicesAreLogged(t *testing.T) {
	var log []string
	klog.SetLogger(funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	t.Cleanup(klog.ClearLogger)
	state := cluster.New(cluster.Options{MaxElements: 2})
	update := func(n int, change func(tx *cluster.Tx, s *api.Service), ports ...int32) {
		state.Update(func(tx *cluster.Tx) {
			for i := range n {
				change(tx, service(fmt.Sprintf("s%02d", i), 1, fmt.Sprint("10.0.0.", i+1), ports...))
			}
		})
	}
	set := func(tx *cluster.Tx, s *api.Service) { tx.SetService(s) }
	expect := func(what, text string, lines, more int) {
		t.Helper()
		all := strings.Join(log, "\n")
		log = nil
		if n := strings.Count(all, `"msg"="`+text); n != lines {
			t.Errorf("%s: the log has %d lines about %q, want %d:\n%s", what, n, text, lines, all)
		}
		if rest := strings.Count(all, "\n") + 1; all != "" && rest != lines+min(more, 1) || more > 0 && !strings.Contains(all, fmt.Sprintf(`"services"=%d`, more)) {
			t.Errorf("%s: want %d more services:\n%s", what, more, all)
		}
	}
	update(10, set, 1, 2, 3)
	expect("ten services", "Service too large", 10, 0)
	update(10, set, 1, 2, 3)
	expect("the same again", "Service too large", 0, 0)
	update(10, set, 1)
	expect("ten small services", "Service is no longer too large", 10, 0)
	update(12, set, 1, 2, 3)
	expect("twelve services", "Service too large", 10, 2)
	update(12, func(tx *cluster.Tx, s *api.Service) { tx.DeleteService(s.Key()) })
	expect("twelve deleted services", "Service is no longer too large", 10, 2)
	update(3, set, 1)
	update(3, func(tx *cluster.Tx, s *api.Service) { tx.SetServiceProblems(s.Key(), []error{errors.New("x")}) })
	expect("invalid fields", "Service", 0, 0)
}
