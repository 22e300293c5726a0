// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/sockdiag"
	"k8s.io/klog/v2"
)

// lostConnection is an established TCP connection of a client to a lost endpoint of a
// service.
type lostConnection struct {
	flow
	identity []byte // of its entry
}

// ends are the source and the destination of a client's packets.
type ends struct{ from, to netip.AddrPort }

// resetter resets connections, even connections of clients that only wait for data:
//
//   - The kernel destroys a socket of this node itself.
//   - Another client gets a SYN+ACK segment from the address of the service. Connection
//     tracking makes no entry for this segment, and lets it pass on the client's node. The
//     client answers with an ACK segment that has its sequence numbers (RFC 5961, section 4).
//     The resetter reads this segment before the kernel translates it, and sends a reset
//     with the right sequence number to the client, and to the endpoint.
//
// Then the resetter deletes the connection-tracking entry. Until then, the entry
// translates the packets that are on their way.
type resetter struct {
	netNS int
	conn  *netfilter.Conn // stays open until the end of run, see netfilter.Conn.Close
	wake  chan struct{}   // has a value while connections may be waiting

	mu sync.Mutex
	// waiting has the connections that are not in work, by destination. The field turns
	// has the order in which the destinations take turns.
	waiting map[netip.AddrPort][]lostConnection
	turns   []netip.AddrPort
	// known has the connections that are waiting or in work.
	known map[ends]struct{}
	idle  chan struct{} // closed and replaced when known becomes empty
}

const (
	// maxWaiting limits all waiting connections, and maxWaitingOf limits the waiting
	// connections of one destination. A later pass finds further connections.
	maxWaiting, maxWaitingOf = 64 << 10, 16 << 10
	// maxInWork limits all connections in work, and maxInWorkOf limits the connections in
	// work of one destination. A client that does not answer is in work until it has got
	// all segments.
	maxInWork, maxInWorkOf = 1024, 256
	// linger is the time between a reset and the deletion of its entry.
	linger = 20 * time.Millisecond
)

// pauses are the pauses after each SYN+ACK segment. Linux answers at most one such segment
// per half second, so to repeat it sooner only helps if the first one was lost.
var pauses = [...]time.Duration{150 * time.Millisecond, 400 * time.Millisecond, 550 * time.Millisecond, 550 * time.Millisecond}

func newResetter(netNS int) *resetter {
	return &resetter{
		netNS: netNS, conn: netfilter.NewConn(netNS), wake: make(chan struct{}, 1), idle: make(chan struct{}),
		waiting: map[netip.AddrPort][]lostConnection{}, known: map[ends]struct{}{},
	}
}

// add schedules the reset of a connection. It returns false if too many are waiting.
func (r *resetter) add(c lostConnection) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := ends{c.client, c.to}
	if _, ok := r.known[key]; ok {
		return true
	}
	of := r.waiting[c.to]
	if len(r.known) >= maxWaiting || len(of) >= maxWaitingOf {
		return false
	}
	if len(of) == 0 {
		r.turns = append(r.turns, c.to)
	}
	r.waiting[c.to], r.known[key] = append(of, c), struct{}{}
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return true
}

// wait waits until all connections are reset.
func (r *resetter) wait(ctx context.Context) error {
	r.mu.Lock()
	idle, n := r.idle, len(r.known)
	r.mu.Unlock()
	if n == 0 {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for resets of connections: %w", context.Cause(ctx))
	}
}

// done forgets connections.
func (r *resetter) done(list []*inWork) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range list {
		delete(r.known, ends{w.client, w.to})
	}
	if len(r.known) == 0 {
		r.known = map[ends]struct{}{} // frees the memory
		close(r.idle)
		r.idle = make(chan struct{})
	}
}

// next takes up to n waiting connections. The map busy has the number of connections in
// work of each destination.
func (r *resetter) next(n int, busy map[netip.AddrPort]int) (list []*inWork) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var blocked []netip.AddrPort
	for len(list) < n && len(r.turns) > 0 {
		to := r.turns[0]
		r.turns = r.turns[1:]
		if busy[to] >= maxInWorkOf {
			blocked = append(blocked, to)
			continue
		}
		of := r.waiting[to]
		list = append(list, &inWork{lostConnection: of[0]})
		busy[to]++
		if of = of[1:]; len(of) > 0 {
			r.waiting[to] = of
			r.turns = append(r.turns, to)
		} else {
			delete(r.waiting, to)
		}
	}
	r.turns = append(r.turns, blocked...)
	return list
}

func (r *resetter) run(ctx context.Context) {
	defer r.conn.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		}
		r.resetAll(ctx)
	}
}

// inWork is a connection that the resetter is ending.
type inWork struct {
	lostConnection
	sent int       // number of SYN+ACK segments
	next time.Time // time of the next segment
	over time.Time // when the connection was reset; zero before
}

// resetAll resets all waiting connections.
func (r *resetter) resetAll(ctx context.Context) {
	log := klog.FromContext(ctx)
	local, err := sockdiag.Open(r.netNS)
	if err != nil {
		log.Error(err, "Cannot end connections of this node's clients")
	} else {
		defer local.Close()
	}
	net, err := openPackets(r.netNS)
	if err != nil {
		log.Error(err, "Cannot reset idle connections to lost endpoints")
	} else {
		defer net.close()
	}
	work, busy := map[ends]*inWork{}, map[netip.AddrPort]int{}
	var over []*inWork // connections in work that were reset
	var failed error
	for ctx.Err() == nil {
		added := r.next(maxInWork-len(work), busy)
		for _, w := range added {
			work[ends{w.client, w.to}] = w
			if local == nil {
				continue
			}
			destroyed, err := local.DestroyTCP(w.client, w.to)
			failed = errors.Join(failed, err)
			if destroyed {
				w.over = time.Now()
				over = append(over, w)
			}
		}
		if len(work) == 0 {
			break
		}
		if net == nil {
			// The resetter can only delete the entries. Another host may still reset the
			// clients when they send their next packets.
			over = over[:0]
			for _, w := range work {
				over = append(over, w)
			}
		} else {
			failed = errors.Join(failed, r.exchange(net, work, len(added) > 0, &over))
		}
		var ended []*inWork
		rest := over[:0]
		for _, w := range over {
			if time.Since(w.over) < linger {
				rest = append(rest, w)
				continue
			}
			ended = append(ended, w)
			delete(work, ends{w.client, w.to})
			if busy[w.to]--; busy[w.to] == 0 {
				delete(busy, w.to)
			}
		}
		over = rest
		failed = errors.Join(failed, r.end(ctx, ended))
		if failed != nil {
			log.Error(failed, "Cannot reset connections to lost endpoints")
			failed = nil
		}
	}
}

// exchange sends segments to the clients of connections, and reads answers for about a
// tick. It appends each connection that it has reset or given up to the slice over.
func (r *resetter) exchange(net *packets, work map[ends]*inWork, added bool, over *[]*inWork) (err error) {
	now := time.Now()
	if added {
		pairs := make([]uint32, 0, len(work))
		for key := range work {
			pairs = append(pairs, ports(key.from, key.to))
		}
		if err := net.accept(pairs); err != nil {
			return err
		}
	}
	open := 0
	for _, w := range work {
		switch {
		case !w.over.IsZero():
			continue
		case now.Before(w.next):
		case w.sent == len(pauses):
			w.over = now
			*over = append(*over, w)
			continue
		default:
			if e := net.send(challenge(w.to, w.client)); e != nil {
				err = fmt.Errorf("send a segment to client %s: %w", w.client, e)
			}
			w.next = now.Add(pauses[w.sent])
			w.sent++
		}
		open++
	}
	for open > 0 && time.Since(now) < tick {
		s, ok := net.receive()
		w := work[ends{s.from, s.to}]
		if !ok || w == nil || !w.over.IsZero() || s.flags&(flagACK|flagSYN|flagRST) != flagACK {
			continue
		}
		reset := segment{from: w.to, to: w.client, seq: s.ack, flags: flagRST}
		if e := net.send(reset); e != nil {
			err = fmt.Errorf("send a reset to client %s: %w", w.client, e)
			continue // the client's next answer leads to another attempt
		}
		// The endpoint may be gone, so it does not matter whether these segments reach it.
		reset = segment{from: w.back, to: w.endpoint, seq: s.seq, flags: flagRST}
		net.send(reset)
		if s.length > 0 {
			reset.seq += s.length
			net.send(reset)
		}
		w.over = time.Now()
		*over = append(*over, w)
		open--
	}
	if open == 0 {
		time.Sleep(time.Millisecond)
	}
	return err
}

// end deletes the entries of connections.
func (r *resetter) end(ctx context.Context, list []*inWork) error {
	if len(list) == 0 {
		return nil
	}
	defer r.done(list)
	byFamily := map[api.Family][][]byte{}
	for _, w := range list {
		family := api.FamilyOf(w.to.Addr())
		byFamily[family] = append(byFamily[family], w.identity)
	}
	var errs []error
	for family, identities := range byFamily {
		for len(identities) > 0 {
			n := min(batchSize, len(identities))
			_, err := deleteEntries(ctx, r.conn, family, identities[:n])
			errs = append(errs, err)
			identities = identities[n:]
		}
	}
	return errors.Join(errs...)
}
