// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"iter"
	"maps"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/sink"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// ClientOptions configure a Client.
type ClientOptions struct {
	DialOptions
	// NodeName is the name of the node whose view the client follows.
	NodeName string
	// MaxElements limits the elements of a service (see [cluster.Options]). The client refuses a
	// larger view, and keeps the last view of the service that was small enough, if any.
	// Default: 1,000,000.
	MaxElements int
}

// Client is a [sink.Source] that follows a server's view of one node. The program has to
// call [Client.Run]. Only one goroutine at a time may call the methods of Source. All other
// methods are safe for concurrent use.
type Client struct {
	opts   ClientOptions
	dialer *transport.Dialer

	mu      sync.Mutex
	views   *revstore.Store[types.NamespacedName, *entry]
	state   *clientState
	refused map[types.NamespacedName]string // reasons, for the services that the client refuses
	changed chan struct{}                   // closed when state changes
	token   []byte                          // token of the last Sync; only Run uses it
	stale   bool                            // the server has lost its own source
	lost    time.Time                       // when the connection was lost; zero while there is one

	reader reader
}

// clientState is the client's state after a Sync.
type clientState struct {
	revision uint64 // 1 after the first Sync; each later Sync with changes adds 1
	views    *revstore.Snapshot[types.NamespacedName, *entry]
	node     *api.Node // nil if not known
}

// reader records the state that the caller of Next and Advance has received.
type reader struct {
	cursor *revstore.Cursor[types.NamespacedName, *entry]
	has    *clientState // last state that the caller received; nil if none

	// The update that the last call of Next returned, and the state after this update.
	offered *sink.Update
	state   *clientState
}

// NewClient returns a client. The client connects when Run is called.
func NewClient(opts ClientOptions) (*Client, error) {
	dialer, err := transport.NewDialer(transport.DialOptions{
		Addresses: opts.Addresses, TLS: (*transport.TLS)(opts.TLS), Insecure: opts.Insecure,
		MinBackoff: opts.MinBackoff, MaxBackoff: opts.MaxBackoff, FailFast: opts.FailFast,
	})
	if err != nil {
		return nil, err
	}
	c := &Client{opts: opts, dialer: dialer, refused: map[types.NamespacedName]string{}, changed: make(chan struct{})}
	c.views = revstore.New(revstore.Options[types.NamespacedName, *entry]{Compare: api.CompareKeys, Equal: (*entry).equal})
	c.state = &clientState{views: c.views.Snapshot()}
	c.reader.cursor = c.views.NewCursor()
	return c, nil
}

// Run follows the server until ctx ends, and then returns ctx's cause. With FailFast, it
// returns an error if no address works.
func (c *Client) Run(ctx context.Context) error { return c.dialer.Stay(ctx, c.follow) }

// follow receives the state from the server at the other end of conn, until conn fails.
func (c *Client) follow(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := localv1.NewSetsClient(conn).Watch(ctx)
	if err != nil {
		return err
	}
	defer c.disconnected()
	token := c.token
	for {
		if err := stream.Send(c.request(token)); err != nil {
			_, err = stream.Recv() // the error of Send is only EOF; Recv returns the server's error
			return err
		}
		a := newAnswer(c, klog.FromContext(ctx))
		for !a.synced {
			item, err := stream.Recv()
			if err != nil {
				return err
			}
			a.take(item)
			if err := heard(a.synced, a.stale); err != nil {
				return err
			}
		}
		c.commit(a)
		token = nil
		if a.reset {
			a.log.Info("Received full state from server", "services", len(a.services))
		}
	}
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

// staleAfter is how long the server may be unreachable before the client's state is stale.
const staleAfter = 3 * time.Minute

// Stale reports whether the client's state may be old: there has been no connection to a
// server for more than three minutes, or the server has lost its own source. It is false
// until the first answer. It is safe for concurrent use.
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

// Changed implements [sink.Source].
func (c *Client) Changed() <-chan struct{} {
	state, changed := c.get()
	if state.revision > 0 && state != c.reader.has {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return changed
}

// Next implements [sink.Source]. It never fails.
func (c *Client) Next() (*sink.Update, error) {
	state, _ := c.get()
	if state.revision == 0 {
		return nil, nil
	}
	if c.reader.state != state {
		c.reader.offered, c.reader.state = c.reader.update(state), state
	}
	return c.reader.offered, nil
}

// Advance implements [sink.Source].
func (c *Client) Advance(u *sink.Update) {
	if r := &c.reader; u == r.offered {
		r.cursor.Advance(r.state.views)
		r.has = r.state
		r.offered, r.state = nil, nil
	}
}

// Reset implements [sink.Source].
func (c *Client) Reset() {
	c.reader.cursor.Close()
	c.reader = reader{cursor: c.views.NewCursor()}
}

// Close implements [sink.Source].
func (c *Client) Close() { c.reader.cursor.Close() }

// Views returns the present views of all services, as an update with Lost set, or nil if
// the client has not received them yet. It is independent of the client's position and
// safe for concurrent use.
func (c *Client) Views() *sink.Update {
	state, _ := c.get()
	if state.revision == 0 {
		return nil
	}
	return state.all()
}

// Refused returns the reasons why the client refuses services (see
// ClientOptions.MaxElements). It is safe for concurrent use.
func (c *Client) Refused() map[types.NamespacedName]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.refused)
}

// all returns an update for a reader without a position.
func (s *clientState) all() *sink.Update {
	return &sink.Update{
		Lost: true, Revision: s.revision, Node: s.node, NodeChanged: true,
		View: func(key types.NamespacedName) *api.View {
			e, _ := s.views.Get(key)
			return e.viewOrNil()
		},
		After: func(key types.NamespacedName) iter.Seq2[types.NamespacedName, updates.View] {
			return func(yield func(types.NamespacedName, updates.View) bool) {
				for key, e := range s.views.After(key) {
					if view := e.viewOrNil(); view != nil && !yield(key, updates.ViewOf(view)) {
						return
					}
				}
			}
		},
	}
}

// update returns the changes between the reader's state and the given state.
func (r *reader) update(state *clientState) *sink.Update {
	delta := r.cursor.Until(state.views)
	u := state.all()
	u.Lost = delta.Full()
	if u.Lost {
		return u
	}
	u.NodeChanged = !state.node.Equal(r.has.node)
	var list []updates.Change
	for change := range delta.Changes() {
		if before, after := change.Old.viewOrNil(), change.New.viewOrNil(); !before.Equal(after) {
			list = append(list, updates.Change{Key: change.Key, Old: before, New: after})
		}
	}
	u.Changes = list
	return u
}

var _ sink.Source = (*Client)(nil)
