// SPDX-License-Identifier: Apache-2.0

// Package apitest makes random values of api types, and random clusters, for tests. It also
// reduces random histories that fail.
package apitest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"time"

	"github.com/kpng-project/kpng/api"
)

// Random returns a value with random fields, also in nested structs. Each field is zero
// or has a value that package api allows.
func Random[T any](r *rand.Rand) T {
	var v T
	fill(r, reflect.ValueOf(&v).Elem())
	return v
}

func fill(r *rand.Rand, v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *api.IPSet:
		for range r.IntN(3) {
			x.Add(addr(r, api.IPv4))
			x.Add(addr(r, api.IPv6))
		}
		return
	case *api.Claim:
		if r.IntN(2) > 0 {
			x.IP = addr(r, family(r))
		}
		fillFields(r, v, "IP")
		return
	case *netip.Addr:
		*x = addr(r, family(r))
		return
	case *netip.Prefix:
		a := addr(r, family(r))
		*x = netip.PrefixFrom(a, r.IntN(a.BitLen()+1))
		return
	case *time.Time:
		if r.IntN(2) > 0 {
			*x = time.Unix(r.Int64N(1<<33), 0).UTC()
		}
		return
	case *api.Family:
		*x = family(r)
		return
	case *api.Algorithm:
		*x = api.Algorithm(r.IntN(3))
		return
	case *api.Protocol:
		*x = api.Protocol(r.IntN(4))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		fillFields(r, v, "")
	case reflect.Pointer:
		if r.IntN(2) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem())
		}
	case reflect.Slice:
		if n := r.IntN(4); n > 0 {
			v.Set(reflect.MakeSlice(v.Type(), n, n))
		}
		for i := range v.Len() {
			fill(r, v.Index(i))
		}
	case reflect.Map:
		m := map[string]string{}
		for range r.IntN(3) {
			m[text(r)] = text(r)
		}
		v.Set(reflect.ValueOf(m))
	case reflect.String:
		v.SetString(text(r))
	case reflect.Bool:
		v.SetBool(r.IntN(2) > 0)
	case reflect.Int32:
		v.SetInt(int64(r.Int32N(65536)))
	default:
		panic(fmt.Sprintf("apitest: cannot fill a %s", v.Type()))
	}
}

func fillFields(r *rand.Rand, v reflect.Value, except string) {
	for i := range v.NumField() {
		if v.Type().Field(i).Name != except {
			fill(r, v.Field(i))
		}
	}
}

func family(r *rand.Rand) api.Family {
	if r.IntN(2) > 0 {
		return api.IPv6
	}
	return api.IPv4
}

func addr(r *rand.Rand, f api.Family) netip.Addr {
	if f == api.IPv4 {
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(256))})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(r.IntN(256))})
}

// IPs returns the set of n addresses that begin with first.
func IPs(first string, n int) api.IPSet {
	list := make([]netip.Addr, n)
	for i := range list {
		if i == 0 {
			list[i] = netip.MustParseAddr(first)
		} else {
			list[i] = list[i-1].Next()
		}
	}
	return api.NewIPSet(list...)
}

func text(r *rand.Rand) string {
	return [...]string{"", "a", "some-name", "kubernetes.io/x", "ünïcode"}[r.IntN(5)]
}
