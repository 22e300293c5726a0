// SPDX-License-Identifier: Apache-2.0

// Package together runs functions together until one fails, and returns all errors.
package together

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// Run calls all functions concurrently and waits for them. After the first error, it ends
// the context of all functions. When this context ends, functions can return its cause
// (context.Cause). Run returns this cause only if there is no other error.
func Run(ctx context.Context, functions ...func(context.Context) error) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(functions))
	var wait sync.WaitGroup
	for i, f := range functions {
		wait.Go(func() {
			if errs[i] = f(running); errs[i] != nil {
				stop()
			}
		})
	}
	wait.Wait()
	failed := errors.Join(errs...) != nil
	cause := context.Cause(running)
	for i, err := range errs {
		errs[i] = removeCause(err, cause)
	}
	if err := errors.Join(errs...); err != nil || !failed {
		return err
	}
	return cause
}

// removeCause returns err without cause. If err joins several errors, removeCause returns
// all of them except cause.
func removeCause(err, cause error) error {
	if err == cause {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || !slices.Contains(joined.Unwrap(), cause) {
		return err
	}
	rest := slices.DeleteFunc(slices.Clone(joined.Unwrap()), func(e error) bool { return e == cause })
	return errors.Join(rest...)
}
