// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubetest"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

func serviceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: kubetest.Meta("", name), Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

// cidrWorld is a world in which FollowServiceCIDRs runs in place of Watch.
type cidrWorld struct {
	*world
	mu    sync.Mutex
	calls int
	last  []string
}

func inCIDRWorld(t *testing.T, test func(*cidrWorld)) {
	inWorld(t, Options{}, func(w *world) { test(&cidrWorld{world: w}) })
}

func (w *cidrWorld) start() {
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- FollowServiceCIDRs(ctx, w.Config(), func(list []netip.Prefix) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.calls++
			w.last = nil
			for _, c := range list {
				w.last = append(w.last, c.String())
			}
			slices.Sort(w.last)
		})
	}()
	w.stop = func() error {
		cancel()
		w.stop = nil
		if err := <-ended; err != nil {
			w.t.Errorf("FollowServiceCIDRs returns %v at its end", err)
		}
		return nil
	}
	synctest.Wait()
}

func (w *cidrWorld) expect(after string, want ...string) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if diff := cmp.Diff(want, w.last); diff != "" {
		w.t.Errorf("CIDRs after %s (-want +got):\n%s", after, diff)
	}
}

func TestServiceCIDRsAreFollowed(t *testing.T) {
	for _, onlyJSON := range []bool{false, true} {
		t.Run(fmt.Sprintf("onlyJSON=%t", onlyJSON), func(t *testing.T) {
			inCIDRWorld(t, func(w *cidrWorld) {
				w.OnlyJSON = onlyJSON
				w.Set(serviceCIDR("kubernetes", "10.96.0.0/16", "fd96::/112"))
				w.start()
				w.expect("the list", "10.96.0.0/16", "fd96::/112")
				w.Set(serviceCIDR("more", "10.97.0.0/16"), serviceCIDR("same", "10.97.0.0/16"))
				w.expect("two objects with the same CIDR", "10.96.0.0/16", "10.97.0.0/16", "10.97.0.0/16", "fd96::/112")
				w.Delete(serviceCIDR("same"))
				w.expect("the deletion of one of them", "10.96.0.0/16", "10.97.0.0/16", "fd96::/112")
				w.Set(serviceCIDR("bad", "10.98.0.0", "10.99.0.0/16"))
				w.expect("an invalid CIDR", "10.96.0.0/16", "10.97.0.0/16", "10.99.0.0/16", "fd96::/112")
				w.Delete(serviceCIDR("kubernetes"), serviceCIDR("more"), serviceCIDR("bad"))
				w.expect("the deletion of all")
			})
		})
	}
}

func TestServiceCIDRsStayDuringAnOutage(t *testing.T) {
	inCIDRWorld(t, func(w *cidrWorld) {
		w.Set(serviceCIDR("kubernetes", "10.96.0.0/16"))
		w.start()
		restore := w.Backup()
		w.Set(serviceCIDR("more", "10.97.0.0/16"))
		w.expect("a new object", "10.96.0.0/16", "10.97.0.0/16")
		w.Unplug(true)
		w.Delete(serviceCIDR("more"))
		w.Compact()
		w.advance(10 * time.Minute)
		w.expect("an outage of ten minutes", "10.96.0.0/16", "10.97.0.0/16")
		w.Unplug(false)
		w.advance(2 * time.Minute)
		w.expect("the outage", "10.96.0.0/16")
		w.Set(serviceCIDR("later", "10.98.0.0/16"))
		w.expect("a later object", "10.96.0.0/16", "10.98.0.0/16")
		restore()
		w.advance(2 * time.Minute)
		w.expect("a restore of etcd", "10.96.0.0/16")
	})
}

func TestServersWithoutServiceCIDRs(t *testing.T) {
	inCIDRWorld(t, func(w *cidrWorld) {
		log := w.bufferLog()
		w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
			return apierrors.NewGenericServerResponse(404, r.Verb, networkingv1.Resource(serviceCIDRs), "", "the server could not find the requested resource", 0, true)
		}
		w.Set(serviceCIDR("kubernetes", "10.96.0.0/16"))
		w.start()
		w.advance(time.Hour)
		if w.calls != 0 {
			t.Errorf("%d lists of CIDRs from a server without ServiceCIDRs", w.calls)
		}
		if n := strings.Count(log(), "Kubernetes has them (networking.k8s.io/v1) since v1.33"); n != 1 {
			t.Errorf("the version that has ServiceCIDRs is logged %d times, want once:\n%s", n, log())
		}
		w.Mu.Lock()
		w.Refuse = nil
		w.Mu.Unlock()
		w.advance(2 * time.Minute)
		w.expect("an upgrade of the server", "10.96.0.0/16")
	})
}

func TestMissingPermissionForServiceCIDRsIsLogged(t *testing.T) {
	inCIDRWorld(t, func(w *cidrWorld) {
		log := w.bufferLog()
		w.Refuse = forbid(serviceCIDRs)
		w.start()
		want := `grant the verbs list and watch on resource \"servicecidrs\" of API group \"networking.k8s.io\" at cluster scope`
		if !strings.Contains(log(), want) {
			t.Errorf("want an error with %s, got %s", want, log())
		}
	})
}

func TestServiceCIDRsNeedAValidConfig(t *testing.T) {
	if err := FollowServiceCIDRs(t.Context(), &rest.Config{Host: "http://a b"}, nil); err == nil {
		t.Error("no error for an invalid host")
	}
}
