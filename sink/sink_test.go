// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/sink"
)

func TestEndpointsOfAChange(t *testing.T) {
	notReady := view(web, 1, 2)
	notReady.Endpoints[1].Ready = false
	many, flipped := &api.View{Service: view(web).Service}, view(web)
	for n := range 1000 {
		many.Endpoints = append(many.Endpoints, view(web, byte(n)).Endpoints...)
		many.Endpoints[n].PortOverrides = []api.PortName{{Name: "http", Port: int32(n + 1)}}
	}
	slices.SortFunc(many.Endpoints, func(a, b api.Endpoint) int { return ordering.Endpoints(&a, &b) })
	flipped.Endpoints = slices.Clone(many.Endpoints)
	flipped.Endpoints[500].Ready = false

	cases := []struct {
		name     string
		old, new *api.View
		want     []string
	}{
		{"a new service adds all", nil, view(web, 1, 2), []string{"none→10.0.0.1", "none→10.0.0.2"}},
		{"a deleted service removes all", view(web, 1, 2), nil, []string{"10.0.0.1→none", "10.0.0.2→none"}},
		{"both views have no endpoints", nil, nil, nil},
		{"equal views have no differences", view(web, 1), view(web, 1), nil},
		{"some are added and some removed, in order", view(web, 1, 3, 4), view(web, 2, 3, 5),
			[]string{"10.0.0.1→none", "none→10.0.0.2", "10.0.0.4→none", "none→10.0.0.5"}},
		{"a condition changes", view(web, 1, 2), notReady, []string{"10.0.0.2→10.0.0.2"}},
		{"one of a thousand endpoints changes", many, flipped, []string{
			fmt.Sprintf("%s→%[1]s", many.Endpoints[500].Addr)}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			addr := func(e *api.Endpoint) string {
				if e == nil {
					return "none"
				}
				return e.Addr.String()
			}
			var got []string
			c := sink.Change{Key: web, Old: tc.old, New: tc.new}
			for old, new := range c.Endpoints() {
				got = append(got, addr(old)+"→"+addr(new))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("endpoints (-want +got):\n%s", diff)
			}
			for range c.Endpoints() {
				break // the iterator must allow an early end of the loop
			}
		})
	}
}

func TestFailed(t *testing.T) {
	var failed sink.Failed
	failed.Add(web, nil)
	if err := failed.Err(); err != nil {
		t.Errorf("error %v without a failure", err)
	}
	failed = sink.Failed{web: nil}
	if err := failed.Err(); err != nil {
		t.Errorf("error %v although each service succeeded", err)
	}
	failed.Add(web, errBusy)
	failed.Add(dns, fmt.Errorf("lost track: %w", sink.ErrStartOver))
	err := failed.Err()
	want := "service default/dns: lost track: sink starts over; service default/web: dataplane is busy"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if !errors.Is(err, errBusy) || !errors.Is(err, sink.ErrStartOver) {
		t.Error("the error does not wrap the errors of the services")
	}
}

func TestFailedDoTurnsPanicIntoFailure(t *testing.T) {
	var failed sink.Failed
	failed.Do(web, func() error { return nil })
	if err := failed.Err(); err != nil {
		t.Errorf("error %v without a failure", err)
	}
	failed.Do(web, func() error { return errBusy })
	failed.Do(dns, func() error { panic("index out of range") })
	want := "service default/dns: panic: index out of range; service default/web: dataplane is busy"
	if err := failed.Err(); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAcknowledged(t *testing.T) {
	failed := &sink.Failed{web: errBusy}
	var none *sink.Failed
	cases := []struct {
		name       string
		err        error
		wantFailed sink.Failed
		wantOK     bool
	}{
		{"nil acknowledges everything", nil, nil, true},
		{"an error acknowledges nothing", errBusy, nil, false},
		{"failed services are excepted", failed, *failed, true},
		{"they may be wrapped", fmt.Errorf("table kpng: %w", failed), *failed, true},
		{"joined with another error they acknowledge nothing", errors.Join(failed, errBusy), nil, false},
		{"with start over they acknowledge nothing", &sink.Failed{web: sink.ErrStartOver}, nil, false},
		{"joined with nil they are excepted", errors.Join(failed, nil), *failed, true},
		{"nested joins with nil are the same", fmt.Errorf("flush: %w", errors.Join(nil, errors.Join(failed, nil))), *failed, true},
		{"several Failed are merged", errors.Join(failed, &sink.Failed{dns: errBusy}), sink.Failed{web: errBusy, dns: errBusy}, true},
		{"several Failed with several %w are merged", fmt.Errorf("%w; %w", failed, &sink.Failed{dns: errBusy}), sink.Failed{web: errBusy, dns: errBusy}, true},
		{"several %w with another error acknowledge nothing", fmt.Errorf("%w: %w", errBusy, failed), nil, false},
		{"a nested join with another error acknowledges nothing", errors.Join(fmt.Errorf("a: %w", errors.Join(failed, errBusy)), nil), nil, false},
		{"a wrapped nil acknowledges nothing", fmt.Errorf("a: %w", error(nil)), nil, false},
		{"a nil error of a service is a success", &sink.Failed{web: nil, dns: errBusy}, sink.Failed{dns: errBusy}, true},
		{"no failed services acknowledge everything", &sink.Failed{}, sink.Failed{}, true},
		{"a nil Failed acknowledges everything", none, nil, true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			got, ok := sink.Acknowledged(tc.err)
			if ok != tc.wantOK || len(got) != len(tc.wantFailed) || got[web] != tc.wantFailed[web] {
				t.Errorf("got %v, %t, want %v, %t", got, ok, tc.wantFailed, tc.wantOK)
			}
		})
	}
	errFull := errors.New("table is full")
	if got, ok := sink.Acknowledged(errors.Join(failed, &sink.Failed{web: errFull})); !ok || len(got) != 1 || !errors.Is(got[web], errBusy) || !errors.Is(got[web], errFull) {
		t.Errorf("two errors of one service: got %v, %t", got, ok)
	}
}
