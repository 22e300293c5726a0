// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/internal/wire/localv1"
)

// Frames that are encoded with and without package proto must be equal.
func TestFramesAreProtobuf(t *testing.T) {
	for _, path := range []string{"a/b", "a/b/\xff\xfe"} {
		for _, value := range [][]byte{nil, {1}, make([]byte, 300), make([]byte, 1<<20)} {
			want := newFrame(&localv1.OpItem{Op: &localv1.OpItem_Set{Set: &localv1.Value{
				Ref: &localv1.Ref{Set: localv1.Set_FrontendsSet, Path: path}, Bytes: value,
			}}})
			if got := setFrame(localv1.Set_FrontendsSet, path, value); !bytes.Equal(got, want) {
				t.Errorf("Set of %q with %d bytes:\n%x\nwant\n%x", path, len(value), got, want)
			}
		}
	}
	service := &localv1.Service{Namespace: "n", Name: "s"}
	for _, n := range []int{0, 1, 1000} {
		whole := &localv1.WholeService{Service: service}
		var endpoints []wireEndpoint
		for i := range n {
			e := &localv1.Endpoint{Hostname: string(bytes.Repeat([]byte{'h'}, i))}
			whole.Endpoints = append(whole.Endpoints, &localv1.KeyedEndpoint{Key: "k", Endpoint: e})
			endpoints = append(endpoints, wireEndpoint{key: "k", value: localv1.Marshal(e)})
		}
		want := newFrame(&localv1.OpItem{Op: &localv1.OpItem_Replace{Replace: whole}})
		got := replaceFrame(localv1.Marshal(service), endpoints)
		if !bytes.Equal(got, want) {
			t.Errorf("Replace with %d endpoints: %d bytes, want %d", n, len(got), len(want))
		}
		if cap(got) != len(got) && cap(got) != cap(slices.Clone(got)) {
			t.Errorf("Replace with %d endpoints: %d bytes in %d", n, len(got), cap(got))
		}
	}
}

func TestLocalIsAdded(t *testing.T) {
	for _, e := range []*localv1.Endpoint{
		{},
		{Hostname: "h"},
		{IPs: &localv1.IPSet{V4: []string{"10.0.0.1"}}, Hostname: "h"},
		{IPs: &localv1.IPSet{V6: []string{"fd00::1"}}, Draining: true},
	} {
		elsewhere := localv1.Marshal(e)
		e.Local = true
		if got, want := appendLocal(nil, elsewhere), localv1.Marshal(e); !bytes.Equal(got, want) {
			t.Errorf("%v: %x, want %x", e, got, want)
		}
	}
}
