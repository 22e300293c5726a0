// SPDX-License-Identifier: Apache-2.0

package backendoptions

import (
	"iter"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/sink"
)

// Sharer is a backend whose options may be completed before it is started.
type Sharer interface {
	// SharedOptions returns the name of the backend in metrics, and the options that it reads
	// when it starts. Options that it does not support have no effect.
	SharedOptions() (name string, o *backends.Options)
}

// Backends returns the names and options of the backends that s contains, see [sink.As]. The
// outermost backend is first.
func Backends(s sink.Sink) iter.Seq2[string, *backends.Options] {
	return func(yield func(string, *backends.Options) bool) {
		for {
			b, ok := sink.As[Sharer](s)
			if !ok || !yield(b.SharedOptions()) {
				return
			}
			wrapper, ok := b.(interface{ Unwrap() sink.Sink })
			if !ok {
				return
			}
			s = wrapper.Unwrap()
		}
	}
}

// SetObserver sets the observer of the backend with the shared options o, unless the
// backend already has an observer.
func SetObserver(o *backends.Options, to backends.Observer) {
	if own := o.Observer.(*observer); own.to == nil {
		own.to = to
	}
}
