// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Pass helps a sink that keeps records of services. At the end of a pass, it reports
// which services are stale. The package comment shows how to use it. The zero value is
// ready to use.
//
// Pass has the keys of services delivered since the pass began, except deleted services.
type Pass struct {
	delivered map[types.NamespacedName]struct{}
	last      bool
}

// Begin records the services of c. Call it once at the start of each Sync.
func (p *Pass) Begin(c *Changes) {
	if c.First || p.delivered == nil {
		p.delivered = map[types.NamespacedName]struct{}{}
	}
	p.last = c.Last
	for s := range c.Services {
		if s.New == nil && !c.Last {
			// A deleted service is stale, unless its deletion failed and the last batch names it.
			delete(p.delivered, s.Key)
		} else {
			p.delivered[s.Key] = struct{}{}
		}
	}
	for _, key := range c.Failing {
		p.delivered[key] = struct{}{}
	}
}

// Stale reports whether the sink has to prune the records of the service with this key.
// In a Sync with Changes.Last, it returns true if the service was not delivered in this
// pass and is not in Changes.Failing. In other Syncs, it returns false.
func (p *Pass) Stale(key types.NamespacedName) bool {
	_, delivered := p.delivered[key]
	return p.last && !delivered
}

// Forwarder implements all optional methods of a sink, such as those of [Starter] and
// [Verifier], and forwards them to the value To. A sink that wraps another sink embeds a
// Forwarder and implements Sync.
//
// If To lacks a method, that method of the Forwarder does nothing and returns nil or 0.
type Forwarder struct{ To any }

// Start implements [Starter].
func (f Forwarder) Start(ctx context.Context) error {
	if s, ok := f.To.(Starter); ok {
		return s.Start(ctx)
	}
	return nil
}

// Stop implements [Stopper].
func (f Forwarder) Stop(ctx context.Context) error {
	if s, ok := f.To.(Stopper); ok {
		return s.Stop(ctx)
	}
	return nil
}

// StopTimeout implements [Drainer].
func (f Forwarder) StopTimeout() time.Duration {
	if s, ok := f.To.(Drainer); ok {
		return s.StopTimeout()
	}
	return 0
}

// Cleanup implements [Cleaner].
func (f Forwarder) Cleanup(ctx context.Context) error {
	if s, ok := f.To.(Cleaner); ok {
		return s.Cleanup(ctx)
	}
	return nil
}

// Verify implements [Verifier].
func (f Forwarder) Verify(ctx context.Context) error {
	if s, ok := f.To.(Verifier); ok {
		return s.Verify(ctx)
	}
	return nil
}

// VerifyInterval implements [Poller].
func (f Forwarder) VerifyInterval() time.Duration {
	if s, ok := f.To.(Poller); ok {
		return s.VerifyInterval()
	}
	return 0
}

func (f Forwarder) forwardsTo() any { return f.To }

// CleanerOf returns s as a [Cleaner], or nil if s is no Cleaner. A sink that embeds a
// [Forwarder] always has a method Cleanup, but counts as a Cleaner only if its value To
// is a Cleaner.
func CleanerOf(s any) Cleaner {
	if f, ok := s.(interface{ forwardsTo() any }); ok && CleanerOf(f.forwardsTo()) == nil {
		return nil
	}
	c, _ := s.(Cleaner)
	return c
}
