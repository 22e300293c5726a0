// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/types"
)

func TestInvalidFieldsAreReportedUntilTheyAreCorrected(t *testing.T) {
	var reports []string
	state := cluster.New(cluster.Options{MaxElements: 11, OnRefused: func(_ types.NamespacedName, reason error) {
		reports = append(reports, reason.Error())
	}})
	a, large := service("a", 1, "10.0.0.1", 1), service("a", 1, "10.0.0.1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	setService := func(s *api.Service, problems ...error) func(*cluster.Tx) {
		return func(tx *cluster.Tx) {
			tx.SetService(s)
			tx.SetServiceProblems(s.Key(), problems)
		}
	}
	setSlice := func(name, service string, problems ...error) func(*cluster.Tx) {
		return func(tx *cluster.Tx) {
			tx.SetSlice(sliceOf(name, service, 1))
			tx.SetSliceProblems(key(name), problems)
		}
	}
	x, y, weight := errors.New("x"), errors.New("y"), errors.New("weight")
	same := sliceOf("a-1", "a", 1)
	for _, step := range []struct {
		name    string
		write   func(*cluster.Tx)
		refused string // the services and their reasons
		report  string
	}{
		{"problems of a slice wait for its service", setSlice("a-1", "a", weight), "", ""},
		{"a service with two problems", setService(a, x, y), "a: invalid fields ignored: x; y; and those of 1 more objects", "invalid fields ignored: x; y; and those of 1 more objects"},
		{"the same again", setService(a, x, y), "a: invalid fields ignored: x; y; and those of 1 more objects", ""},
		{"the service is corrected", setService(a), "a: invalid fields ignored: EndpointSlice a-1: weight", "invalid fields ignored: EndpointSlice a-1: weight"},
		{"a listing without problems", func(tx *cluster.Tx) { tx.ReplaceSlices(slices.Values([]*api.EndpointSlice{same})) }, "", ""},
		{"a wrong slice", setSlice("a-1", "a", weight), "a: invalid fields ignored: EndpointSlice a-1: weight", "invalid fields ignored: EndpointSlice a-1: weight"},
		{"the slice moves to no service", setSlice("a-1", "b", weight), "", ""},
		{"the slice moves back", setSlice("a-1", "a", weight), "a: invalid fields ignored: EndpointSlice a-1: weight", "invalid fields ignored: EndpointSlice a-1: weight"},
		{"the slice is deleted", func(tx *cluster.Tx) { tx.DeleteSlice(key("a-1")) }, "", ""},
		{"problems of an unknown slice", func(tx *cluster.Tx) { tx.SetSliceProblems(key("a-9"), []error{x}) }, "", ""},
		{"a service that is also too large", setService(large, x),
			"a: too large: it needs 12 elements, more than the limit of 11: 12 of addresses × ports, 0 of endpoints × ports, 0 source ranges; it is not served; invalid fields ignored: x",
			"too large: it needs 12 elements, more than the limit of 11: 12 of addresses × ports, 0 of endpoints × ports, 0 source ranges; it is not served; invalid fields ignored: x"},
		{"the service is deleted", func(tx *cluster.Tx) { tx.DeleteService(key("a")) }, "", ""},
		{"a new service of the name", setService(a), "", ""},
		{"a long description is cut", setService(a, errors.New(strings.Repeat("é", 400))), "a: invalid fields ignored: " + strings.Repeat("é", 256), "invalid fields ignored: " + strings.Repeat("é", 256)},
	} {
		reports = nil
		state.Update(step.write)
		var refused []string
		for key, reason := range state.Snapshot().Refused.All() {
			refused = append(refused, fmt.Sprint(key.Name, ": ", reason))
		}
		if diff := gocmp.Diff(step.refused, strings.Join(refused, "\n")); diff != "" {
			t.Fatalf("%s: refused (-want +got):\n%s", step.name, diff)
		}
		if diff := gocmp.Diff(step.report, strings.Join(reports, "\n")); diff != "" {
			t.Fatalf("%s: reports (-want +got):\n%s", step.name, diff)
		}
	}
}

// TestInvalidFieldsOfASliceStay checks that the problems of a slice stay when the
// source writes the same object again, or writes other slices.
func TestInvalidFieldsOfASliceStay(t *testing.T) {
	state := cluster.New(cluster.Options{})
	invalid := sliceOf("a-1", "a", 1)
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 1))
		tx.SetSlice(invalid)
		tx.SetSliceProblems(invalid.Key(), []error{errors.New("weight")})
	})
	for _, s := range []*api.EndpointSlice{invalid, sliceOf("a-2", "a", 1), sliceOf("b-1", "b", 1)} {
		state.Update(func(tx *cluster.Tx) { tx.SetSlice(s) })
		if reason, _ := state.Snapshot().Refused.Get(key("a")); !strings.HasSuffix(reason, "EndpointSlice a-1: weight") {
			t.Errorf("reason %q after %s is set", reason, s.Name)
		}
	}
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-1", "a", 1)) })
	if reason, refused := state.Snapshot().Refused.Get(key("a")); refused {
		t.Errorf("reason %q after another version of the slice is set", reason)
	}
}

// TestCorrectedFieldsAreNotReported counts the calls of OnRefused.
func TestCorrectedFieldsAreNotReported(t *testing.T) {
	reports := 0
	state := cluster.New(cluster.Options{MaxElements: 11, OnRefused: func(types.NamespacedName, error) { reports++ }})
	x := errors.New("x")
	for i, step := range []struct {
		ports    int32
		problems []error
		want     int
	}{{1, []error{x}, 1}, {1, nil, 0}, {1, []error{x}, 1}, {12, []error{x}, 1}, {1, []error{x}, 0}, {1, nil, 0}} {
		reports = 0
		s := service("a", 1, "10.0.0.1")
		for port := range step.ports {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint(port), Protocol: api.TCP, Port: port + 1})
		}
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(s)
			tx.SetServiceProblems(s.Key(), step.problems)
		})
		if reports != step.want {
			t.Errorf("step %d: %d reports, want %d", i, reports, step.want)
		}
	}
}
