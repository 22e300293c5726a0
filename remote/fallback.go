// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"cmp"
	"context"
	"errors"
	"net"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/klog/v2"
)

// Fallback says how a client reads the cluster itself while no server answers.
type Fallback struct {
	// If only stale servers or no servers have answered for the time After, the client
	// uses Watch. Default: 1 minute.
	After time.Duration
	// Watch fills the state, and follows changes until ctx ends, like kube.Watch. It must
	// select the same services as the servers. The client ends ctx when a server answers
	// again.
	Watch func(ctx context.Context, state *cluster.State) error
}

const defaultFallbackAfter = time.Minute

// If a client falls back, it becomes the client of a server in its own process. It moves
// to this server, and later to another server, as it moves between other servers: it
// sends digests. It keeps its views until the first answer is complete, and only the
// differences reach the sinks.

var (
	errNoServer   = errors.New("no server answers")
	errServerBack = errors.New("a server answers again")
)

// runWithFallback follows servers. While no server answers, it follows the fallback.
func (c *Client) runWithFallback(ctx context.Context) error {
	log := klog.FromContext(ctx)
	after := cmp.Or(c.opts.Fallback.After, defaultFallbackAfter)
	for {
		if err := c.followServers(ctx, after); !errors.Is(err, errNoServer) {
			return err
		}
		log.Info("No server answers; reading the cluster from the fallback", "after", after)
		c.fallenBack.Store(true)
		err := c.fallBack(ctx)
		c.fallenBack.Store(false)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errServerBack):
			log.Info("A server answers again; leaving the fallback")
		default:
			log.Error(err, "Fallback failed; trying servers again")
		}
	}
}

// UsesFallback reports whether the client reads the cluster itself now, because no server
// answers.
func (c *Client) UsesFallback() bool { return c.fallenBack.Load() }

// followServers follows servers. It returns errNoServer when no server has answered for the
// time after.
func (c *Client) followServers(ctx context.Context, after time.Duration) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	silent := time.AfterFunc(after, func() { end(errNoServer) })
	defer silent.Stop()
	fresh := false // the server answers and is not stale
	set := func(now bool) {
		if fresh == now {
			return
		}
		if fresh = now; fresh {
			silent.Stop()
		} else {
			silent.Reset(after)
		}
	}
	return c.dialer.Stay(ctx, func(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
		defer set(false)
		return c.follow(ctx, conn, func(complete, stale bool) error {
			err := heard(complete, stale)
			if complete && err == nil {
				set(!stale)
			}
			return err
		})
	})
}

// fallBack follows the fallback until the fallback fails or a server answers. If a server
// answers, fallBack returns errServerBack.
func (c *Client) fallBack(ctx context.Context) error {
	state := cluster.New(cluster.Options{MaxElements: c.opts.MaxElements})
	server, err := NewServer(state, ServerOptions{Insecure: true}) // in memory
	if err != nil {
		return err
	}
	l := bufconn.Listen(batchBytes)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.opts.Fallback.Watch(ctx, state) })
	group.Go(func() error { return server.Serve(ctx, l) })
	group.Go(func() error { return c.followFallback(ctx, l) })
	group.Go(func() error { return c.awaitServer(ctx) })
	return group.Wait()
}

// followFallback follows the server in this process until ctx ends.
func (c *Client) followFallback(ctx context.Context, l *bufconn.Listener) error {
	conn, err := grpc.NewClient("passthrough:///fallback",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		err := c.follow(ctx, conn, func(complete, stale bool) error { return nil })
		klog.FromContext(ctx).V(2).Info("Stream of the fallback ended; opening another one", "cause", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// awaitServer tries servers until a server answers and is not stale. Then it returns
// errServerBack. The client sends its digests, so most answers are short.
func (c *Client) awaitServer(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	return c.dialer.Stay(ctx, func(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := localv1.NewSetsClient(conn).Watch(ctx)
		if err != nil {
			return err
		}
		request := c.firstRequest(nil)
		if err := stream.Send(request); err != nil {
			_, err = stream.Recv()
			return err
		}
		for {
			item, err := stream.Recv()
			if err != nil {
				return err
			}
			complete, stale := endOfAnswer(item)
			if err := heard(complete, stale); err != nil {
				return err
			}
			switch {
			case complete && stale:
				return errors.New("the server's state is stale")
			case complete:
				end(errServerBack)
				return nil
			}
		}
	})
}

// endOfAnswer reports whether a message ends an answer, and whether the server is stale.
func endOfAnswer(message *localv1.OpItem) (complete, stale bool) {
	for _, i := range append(message.GetBatch(), message) {
		if i.GetSync() != nil {
			return true, i.GetStale()
		}
	}
	return false, false
}
