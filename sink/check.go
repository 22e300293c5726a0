// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
)

// Validate returns an error if the source or the sink is nil, or an option is invalid.
// [Driver.Run] returns the same error.
func (d *Driver) Validate() error {
	switch {
	case isNil(d.src):
		return fmt.Errorf("%s: the source is nil", d.label())
	case d.sink == nil:
		return fmt.Errorf("%s is nil", d.label())
	case isNil(d.sink):
		return fmt.Errorf("%s is a nil %T; FullState and Events return a nil Func for a nil argument", d.label(), d.sink)
	}
	if err := d.opts.validate(); err != nil {
		return fmt.Errorf("%s: %w", d.label(), err)
	}
	return nil
}

func (o Options) validate() error {
	var errs []error
	if o.MinInterval < 0 {
		errs = append(errs, fmt.Errorf("option MinInterval is negative: %v", o.MinInterval))
	}
	if o.BatchSize < 0 {
		errs = append(errs, fmt.Errorf("option BatchSize is negative: %d", o.BatchSize))
	}
	return errors.Join(errs...)
}

// isNil reports whether v is nil, or is a nil pointer or function in an interface.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return v == nil || (r.Kind() == reflect.Pointer || r.Kind() == reflect.Func) && r.IsNil()
}

// inUse maps the sources and sinks of running drivers to the names of these drivers. It is
// global, because the sources and sinks are values of other packages.
var inUse sync.Map

// use records that the driver uses its source and its sink. It returns an error if another
// running driver uses one of them. The caller calls release when the driver has ended.
func (d *Driver) use() (release func(), err error) {
	var used []any
	release = func() {
		for _, v := range used {
			inUse.Delete(v)
		}
	}
	values := []any{d.src}
	for s := any(d.sink); !isNil(s); s = unwrap(s) {
		values = append(values, s)
	}
	for i, v := range values {
		if !hasIdentity(v) {
			continue
		}
		if other, taken := inUse.LoadOrStore(v, d.label()); taken {
			release()
			what := "sink"
			if i == 0 {
				what = "source"
			}
			return nil, fmt.Errorf("%s: another driver (%s) uses the same %s %T; each driver needs its own", d.label(), other, what, v)
		}
		used = append(used, v)
	}
	return release, nil
}

// hasIdentity reports whether v is a pointer that differs from the pointers to all
// other variables. Pointers to values of size 0 may all be equal.
func hasIdentity(v any) bool {
	t := reflect.TypeOf(v)
	return t.Kind() == reflect.Pointer && t.Elem().Size() > 0
}
