// SPDX-License-Identifier: Apache-2.0

package command

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestStatusIsOnlyForLocalClients(t *testing.T) {
	h := onlyLocal(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for _, test := range []struct {
		name, client, host string
		want               int
	}{
		{"loopback", "127.0.0.1:1234", "127.0.0.1:10256", 200},
		{"another loopback address", "127.8.8.8:1234", "localhost:10256", 200},
		{"IPv6", "[::1]:1234", "[::1]:10256", 200},
		{"an IPv4-mapped address", "[::ffff:127.0.0.1]:1234", "[::1]", 200},
		{"a host without a port", "127.0.0.1:1234", "localhost", 200},
		{"another machine", "192.0.2.1:1234", "127.0.0.1:10256", 403},
		{"another machine by IPv6", "[2001:db8::1]:1234", "[::1]:10256", 403},
		{"a DNS name that resolves to loopback", "127.0.0.1:1234", "evil.example:10256", 403},
		{"a DNS name without a port", "127.0.0.1:1234", "localhost.evil.example", 403},
		{"no host", "127.0.0.1:1234", "", 403},
		{"no client address", "@", "127.0.0.1:10256", 403},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := httptest.NewRequest(http.MethodGet, "/status", nil)
			req.RemoteAddr, req.Host = test.client, test.host
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			if w.Code != test.want {
				t.Errorf("status %d, want %d", w.Code, test.want)
			}
		})
	}
}
