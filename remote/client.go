// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/sink"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// ClientOptions configure a Client.
type ClientOptions struct {
	DialOptions
	// NodeName names the node whose view the client follows.
	NodeName string
	// MaxElements limits the elements of a service (see [cluster.Options]). The client refuses a
	// larger view, and keeps the last smaller view of the service, if any. Default: 1,000,000.
	MaxElements int
	// If Fallback is not nil, the client uses it while no server answers. It must be nil
	// if FailFast is set.
	Fallback *Fallback
}

// Client follows a server's view of one node. The program has to call [Client.Run]. All
// methods are safe for concurrent use.
type Client struct {
	opts   ClientOptions
	dialer *transport.Dialer

	fallenBack atomic.Bool

	mu      sync.Mutex
	views   *revstore.Store[types.NamespacedName, *entry]
	state   *clientState
	refused map[types.NamespacedName]string // reasons, for the services that the client refuses
	changed chan struct{}                   // closed when state changes
	token   []byte                          // token of the last Sync; only Run uses it
	stale   bool                            // the server has lost its own source
	lost    time.Time                       // when the connection was lost; zero while the client is connected
}

// clientState is the client's state after a Sync.
type clientState struct {
	revision uint64 // 1 after the first Sync; increases by 1 with each later Sync that has changes
	views    *revstore.Snapshot[types.NamespacedName, *entry]
	node     *api.Node // nil if not known
}

// NewClient returns a client. The client connects when Run is called.
func NewClient(opts ClientOptions) (*Client, error) {
	dialer, err := opts.dialer()
	if err != nil {
		return nil, err
	}
	c := &Client{opts: opts, dialer: dialer, refused: map[types.NamespacedName]string{}, changed: make(chan struct{})}
	c.views = revstore.New(revstore.Options[types.NamespacedName, *entry]{Compare: ordering.Keys, Equal: (*entry).equal})
	c.state = &clientState{views: c.views.Snapshot()}
	return c, nil
}

// Source returns a new source of the client's views, for one driver. Several sources of a
// client share its connection. A source may be created and closed at any time.
func (c *Client) Source() sink.Source { return &source{client: c, cursor: c.views.NewCursor()} }

// Run follows the server until ctx ends, and then returns ctx's cause. With FailFast, it
// returns an error if no address works.
func (c *Client) Run(ctx context.Context) error {
	if c.opts.Fallback != nil && !c.opts.FailFast {
		return c.runWithFallback(ctx)
	}
	return c.dialer.Stay(ctx, c.follow)
}

// follow receives the state from the server at the other end of conn, until conn fails.
func (c *Client) follow(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := localv1.NewSetsClient(conn).Watch(ctx)
	if err != nil {
		return err
	}
	defer c.disconnected()
	request := c.firstRequest(c.token)
	buckets := bucketCount(request.Have)
	for {
		if err := stream.Send(request); err != nil {
			_, err = stream.Recv() // the error of Send is only EOF; Recv returns the server's error
			return err
		}
		a := newAnswer(c, klog.FromContext(ctx), buckets)
		for !a.synced {
			item, err := stream.Recv()
			if err != nil {
				return err
			}
			if err := a.take(item); err != nil {
				return err
			}
			if err := heard(a.synced, a.stale); err != nil {
				return err
			}
		}
		c.commit(a)
		request = c.request(nil)
		if a.reset {
			a.log.Info("Received full state from server", "services", len(a.services))
		}
	}
}

// firstRequest returns the first request on a stream.
func (c *Client) firstRequest(token []byte) *localv1.WatchReq {
	state, _ := c.get()
	request := c.request(token)
	request.Packed, request.Have = true, state.digests()
	return request
}

// request returns a request for new state. After the first request on a stream, token is
// nil.
func (c *Client) request(token []byte) *localv1.WatchReq {
	if token == nil {
		token = []byte{}
	}
	return &localv1.WatchReq{
		NodeName: c.opts.NodeName, AllEndpoints: true, OwnNode: true, Batches: true, Resumption: &localv1.WatchReq_Resume{Resume: token},
	}
}

// commit applies a complete answer to the client's state.
func (c *Client) commit(a *answer) {
	c.token = a.token
	if a.reset {
		c.views.Replace(a.entries())
	} else {
		for key, d := range a.services {
			if e := a.close(key, d); e != nil {
				c.views.Set(key, e)
			} else {
				c.views.Delete(key)
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stale, c.lost = a.stale, time.Time{}
	if a.reset {
		clear(c.refused)
	}
	for key := range a.services {
		delete(c.refused, key)
	}
	maps.Copy(c.refused, a.refused)
	now := &clientState{c.state.revision + 1, c.views.Snapshot(), c.state.node}
	if a.nodeNamed {
		now.node = a.node
	}
	if c.state.revision > 0 && now.views.Revision() == c.state.views.Revision() && now.node.Equal(c.state.node) {
		return
	}
	c.state = now
	close(c.changed)
	c.changed = make(chan struct{})
}

// disconnected records the loss of the connection.
func (c *Client) disconnected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost.IsZero() {
		c.lost = time.Now()
	}
}

// After the time staleAfter without a server, the client's state, or the state that Watch
// fills, is stale.
const staleAfter = 3 * time.Minute

// Stale reports whether the client's state may be old: there has been no connection to a
// server for more than three minutes, or the server has lost its own source. It is false
// until the first answer.
func (c *Client) Stale() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.revision > 0 && (c.stale || !c.lost.IsZero() && time.Since(c.lost) >= staleAfter)
}

// get returns the client's state and a channel that closes when the state changes.
func (c *Client) get() (*clientState, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state, c.changed
}

// Node returns the Node object of the client's node. The result is nil before the first
// answer, and if the server does not know the node.
func (c *Client) Node() *api.Node {
	state, _ := c.get()
	return state.node
}

// Refused returns the reasons why the client refuses services (see
// ClientOptions.MaxElements).
func (c *Client) Refused() map[types.NamespacedName]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.refused)
}
