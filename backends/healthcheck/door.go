// SPDX-License-Identifier: Apache-2.0

package healthcheck

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"time"
)

const (
	// minBackoff and maxBackoff limit how long a port that cannot be opened is left.
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// door is an address and port: what listens there, or why nothing does.
type door struct {
	at netip.AddrPort

	server *http.Server
	ended  chan struct{} // closed when server has

	err     error
	backoff time.Duration
	next    time.Time
}

// serve answers requests on listener until close.
func (d *door) serve(listener net.Listener, answerAt func(netip.AddrPort) (answer, bool)) {
	d.err = nil
	d.ended = make(chan struct{})
	d.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if a, ok := answerAt(d.at); ok {
				a.write(w)
			} else {
				http.Error(w, "no service has this port any more", http.StatusServiceUnavailable)
			}
		}),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 14,
		// What strangers send is nothing to log.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	go func() {
		defer close(d.ended)
		d.server.Serve(listener)
	}()
}

// failed notes that an attempt to listen failed at a time.
func (d *door) failed(at time.Time, err error) {
	d.err = err
	d.backoff = min(max(2*d.backoff, minBackoff), maxBackoff)
	d.next = at.Add(d.backoff)
}

// close closes the listener and its connections.
func (d *door) close() {
	if d.server != nil {
		d.server.Close()
		<-d.ended
	}
}
