// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// TestEqualComparesEveryField changes each field at every depth and checks that Equal
// detects it. If Equal ignored a field, clients would miss changes of the field.
func TestEqualComparesEveryField(t *testing.T) {
	ignored := map[string]bool{
		"EndpointSlice.TriggerTime":     true,
		"View.Lost[0].Winner.Namespace": true,
		"View.Lost[0].Winner.Name":      true,
	}
	testEqual(t, ignored, (*Service).Equal)
	testEqual(t, ignored, (*EndpointSlice).Equal)
	testEqual(t, ignored, (*Node).Equal)
	testEqual(t, ignored, (*View).Equal)
	testEqual(t, ignored, (*Endpoint).Equal)
}

func testEqual[T any](t *testing.T, ignored map[string]bool, equal func(a, b *T) bool) {
	name := reflect.TypeFor[T]().Name()
	t.Run(name, func(t *testing.T) {
		full := func() *T {
			v := new(T)
			fill(reflect.ValueOf(v).Elem())
			return v
		}
		if !equal(full(), full()) {
			t.Fatalf("two equal values differ")
		}
		places := 0
		walk(reflect.ValueOf(full()).Elem(), name, func(string, reflect.Value) { places++ })
		for i := range places {
			changed, n := full(), 0
			var path string
			walk(reflect.ValueOf(changed).Elem(), name, func(p string, v reflect.Value) {
				if n == i {
					path = p
					change(v)
				}
				n++
			})
			if got := equal(full(), changed); got != ignored[path] {
				t.Errorf("Equal is %v after %s changed", got, path)
			}
			if got := equal(changed, full()); got != ignored[path] {
				t.Errorf("Equal is %v for %s with swapped arguments", got, path)
			}
		}
	})
}

// walk visits v and all its parts, innermost first.
func walk(v reflect.Value, path string, visit func(path string, v reflect.Value)) {
	switch v.Interface().(type) {
	case netip.Addr, netip.Prefix, time.Time, IPSet:
		visit(path, v)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			walk(v.Field(i), path+"."+v.Type().Field(i).Name, visit)
		}
	case reflect.Pointer:
		walk(v.Elem(), path, visit)
		visit(path, v)
	case reflect.Slice:
		walk(v.Index(0), path+"[0]", visit)
		visit(path, v)
	default:
		visit(path, v)
	}
}

// fill sets v and all its parts to nonzero values.
func fill(v reflect.Value) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.1")))
		return
	case netip.Prefix:
		v.Set(reflect.ValueOf(netip.MustParsePrefix("192.0.2.0/24")))
		return
	case IPSet:
		v.Set(reflect.ValueOf(NewIPSet(netip.MustParseAddr("192.0.2.1"))))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"key": "value"}))
	default:
		change(v)
	}
}

func change(v reflect.Value) {
	switch x := v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(x.Next()))
		return
	case netip.Prefix:
		v.Set(reflect.ValueOf(netip.PrefixFrom(x.Addr(), x.Bits()+1)))
		return
	case IPSet:
		x.Add(netip.MustParseAddr("192.0.2.2"))
		v.Set(reflect.ValueOf(x))
		return
	case time.Time:
		v.Set(reflect.ValueOf(x.Add(time.Second)))
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int32:
		v.SetInt(v.Int() + 1)
	case reflect.Uint8:
		v.SetUint(v.Uint() + 1)
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"key": "another"}))
	case reflect.Pointer, reflect.Slice:
		v.SetZero()
	default:
		panic("cannot change a value of type " + v.Type().String())
	}
}

func TestEqualOfNil(t *testing.T) {
	var none *Service
	if !none.Equal(nil) || none.Equal(&Service{}) || (&Service{}).Equal(nil) {
		t.Error("a nil Service must equal only itself")
	}
}
