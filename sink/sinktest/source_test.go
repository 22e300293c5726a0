// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

func version(v *api.View) string {
	if v == nil {
		return "none"
	}
	return v.Service.Labels["version"]
}

// describe returns an update as one line.
func describe(u *updates.Update) string {
	if u == nil {
		return "nil"
	}
	b := &strings.Builder{}
	fmt.Fprintf(b, "revision %d", u.Revision)
	if u.Lost {
		b.WriteString(" lost")
	}
	changes := u.Changes
	if u.Lost {
		for key, v := range u.After(types.NamespacedName{}) {
			changes = append(changes, updates.Change{Key: key, New: v.Get()})
		}
	}
	for _, c := range changes {
		fmt.Fprintf(b, " %s %s→%s", c.Key.Name, version(c.Old), version(c.New))
		if !c.TriggerTime.IsZero() {
			fmt.Fprintf(b, " since %d", c.TriggerTime.Unix())
		}
	}
	if u.NodeChanged && !u.Lost {
		b.WriteString(" node")
	}
	return b.String()
}

func isChanged(s *sinktest.Source) bool {
	select {
	case <-s.Changed():
		return true
	default:
		return false
	}
}

func TestSource(t *testing.T) {
	src := sinktest.NewSource()
	var u *updates.Update
	step := func(what string, changed bool, want string, do func()) {
		t.Helper()
		do()
		if got := isChanged(src); got != changed {
			t.Errorf("%s: changed is %t", what, got)
		}
		var err error
		if u, err = src.Next(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, describe(u)); diff != "" {
			t.Errorf("%s: update (-want +got):\n%s", what, diff)
		}
	}
	advance := func() { src.Advance(u) }

	step("not synced", false, "nil", func() { src.Set(view(b, "1"), view(a, "1")) })
	step("synced", true, "revision 2 lost a none→1 b none→1", src.MarkSynced)
	step("not acknowledged", true, "revision 3 lost a none→2 b none→1", func() { src.Set(view(a, "2")) })
	step("acknowledged", false, "revision 3", advance)
	step("equal", false, "revision 3", func() { src.Set(view(a, "2")); src.Delete(key("x")); src.SetNode(nil) })
	step("changed twice", true, "revision 5 a 2→4", func() { src.Set(view(a, "3")); src.Set(view(a, "4")) })
	before := u
	step("changed after the update and acknowledged", true, "revision 6 a 4→5", func() { src.Set(view(a, "5")); src.Advance(u) })
	if got := version(before.View(a)); got != "4" || before.View(key("x")) != nil {
		t.Errorf("an update of revision 5 has version %s of a", got)
	}
	step("deleted, and another service added and deleted", true, "revision 9 a 4→none", func() {
		src.Delete(a)
		src.Set(view(key("x"), "1"))
		src.Delete(key("x"))
	})
	step("acknowledged again", false, "revision 9", advance)
	step("the node", true, "revision 10 node", func() { src.SetNode(&api.Node{Name: "n"}) })
	step("the node is unchanged again", true, "revision 11", func() { src.SetNode(nil) })
	step("triggered", true, "revision 14 b 1→4 since 5", func() {
		src.SetTriggered(time.Unix(7, 0), view(b, "2"))
		src.SetTriggered(time.Unix(5, 0), view(b, "3"))
		src.Set(view(b, "4"))
	})
	step("lagging", true, "revision 14 lost b none→4", src.Reset)
	step("acknowledged once more", false, "revision 14", advance)
}
