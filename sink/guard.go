// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"
)

// guard calls a method of the sink and makes an error of a panic.
func guard(ctx context.Context, method string, f func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic in %s: %v", method, r)
			klog.FromContext(ctx).Error(err, "The sink panicked", "stack", string(debug.Stack()))
		}
	}()
	return f(ctx)
}
