// SPDX-License-Identifier: Apache-2.0

package connlimit

import (
	"fmt"
	"net"
	"testing"
)

type conn struct {
	net.Conn
	from string
}

func (c *conn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.from)} }

func TestTheNetworkWithTheMostConnectionsLosesItsOldest(t *testing.T) {
	const limit = 10
	q := NewQueue(limit)
	good := &conn{from: "10.0.0.1"}
	q.Add(good)
	var oldest *conn
	for i := range 5 * limit {
		c := &conn{from: fmt.Sprintf("fd00::%x", i+1)}
		evicted := q.Add(c)
		if i == 0 {
			oldest = c
		}
		if (evicted != nil) != (i >= limit-1) {
			t.Fatalf("connection %d: evicted %v", i, evicted)
		}
		if i == limit-1 && evicted != oldest {
			t.Errorf("evicted %v, want the oldest connection", evicted)
		}
		if evicted == good {
			t.Error("evicted the connection of another network")
		}
	}
	if other := (&conn{from: "fd00:0:0:1::1"}); q.Add(other) == nil || !q.Remove(other) {
		t.Error("the connection of another /64 is not in the queue")
	}
	if !q.Remove(good) || q.Remove(good) {
		t.Error("Remove does not report whether a connection was in the queue")
	}
	if len(q.places) > limit || len(q.byNetwork) != 1 {
		t.Errorf("%d connections of %d networks are left", len(q.places), len(q.byNetwork))
	}
}
