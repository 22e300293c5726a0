// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"slices"
	"testing"

	"github.com/go-logr/logr/funcr"
)

func TestRepeatedErrorsAreRateLimited(t *testing.T) {
	log := &logBuffer{}
	e := &engine{log: funcr.New(log.write, funcr.Options{})}
	for _, message := range []string{"first", "first", "second", "first", "second"} {
		e.complain(errors.New("wrong"), message)
	}
	want := []string{`"msg"="first" "error"="wrong"`, `"msg"="second" "error"="wrong"`}
	if !slices.Equal(log.lines, want) {
		t.Errorf("logged %q, want %q", log.lines, want)
	}
}
