// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// TestExample tests that a sink gets a service again after a failure. The source and the
// recorder replace the cluster and the dataplane.
func TestExample(t *testing.T) {
	mine := sink.FullState(func(context.Context, []*api.View) error { return nil }) // the sink under test
	busy := true
	recorder := sinktest.NewRecorder(t, sink.Func(func(ctx context.Context, c *sink.Changes) error {
		if busy {
			busy = false
			return errors.New("dataplane is busy")
		}
		return mine.Sync(ctx, c)
	}))

	source := sinktest.NewSource()
	source.Set(sinktest.View(nil, sinktest.Service("web", "10.96.0.1 80"), "10.1.0.1 10.1.0.2"))
	source.MarkSynced()
	if err := sink.Run(t.Context(), source, recorder, sink.Options{Once: true}); err != nil {
		t.Fatal(err)
	}
	if n := len(recorder.Syncs()); n != 2 {
		t.Errorf("the sink got %d Syncs, want 2", n)
	}
}
