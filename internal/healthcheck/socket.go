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
	// minBackoff and maxBackoff limit the wait before the next attempt to open a failed
	// port.
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// socket is an address and port. It has a server, or the error of the last attempt to
// listen.
type socket struct {
	at netip.AddrPort

	server *http.Server
	ended  chan struct{} // closed when server has ended

	err     error
	backoff time.Duration
	next    time.Time
}

// serve answers requests on listener until close is called.
func (d *socket) serve(listener net.Listener, answerAt func(netip.AddrPort) (answer, bool)) {
	d.err = nil
	d.ended = make(chan struct{})
	d.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if a, ok := answerAt(d.at); ok {
				a.writeTo(w)
			} else {
				http.Error(w, "no service uses this port any longer", http.StatusServiceUnavailable)
			}
		}),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 14,
		// Do not log the errors of invalid requests.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	go func() {
		defer close(d.ended)
		d.server.Serve(listener)
	}()
}

// recordFailure records a failed attempt to listen.
func (d *socket) recordFailure(at time.Time, err error) {
	d.err = err
	d.backoff = min(max(2*d.backoff, minBackoff), maxBackoff)
	d.next = at.Add(d.backoff)
}

// close closes the listener and its connections.
func (d *socket) close() {
	if d.server != nil {
		d.server.Close()
		<-d.ended
	}
}
