// SPDX-License-Identifier: Apache-2.0

// Package listwatch makes ListWatches without streaming lists. A streaming list sends a
// watch event for each object. These events cost the client and the server more CPU time
// than a list.
package listwatch

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Plain is a ListWatch without streaming lists.
type Plain struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported makes reflectors of client-go v0.35 and later use lists.
func (Plain) IsWatchListSemanticsUnSupported() bool { return true }

// New returns a ListWatch with these functions.
func New(list cache.ListWithContextFunc, start cache.WatchFuncWithContext) Plain {
	return Plain{&cache.ListWatch{
		ListWithContextFunc: list,
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if options.SendInitialEvents != nil {
				// Reflectors of client-go v0.34 then use lists. A server older than v1.27 ignores
				// the option, so the reflector would wait forever for the end of the list.
				return nil, apierrors.NewBadRequest("streaming lists are not used")
			}
			return start(ctx, options)
		},
	}}
}
