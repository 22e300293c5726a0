// SPDX-License-Identifier: Apache-2.0

package sink

// As finds a T in s. T is usually an interface such as [Cleaner]. It returns s if s is a T.
// Otherwise it continues with the sink that s wraps, and so on.
//
// A sink that wraps another sink has the method Unwrap() Sink, which returns the other
// sink or nil. So the wrapper need not forward the optional methods of the other sink:
// As finds the methods of the interfaces in this package, and the methods for flags and
// metrics (see package app). A wrapper may also implement one of these methods
// itself, and find the method of the other sink with As. [FullStateOf] and [Events] wrap their
// arguments in the same way. If a sink wraps a value that is not a sink, Unwrap has the
// result type any.
func As[T any](s Sink) (T, bool) {
	for v := any(s); !isNil(v); v = unwrap(v) {
		if t, ok := v.(T); ok {
			return t, true
		}
	}
	var none T
	return none, false
}

// unwrap returns the value that v wraps, or nil.
func unwrap(v any) any {
	switch v := v.(type) {
	case interface{ Unwrap() Sink }:
		return v.Unwrap()
	case interface{ Unwrap() any }:
		return v.Unwrap()
	}
	return nil
}
