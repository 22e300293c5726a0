// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/cluster"
)

// TestLongOutageMakesStateStale reports results of requests, one per minute, and checks
// half a minute after each result whether the state is stale.
func TestLongOutageMakesStateStale(t *testing.T) {
	for _, test := range []struct {
		name     string
		after    time.Duration
		outcomes string // one letter per request: s for services, n for nodes, . for none; a capital letter if the request succeeds
		want     string // one letter per request: T if the state is stale half a minute later, else F
	}{
		{"a long outage", 0, "sssss", "FFFTT"},
		{"a long outage, and recovery", 0, "ssssS", "FFFTF"},
		{"two short outages", 0, "sssSsss", "FFFFFFF"},
		{"an outage of one of two resources", 0, "sNsNsNsNS", "FFFTTTTTF"},
		{"an outage of the other resource", 0, "NNnnnnNN", "FFFFFTFF"},
		{"a state that is stale earlier", time.Minute, "sss", "FTT"},
		{"an outage without a second request", 0, "s....S", "FFFTTF"},
		{"a request just in time", 0, "s.S....", "FFFFFFF"},
		{"outages of both resources", time.Minute, "sn.S.N.", "FTTTTFF"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &watch{opts: Options{StaleAfter: test.after}, state: cluster.New(cluster.Options{}), outages: map[string]*outage{}}
				got := ""
				for _, o := range test.outcomes {
					resource := map[rune]string{'s': services, 'S': services, 'n': nodes, 'N': nodes}[o]
					if o != '.' {
						var err error
						if o == 's' || o == 'n' {
							err = errWatchEnded
						}
						w.outcome(resource, err)
					}
					time.Sleep(30 * time.Second)
					got += map[bool]string{true: "T", false: "F"}[w.state.Snapshot().Stale]
					time.Sleep(30 * time.Second)
				}
				if got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
			})
		})
	}
}

func TestEndedWatchLeavesStaleFlag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatch(t.Context(), cluster.New(cluster.Options{}), Options{})
		w.outcome(services, errWatchEnded)
		w.close()
		time.Sleep(time.Hour)
		if w.state.Snapshot().Stale {
			t.Error("the state became stale after the end of Watch")
		}
	})
}

func TestSourceErrorIsThatOfTheLastRequest(t *testing.T) {
	w := newWatch(t.Context(), cluster.New(cluster.Options{}), Options{})
	defer w.close()
	refused, forbidden := errors.New("connection refused"), errors.New("forbidden")
	for i, step := range []struct {
		resource  string
		err, want error
	}{
		{services, errWatchEnded, nil}, {services, refused, refused}, {nodes, forbidden, forbidden}, {services, errWatchEnded, forbidden},
		{nodes, nil, refused}, {services, forbidden, forbidden}, {services, nil, nil}, {nodes, nil, nil},
	} {
		w.outcome(step.resource, step.err)
		if got := w.state.SourceError(); got != step.want {
			t.Errorf("step %d: source error %v, want %v", i, got, step.want)
		}
	}
}
